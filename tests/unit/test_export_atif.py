"""ATIF files: the form that its published models take, sub-agents and compactions, and what comes back of them."""

import json
from pathlib import Path
from typing import Any

import pytest

import gyre_data as gd
from gyre_data.errors import ConfigError
from gyre_data.execution import Execution
from tests.support.importing import DATA, conversation, only_execution, write_lines
from tests.support.rows import one_execution

SECRET = "ghp_" + "a1B2" * 9


@pytest.fixture(scope="module")
def sample() -> Any:
    return gd.open(gd.find_run("sample"))


def documents(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


def check(document: dict[str, Any]) -> None:
    """The rules of ATIF v1.7 that its published models check."""
    assert document["schema_version"] == "ATIF-v1.7"
    assert document["agent"].keys() >= {"name", "version"}
    assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
    for step in document["steps"]:
        assert step["source"] in ("system", "user", "agent")
        assert step["source"] == "agent" or not step.keys() & {"metrics", "tool_calls", "reasoning_content"}
        known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        for result in step.get("observation", {}).get("results", ()):
            assert not known or result.get("source_call_id") in known
    inner = document.get("subagent_trajectories", [])
    assert len({one["trajectory_id"] for one in inner}) == len(inner)
    for one in inner:
        check(one)


def shape(execution: Execution) -> list[Any]:
    """Leaves as conversations, with role and agent; compactions; what sub-agents were started by."""
    tree = execution.tree
    ends = [i for i in range(len(tree)) if tree.end_N[i] == i + 1]
    calls = [
        (str(c.agent_role), c.agent_id, c.parent_agent_id, c.spawned_by_tool_call, str(c.branch_reason))
        for c in tree.calls
    ]
    copies = sum(name is not None for name in tree.copy_of_N)
    return [sorted(conversation(execution, tree.node_id[i]) for i in ends), sorted(map(str, calls)), copies, len(tree)]


def test_sub_agents_and_compactions_come_back(tmp_path: Path) -> None:
    gd.import_sessions([DATA / "claude-code"], tmp_path / "run")
    done = gd.export(gd.open(tmp_path / "run"), tmp_path / "atif", format="atif")
    assert done.num_rows == {"executions": 1, "files": 2, "steps": 22, "calls": 14}
    assert done.left_out == {"blocks": {"thinking": 1}}
    found = documents(tmp_path / "atif")
    for document in found.values():
        check(document)
    (first,) = [document for name, document in found.items() if "cont" not in name]
    assert first["continued_trajectory_ref"] in found
    assert len(first["subagent_trajectories"]) == 3, "two sub-agents, one of them in two parts"
    gd.import_sessions([tmp_path / "atif"], tmp_path / "back")
    assert shape(only_execution(tmp_path / "back")) == shape(only_execution(tmp_path / "run"))


def test_a_recorded_run(sample: Any, tmp_path: Path) -> None:
    done = gd.export(sample, tmp_path / "atif", format="atif", where="score > 0.5 or partial")
    found = documents(tmp_path / "atif")
    chosen = {document["session_id"] for document in found.values()}
    assert chosen == {e.execution_id for e in gd.list_executions(sample) if (e.score or 0) > 0.5 or e.partial}
    assert done.num_rows["files"] == len(found)
    for document in found.values():
        check(document)
        calls = [step for step in document["steps"] if step.get("llm_call_count")]
        for step in calls:
            metrics = step["metrics"]
            assert metrics["completion_tokens"] == len(metrics["completion_token_ids"]) == len(metrics["logprobs"])
        told = document["extra"]["gyre"]
        assert told["scores"][0]["evaluator"] == "judge"


def test_secrets_leave_text_and_ids(tmp_path: Path, sample: Any) -> None:
    chat = [{"role": "user", "content": f"use {SECRET}"}, {"role": "assistant", "content": f"I use {SECRET}"}]
    gd.import_sessions([write_lines(tmp_path / "a.jsonl", [{"messages": chat}])], tmp_path / "run")
    done = gd.export(gd.open(tmp_path / "run"), tmp_path / "atif", format="atif")
    ((_, document),) = documents(tmp_path / "atif").items()
    assert SECRET not in json.dumps(document)
    assert done.secrets == {"github_token": 2}
    gd.export(sample, tmp_path / "b", format="atif", where="execution_id = 'e_f2c987a2f3d0'", patterns=["Done"])
    document = documents(tmp_path / "b")["e_f2c987a2f3d0.json"]
    said = {step["message"]: step["metrics"] for step in document["steps"] if "metrics" in step}
    assert "completion_token_ids" not in said["[REDACTED:custom]."]
    assert any("completion_token_ids" in metrics for metrics in said.values())


def test_a_folder_is_there_whole_or_not_at_all(sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def fails(*_: Any) -> Any:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("gyre_data.convert.to_atif._count_left", fails)
        with pytest.raises(OSError, match="disk full"):
            gd.export(sample, out, format="atif")
    assert list(tmp_path.iterdir()) == []
    gd.export(sample, out, format="atif")
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        gd.export(sample, out, format="atif")
    gd.export(sample, out, format="atif", force=True)
    assert (out / "mine.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_id_leads_a_file_out_of_the_folder(tmp_path: Path) -> None:
    """A run may come from anybody, and ids are whatever its recorder wrote."""
    names = ["../../out", "/tmp/x", "..", ".", "a/b", "a\nb", "-x", "\u202eé", "x" * 4000, "y" * 4000, "e_1.2-3"]
    with gd.RunWriter(tmp_path / "run") as writer:
        for name in names:
            writer.write(one_execution(name, 1))
    done = gd.export(gd.open(tmp_path / "run"), tmp_path / "a" / "atif", format="atif")
    made = documents(tmp_path / "a" / "atif")
    assert len(made) == len(names) == done.num_rows["files"]
    assert {document["session_id"] for document in made.values()} == set(names)
    assert {"e_1.2-3.json", "a%2Fb.json", "-x.json"} <= set(made)
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["atif"]
