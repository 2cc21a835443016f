"""Rows for other trainers and Parquet: aligned, trained once, readable, and without what would tell a secret."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

import gyre_data as gd
from gyre_data.convert import to_parquet
from gyre_data.schema import DeliveryState, EndReason
from gyre_data.store import RunWriter
from gyre_data.types import Delivery, ExecutionEvent
from tests.support.forest import Forest, forests
from tests.support.importing import DATA
from tests.support.rows import START, call_row, output_node, prompt_node

SECRET = "ghp_" + "a1B2" * 9


@pytest.fixture(scope="module")
def sample() -> Any:
    return gd.open(gd.find_run("sample"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_of_slime_and_miles(sample: Any, tmp_path: Path) -> None:
    done = gd.export(sample, tmp_path / "a.jsonl", format="slime")
    rows, admission = lines(tmp_path / "a.jsonl"), gd.admit(sample)
    assert len(rows) == done.num_rows["rows"] == admission.counts()["admitted"]["trajectories"]
    assert done.left_out == {"executions": {"evaluator_failed": 1}}
    assert sum(sum(row["loss_mask"]) for row in rows) == admission.num_owned
    by_rollout: dict[int, set[float]] = {}
    for number, row in enumerate(rows):
        assert len(row["loss_mask"]) == len(row["rollout_log_probs"]) == row["response_length"] <= len(row["tokens"])
        assert row["loss_mask"][0] == 1, "the response begins with the first trained token"
        assert row["index"] == number
        assert row["status"] == "completed"
        assert row["weight_versions"] == ["0"]
        assert row["prompt"][-1]["role"] in ("user", "tool")
        trained = [p for p, kept in zip(row["rollout_log_probs"], row["loss_mask"], strict=True) if kept]
        assert max(trained) <= 0
        by_rollout.setdefault(row["rollout_id"], set()).add(row["reward"])
    assert len(by_rollout) == len(admission.executions)
    assert all(len(rewards) == 1 for rewards in by_rollout.values()), "siblings share their reward"


def test_training_samples_of_prime_rl(sample: Any, tmp_path: Path) -> None:
    gd.export(sample, tmp_path / "a.jsonl", format="prime-rl")
    rows, admission = lines(tmp_path / "a.jsonl"), gd.admit(sample)
    assert sum(sum(row["mask"]) for row in rows) == admission.num_owned
    known = {round(e.advantage or 0, 6) for e in admission.executions}
    for row in rows:
        sizes = {len(row[name]) for name in ("token_ids", "mask", "logprobs", "temperatures", "advantages")}
        assert sizes == {len(row["token_ids"])}
        assert {round(a, 6) for a, kept in zip(row["advantages"], row["mask"], strict=True) if kept} <= known
        assert all(a == 0 for a, kept in zip(row["advantages"], row["mask"], strict=True) if not kept)
        assert set(row["temperatures"]) == {1.0}


def test_parquet_of_a_recorded_run(sample: Any, tmp_path: Path) -> None:
    done = gd.export(sample, tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.equals(to_parquet.SCHEMA)
    assert table.num_rows == done.num_rows["rows"] == 18
    admission = gd.admit(sample)
    rewards = {e.execution_id: (e.reward, e.advantage) for e in admission.executions}
    for row in table.to_pylist():
        path = sample[row["execution_id"]].path(row["calls"][-1]["call_id"])
        assert row["token_ids"] == path.token_ids.tolist()
        assert [None if np.isnan(x) else x for x in path.logprobs] == row["logprobs"]
        assert sum(row["loss_mask"]) == row["num_trained"]
        assert row["rl_mask"] == row["loss_mask"]
        assert (row["reward"], row["advantage"]) == rewards.get(row["execution_id"], (None, None))
        assert row["reason"] == (None if row["admitted"] else "evaluator_failed")
        assert [m["role"] for m in row["messages"]] == [m["role"] for m in path.messages()]


def test_parquet_of_imported_text(tmp_path: Path) -> None:
    gd.import_sessions([DATA / "pi"], tmp_path / "run")
    gd.export(gd.open(tmp_path / "run"), tmp_path / "a.parquet")
    (row, *_) = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert (row["token_ids"], row["loss_mask"], row["num_tokens"], row["reward"]) == (None, None, 0, None)
    assert any(m["trained"] for m in row["messages"])
    done = gd.export(gd.open(tmp_path / "run"), tmp_path / "a.jsonl", format="slime")
    assert done.num_rows == {}
    assert done.left_out["executions"]


def talk(writer: RunWriter, execution: str, *texts: str) -> None:
    """One execution that ended: a turn for each text of the user."""
    parent = None
    for turn, text in enumerate(texts):
        call = f"c_{execution}_{turn}"
        blob = (writer.put_blob(json.dumps({"content": text, "role": "user"}).encode()),)
        prompt = prompt_node(f"n_{execution}_{turn}p", call, parent, execution_id=execution, message_blobs=blob)
        said = (writer.put_blob(b'{"content":"fine","role":"assistant"}'),)
        parent = output_node(f"n_{execution}_{turn}o", call, prompt, message_blobs=said)
        had = Delivery(call_id=call, execution_id=execution, state=DeliveryState.DELIVERED, at=START)
        writer.write([prompt, parent, call_row(call, prompt, parent, execution), had])
    writer.write([ExecutionEvent(execution_id=execution, event="ended", at=START, end_reason=EndReason.FINISHED)])


def test_case_d02_messages_of_100_mb_are_read_back(tmp_path: Path) -> None:
    """Row groups are cut by bytes, so that no reader meets a group whose texts it cannot hold."""
    big = "0123456789abcdef" * (100 << 16)
    with RunWriter(tmp_path / "run") as writer:
        for execution, text in (("e_1", "a"), ("e_2", big), ("e_3", "b"), ("e_4", "c")):
            talk(writer, execution, text)
    done = gd.export(gd.open(tmp_path / "run"), tmp_path / "a.parquet", redact=False)
    file = pq.ParquetFile(tmp_path / "a.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [1, 1, 2]
    assert done.num_rows == {"rows": 4, "row groups": 3}
    content = pc.list_flatten(file.read(["messages"]).column("messages")).combine_chunks().field("content")
    assert pc.utf8_length(content).to_pylist() == [1, 4, 100 << 20, 4, 1, 4, 1, 4]


def test_a_row_ends_before_token_ids_that_would_tell_a_secret(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        talk(writer, "e_1", "hello", f"token {SECRET}", "go on")
    run = gd.open(tmp_path / "run")
    done = gd.export(run, tmp_path / "a.parquet")
    (row,) = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert row["token_ids"] == list(range(7)), "the first prompt and its reply"
    assert row["num_trained"] == 4
    assert done.left_out["trained tokens"] == {"redacted": 8}
    assert (done.num_nodes_redacted, done.secrets) == (1, {"github_token": 1})
    assert SECRET not in json.dumps(row)
    gd.export(run, tmp_path / "b.parquet", redact=False)
    (row,) = pq.read_table(tmp_path / "b.parquet").to_pylist()
    assert (len(row["token_ids"]), row["num_trained"]) == (21, 12)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(forest=forests())
def test_on_any_tree_a_token_is_trained_in_one_row(forest: Forest, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any")
    forest.write(folder / "run")
    run = gd.open(folder / "run")
    admission = gd.admit(run)
    done = gd.export(run, folder / "a.jsonl", format="prime-rl", redact=False)
    paths = [
        (run[e.execution_id].path(e.tree.node_id[t.leaf]), t.num_owned)
        for e in admission.executions
        for t in e.trajectories
    ]
    expected = sorted((path.token_ids.tolist(), num_owned) for path, num_owned in paths)
    assert sorted((row["token_ids"], sum(row["mask"])) for row in lines(folder / "a.jsonl")) == expected
    assert done.num_rows.get("trained tokens", 0) == admission.num_owned
