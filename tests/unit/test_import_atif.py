"""ATIF trajectories become executions: steps of the agent are calls, sub-agents hang on the call that started them."""

import json
from pathlib import Path
from typing import Any

from gyre_data import open as open_run
from gyre_data.hosted import hosted
from gyre_data.links import sub_agents
from tests.support.importing import attributes, conversation, imported, only_execution, said

AGENT = {"name": "terminus-2", "version": "2.0.0", "model_name": "m", "tool_definitions": [{"type": "function"}]}


def agent_step(number: int, text: str, **more: Any) -> dict[str, Any]:
    at = f"2026-01-02T03:04:{number:02d}Z"
    return {"step_id": number, "timestamp": at, "source": "agent", "message": text, **more}


def call(id_: str, name: str = "bash", **arguments: Any) -> dict[str, Any]:
    return {"tool_call_id": id_, "function_name": name, "arguments": arguments}


def metrics(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": 2, "cost_usd": 0.1, **more}


def write(path: Path, *steps: dict[str, Any], **more: Any) -> Path:
    path.write_text(json.dumps({"schema_version": "ATIF-v1.8", "agent": AGENT, "steps": list(steps), **more}))
    return path


BEGIN = (
    {"step_id": 1, "source": "system", "message": "Be good."},
    {"step_id": 2, "timestamp": "2026-01-02T03:04:02Z", "source": "user", "message": "go"},
)


def test_steps_are_calls_and_results_are_messages(tmp_path: Path) -> None:
    results = [
        {"source_call_id": "c1", "content": "ONE"},
        {"source_call_id": "c2", "content": [{"type": "text", "text": "TWO"}]},
    ]
    path = write(
        tmp_path / "trajectory.json",
        *BEGIN,
        agent_step(
            3,
            "I look.",
            reasoning_content="Hm.",
            tool_calls=[call("c1", cmd="ls"), call("c2", cmd="pwd")],
            observation={"results": results},
            metrics=metrics(9, 5),
        ),
        agent_step(4, "copied", is_copied_context=True),
        agent_step(5, "no model was asked", llm_call_count=0),
        agent_step(
            6,
            "done",
            metrics=metrics(20, 3, completion_token_ids=[1, 2, 3]),
            observation={"results": [{"content": "bye"}]},
        ),
        {"step_id": 7, "source": "alien", "message": "?"},
        session_id="s1",
        final_metrics={"total_steps": 7},
        notes="a note",
    )
    done = imported(path, tmp_path / "run").sessions[0]
    assert (done.num_calls, done.num_unanswered, done.not_understood) == (2, 1, {"step of source alien": 1})
    execution = only_execution(tmp_path / "run")
    assert (execution.info.harness, execution.info.harness_version) == ("terminus-2", "2.0.0")
    calls = said(execution)
    assert conversation(execution, calls["done"].output_node) == [
        ("system", "Be good."),
        ("user", "go"),
        ("assistant", "I look."),
        ("tool", "ONE"),
        ("tool", "TWO"),
        ("assistant", "copied"),
        ("assistant", "no model was asked"),
        ("assistant", "done"),
    ]
    assert calls["done"].note == "the source's token ids are not taken"
    bill = hosted(open_run(tmp_path / "run"))
    assert bill is not None
    assert (bill.calls, bill.usage.input, bill.usage.cache_read, bill.usage.output) == (2, 25, 4, 8)
    told = json.loads(execution.info.attributes or "{}")
    assert (told["notes"], told["final_metrics"]) == ("a note", {"total_steps": 7})
    assert attributes(execution)["source"] == "trajectory.json"


def test_sub_agents_lie_inside_or_beside(tmp_path: Path) -> None:
    child = {
        "schema_version": "ATIF-v1.8",
        "agent": AGENT,
        "trajectory_id": "inside",
        "steps": [*BEGIN, agent_step(3, "one")],
    }
    write(tmp_path / "child.json", *BEGIN, agent_step(3, "two"), session_id="beside")
    refs = [{"trajectory_id": "inside"}, {"trajectory_path": "logs/child.json"}, {"trajectory_path": "../gone.json"}]
    results = [{"source_call_id": "c1", "content": "ok", "subagent_trajectory_ref": refs}]
    path = write(
        tmp_path / "main.json",
        *BEGIN,
        agent_step(3, "start", tool_calls=[call("c1", "task")], observation={"results": results}),
        agent_step(4, "done"),
        subagent_trajectories=[child],
    )
    done = imported(path, tmp_path / "run").sessions[0]
    assert (done.num_calls, done.num_files) == (4, 2)
    assert done.notes == ("a sub-agent's trajectory is not at hand: ../gone.json",)
    execution = only_execution(tmp_path / "run")
    calls = said(execution)
    found = sub_agents(execution.tree)
    assert {agent.spawned_by_call for agent in found} == {calls["start"].call_id}
    assert sorted(agent.agent_id for agent in found) == ["inside", "logs/child.json"]
