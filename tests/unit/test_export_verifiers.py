"""Traces of verifiers: the graph says of every reply the exact tokens that the run holds."""

import json
from pathlib import Path
from typing import Any

import pytest

import gyre_data as gd
from gyre_data.errors import ConfigError
from gyre_data.schema import DeliveryState, EndReason, ScoreStatus
from gyre_data.store import RunWriter
from gyre_data.types import Delivery, ExecutionEvent, Score
from tests.support.importing import DATA
from tests.support.rows import START, call_row, output_node, prompt_node


@pytest.fixture(scope="module")
def sample() -> Any:
    return gd.open(gd.find_run("sample"))


def episodes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def branch(nodes: list[dict[str, Any]], place: int | None, name: str) -> list[Any]:
    """A field of the nodes from the root to a place, joined."""
    found: list[Any] = []
    while place is not None:
        found = nodes[place].get(name, []) + found
        assert nodes[place]["parent"] is None or nodes[place]["parent"] < place
        place = nodes[place]["parent"]
    return found


def test_a_graph_is_the_tree(sample: Any, tmp_path: Path) -> None:
    done = gd.export(sample, tmp_path / "a.jsonl", format="verifiers")
    found = episodes(tmp_path / "a.jsonl")
    admission = {e.execution_id: e for e in gd.admit(sample).executions}
    assert done.num_rows == {"executions": 8, "messages": 100, "calls": 39}
    for episode in found:
        (trace,) = episode["traces"]
        nodes, execution = trace["nodes"], sample[episode["id"]]
        for call, told in zip(execution.tree.calls, trace["calls"], strict=True):
            path = execution.path(call.call_id)
            assert branch(nodes, told["node"], "token_ids") == path.token_ids.tolist()
            assert branch(nodes, told["node"], "mask") == path.sampled_T.tolist()
            assert nodes[told["node"]]["logprobs"] == execution.tree.logprobs(path.leaf).tolist()
        admitted = admission.get(episode["id"])
        assert episode["reward"] == (admitted and admitted.reward)
        credit = {a for node in nodes for a in node.get("advantages", ())}
        assert credit == ({admitted.advantage} if admitted else set())
        assert episode["prompt"][-1]["role"] in ("user", "tool")
        assert episode["completion"][0]["role"] == "assistant"
        assert len(episode["prompt"] + episode["completion"]) == len(execution.main.messages())
        asked = {call["id"] for node in nodes for call in node["message"].get("tool_calls", ())}
        assert {n["message"]["tool_call_id"] for n in nodes if n["message"]["role"] == "tool"} <= asked
    (failed,) = [e for e in found if e["id"] not in admission]
    assert failed["traces"][0]["rewards"] == {"judge": None}, "a failed evaluator is no zero"


def test_text_alone_and_secrets(sample: Any, tmp_path: Path) -> None:
    gd.import_sessions([DATA / "claude-code"], tmp_path / "run")
    gd.export(gd.open(tmp_path / "run"), tmp_path / "a.jsonl", format="verifiers")
    ((trace,),) = [episode["traces"] for episode in episodes(tmp_path / "a.jsonl")]
    assert (len(trace["nodes"]), len(trace["calls"])) == (33, 14)
    assert not any(node.get("token_ids") for node in trace["nodes"])
    gd.export(sample, tmp_path / "b.jsonl", format="verifiers", patterns=["answer.txt"])
    assert "answer.txt" not in (tmp_path / "b.jsonl").read_text()
    for episode in episodes(tmp_path / "b.jsonl"):
        (trace,) = episode["traces"]
        for place, node in enumerate(trace["nodes"]):
            above = trace["nodes"][node["parent"]] if node["parent"] is not None else None
            told = "[REDACTED:custom]" in json.dumps(node["message"])
            if told or (above is not None and not above.get("token_ids")):
                assert "token_ids" not in node, (place, "its prefix would tell the secret, or is not exact")
    with pytest.raises(ConfigError, match="use where"):
        gd.export(sample, tmp_path / "c.jsonl", format="verifiers", j_max=1)


def test_a_hole_in_a_conversation_and_a_score_that_is_no_number(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for execution, text in (("e_1", "hi"), ("e_2", None)):
            blob = "0" * 64 if text is None else writer.put_blob(json.dumps({"role": "user", "content": text}).encode())
            prompt = prompt_node(f"n_{execution}", f"c_{execution}", execution_id=execution, message_blobs=(blob,))
            said = (writer.put_blob(b'{"content":"fine","role":"assistant"}'),)
            output = output_node(f"o_{execution}", f"c_{execution}", prompt, message_blobs=said)
            writer.write([prompt, output, call_row(f"c_{execution}", prompt, output, execution)])
            ended = ExecutionEvent(execution_id=execution, event="ended", at=START, end_reason=EndReason.FINISHED)
            had = Delivery(call_id=f"c_{execution}", execution_id=execution, state=DeliveryState.DELIVERED, at=START)
            nan = Score(
                score_id=f"s_{execution}",
                execution_id=execution,
                evaluator="judge",
                status=ScoreStatus.SCORED,
                value=float("nan"),
                at=START,
            )
            writer.write([ended, had, nan])
    run = gd.open(tmp_path / "run")
    for format, level in (("verifiers", "executions"), ("atif", "executions"), ("chat", "trajectories")):
        done = gd.export(run, tmp_path / format, format=format)
        assert done.left_out[level]["text_missing"] == 1
        assert done.num_rows["executions"] == 1
    (episode,) = episodes(tmp_path / "verifiers")
    assert episode["traces"][0]["rewards"] == {"judge": None}
    assert '"value": null' in (tmp_path / "atif" / "e_1.json").read_text()
