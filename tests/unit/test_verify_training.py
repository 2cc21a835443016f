"""`gyre verify --training`: the exactness oracle on a user's own run; each kind of fault is caught and named."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import gyre_data
from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_data.store import open as open_run
from gyre_train import exactness
from gyre_train.exactness import verify_training
from gyre_train.pack import Pack
from gyre_train.plan import Plan, Sharing, plan
from tests.support.training import recorded_run, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return recorded_run(tmp_path_factory.mktemp("runs") / "r", model)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-9)])
def test_a_recorded_run_is_exact(model: Path, run: Path, dtype: str, bound: float) -> None:
    report = verify_training(run, model, dtype=dtype)
    assert report.exact
    assert 0 < report.worst <= bound == report.bound
    assert (report.kind, report.executions, report.of_executions) == ("sequence", 4, 4)
    admitted = gyre_data.admit([open_run(run)])
    assert report.trained_tokens == admitted.num_owned
    assert report.tree_tokens < report.row_tokens
    assert any(d.name == "model.embed_tokens.weight" for d in verify_training(run, model, shown=100).gradient)


def test_the_command_names_what_differs(model: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["verify", str(run), "--training", "--model", str(model)]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["exact"]
    execution, call, offset = told["logprob"][0]["name"].split(":")
    tree = open_run(run)[execution].tree
    assert int(offset) < len(tree.ids(tree.output(tree.call(call))))

    spoil(monkeypatch, lambda pack: dataclasses.replace(pack, position_T=pack.position_T * 0))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "NOT EXACT: largest difference" in done.output
    assert f"next: gyre verify {run} --training --model {model} --dtype float64" in done.output
    assert re.search(r"\be_\w+:c_\w+:\d+\n", done.output)
    assert re.search(r"\bmodel\.\S+\.weight\n", done.output)


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Change every pack that shares prefixes; rows stay right."""

    def changed(trees: Any, *, tokens: int, sharing: Sharing) -> Plan:
        made = plan(trees, tokens=tokens, sharing=sharing)
        return made if sharing is Sharing.ROWS else dataclasses.replace(made, packs=tuple(map(change, made.packs)))

    monkeypatch.setattr(exactness, "plan", changed)


def seeing_all(pack: Pack) -> Pack:
    """A mask fault: siblings see each other, as in a plain causal row."""
    start, end = (np.array([value], np.int32) for value in (0, pack.num_tokens))
    return dataclasses.replace(
        pack, segments=dataclasses.replace(pack.segments, start_S=start, end_S=end, parent_S=start - np.int32(1))
    )


def reweighted(pack: Pack) -> Pack:
    """A weight fault: one token counts twice."""
    weight_E = pack.weight_E.copy()
    weight_E[0] *= 2
    return dataclasses.replace(pack, weight_E=weight_E)


@pytest.mark.parametrize(
    ("fault", "seen_in"),
    [
        (lambda pack: dataclasses.replace(pack, position_T=pack.position_T + (pack.position_T > 9)), "logprob"),
        (seeing_all, "logprob"),
        (reweighted, "derivative"),
        (reweighted, "loss"),
        (reweighted, "gradient"),
    ],
    ids=["position", "mask", "weight of a token", "weight in the loss", "weight in a gradient"],
)
def test_a_fault_is_caught(model: Path, run: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, seen_in: str) -> None:
    spoil(monkeypatch, fault)
    report = verify_training(run, model)
    assert not report.exact
    assert getattr(report, seen_in)[0].relative > 1e-4


def test_values_that_are_no_number_are_not_exact(model: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = exactness.edge_logprobs
    monkeypatch.setattr(exactness, "edge_logprobs", lambda *a, **k: (real(*a, **k)[0] * torch.nan, None))
    report = verify_training(run, model)
    assert not report.exact
    assert report.worst == float("inf")


def test_equal_scores_are_compared_by_sft(model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model, groups=1)
    for e in gyre_data.admit([open_run(run)]).executions:
        gyre_data.score(run, e.execution_id, 0.5, evaluator="check")
    report = verify_training(run, model, limit=1)
    assert (report.kind, report.executions, report.of_executions) == ("sft", 1, 2)
    assert report.exact


def test_wrong_use_says_what_to_do(model: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match="wanted one of float32, float64, got bfloat16"):
        verify_training(run, model, dtype="bfloat16")
    done = CliRunner().invoke(app, ["verify", str(run), "--training"])
    assert "wanted --training and --model together" in str(done.exception)
