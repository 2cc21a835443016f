"""docs/stats.md: every key of the JSON is defined there, its figures are ours, its code runs."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gyre_data.distributions import SECOND_EDGES, TOKEN_EDGES
from gyre_data.forecast import WORTH
from gyre_data.main import app
from gyre_data.run_stats import TOOL_MESSAGES, stats
from gyre_data.tools import ToolCounts
from gyre_data.types import Step, TeacherLogprobs
from tests.support.busy_case import busy_case
from tests.support.forest import Forest
from tests.support.published_case import published_case

PAGE = (Path(__file__).parents[2] / "docs" / "stats.md").read_text()
# Objects whose keys are names found in the data, or quantiles.
BY_NAME = {
    "by_state", "changed_echoes", "end_reasons", "false_fork_checks", "forks", "left_out", "not_trained", "quantiles",
    "author_tokens", "role_calls", "role_tokens", "scores", "unpriced", "version_tokens",
}  # fmt: skip


def keys(value: Any) -> set[str]:
    if isinstance(value, list):
        return {name for item in value for name in keys(item)}
    if not isinstance(value, dict):
        return set()
    return set(value) | {name for key, item in value.items() if key not in BY_NAME for name in keys(item)}


def documented(names: set[str]) -> None:
    assert not [name for name in sorted(names) if f"`{name}`" not in PAGE]


def test_every_key_of_the_json_is_defined() -> None:
    run = busy_case()
    call = run.rows["calls"][1]
    usage = json.dumps({"input_tokens": 3})
    hosted = {name: getattr(call, name) for name in call.__slots__} | {"upstream": "https://h", "provider_usage": usage}
    run.rows["calls"][1] = type(call)(**hosted)
    node = next(node for node in run.rows["nodes"] if node.logprobs is not None)
    row = TeacherLogprobs(node_id=node.node_id, teacher="t:0", logprobs=node.logprobs, at=run.now())
    run.add("teacher_logprobs", row)
    told = stats(run, model="Qwen/Qwen3-8B").to_json()
    assert told["hosted"]
    assert told["mismatch"]["teachers"]
    assert told["outages"]
    documented(keys(told) | {field.name for field in fields(ToolCounts)})


@pytest.mark.parametrize("cut", ["role", "tool", "task", "evaluator", "client"])
def test_every_key_of_a_cut_is_defined(cut: str, tmp_path: Path) -> None:
    busy_case().write(tmp_path / "a")
    done = CliRunner().invoke(app, ["stats", str(tmp_path / "a"), "--by", cut, "--json"])
    assert done.exit_code == 0, done.output
    documented(keys(json.loads(done.output)) | {cut})


def test_its_figures_are_ours() -> None:
    plain = PAGE.replace(",", "")
    assert f"{SECOND_EDGES[-2]:.0f} {SECOND_EDGES[-1]:.0f}." in plain
    assert f"... {TOKEN_EDGES[-1]}." in plain
    assert f"beyond {TOOL_MESSAGES} messages" in plain
    assert f"| `limit` | {WORTH} |" in PAGE


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    published_case().write(Path("runs/a"))
    busy_case().write(Path("runs/b"))
    trainer = Forest()
    step = Step(
        step=1, policy_id="run", n=1, parent_policy_id="base", parent_n=0, num_executions=1, trained_tokens=1,
        at=trainer.now(),
    )  # fmt: skip
    trainer.add("steps", step)
    trainer.write(Path("out/grpo"))
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        for line in block.splitlines():
            _, *words = line.partition("#")[0].split()
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, (line, done.output)
    shown = CliRunner().invoke(app, ["stats", "runs/a"]).output
    for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL):
        assert block in shown
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/stats.md", "exec"), {})
