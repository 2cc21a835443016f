"""Token shares by tool: names by call ids, ids of ours included, splits by bytes, what is missing said."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from gyre_data.run_stats import stats
from gyre_data.show.stats_text import stats_lines
from gyre_data.tools import UNKNOWN_TOOL, ToolCounts, by_tool, num_messages
from gyre_data.types import Blob
from tests.support.forest import ExecutionBuilder, Forest, Made


def blob(run: Forest, message: dict[str, Any]) -> tuple[str, ...]:
    data = json.dumps(message, separators=(",", ":")).encode()
    name = hashlib.sha256(data).hexdigest()
    if all(row.blob_id != name for row in run.rows["blobs"]):
        run.add("blobs", Blob(blob_id=name, num_bytes=len(data), codec="none", data=data))
    return (name,)


def say(e: ExecutionBuilder, made: Made, **message: Any) -> None:
    """Give the output of a call its text."""
    set_blobs(e, made.output, blob(e.run, {"role": "assistant", **message}))


def set_blobs(e: ExecutionBuilder, node_id: str, blobs: tuple[str, ...]) -> None:
    rows = e.run.rows["nodes"]
    at = next(i for i, row in enumerate(rows) if row.node_id == node_id)
    values = {name: getattr(rows[at], name) for name in rows[at].__slots__}
    rows[at] = e.nodes[node_id] = type(rows[at])(**{**values, "message_blobs": blobs})


def call(name: str, arguments: dict[str, Any], call_id: str | None = None) -> dict[str, Any]:
    return {"name": name, "arguments": arguments, **({"id": call_id} if call_id else {})}


def result(run: Forest, text: str, call_id: str | None) -> dict[str, Any]:
    return {"message_blobs": blob(run, {"role": "tool", "content": text, "tool_call_id": call_id})}


def tools_of(run: Forest) -> dict[str, ToolCounts]:
    return {tool.tool: tool for tool in by_tool(run).tools}


def test_results_and_arguments_of_tools() -> None:
    run = Forest()
    e = run.execution(group="g")
    a = e.call(new=[("system", 20), ("user", 5)], output=30)
    say(e, a, content="", tool_calls=[call("Bash", {"c": "ls"}, "t1"), call("Read", {"f": "abcdefghij"}, "t2")])
    new = [("tool", 40, result(run, "x" * 9, "t1")), ("tool", 70, result(run, "y", "t2"))]
    b = e.call(after=a, new=new, output=10)
    say(e, b, content="done", reasoning="thinking")
    found, tools = by_tool(run), tools_of(run)
    bash, read = tools["Bash"], tools["Read"]
    assert (bash.calls, bash.results, bash.result_tokens) == (1, 1, 40)
    assert (read.calls, read.results, read.result_tokens) == (1, 1, 70)
    sizes = [len("Bash") + len('{"c": "ls"}'), len("Read") + len('{"f": "abcdefghij"}')]
    assert [bash.argument_tokens, read.argument_tokens] == [round(30 * size / sum(sizes)) for size in sizes]
    assert bash.sent_tokens == 40 + bash.argument_tokens  # both were in the prompt of the second call
    assert (found.text_tokens, found.reasoning_tokens) == (round(10 * 4 / 12), round(10 * 8 / 12))
    whole = stats(run).trees
    assert (found.sampled_tokens, found.sent_tokens) == (whole.sampled_tokens, whole.prompt_tokens)
    assert found.prompt_tokens == whole.distinct_tokens - whole.sampled_tokens
    assert [tool.tool for tool in found.tools] == ["Read", "Bash"]  # largest first


def test_a_result_is_counted_once_and_as_often_as_it_was_sent() -> None:
    run = Forest()
    e = run.execution(group="g")
    a = e.call(output=3)
    say(e, a, tool_calls=[call("Bash", {}, "t1")])
    b = e.call(after=a, new=[("tool", 40, result(run, "x", "t1"))], output=2)
    say(e, b, content="more")
    e.call(after=b, new=[("user", 1)], output=2)
    e.retry(b)
    bash = tools_of(run)["Bash"]
    assert (bash.result_tokens, bash.argument_tokens) == (40, 3)
    assert bash.sent_tokens == 3 * (40 + 3)


@pytest.mark.parametrize(("wire", "number", "name"), [("openai_chat", 1, "Read"), ("anthropic", 2, "Read")])
def test_ids_that_the_proxy_minted_name_the_node(wire: str, number: int, name: str) -> None:
    run = Forest()
    e = run.execution(group="g")
    a = e.call(output=3, wire=wire)
    say(e, a, content="text", tool_calls=[call("Bash", {}), call("Read", {})])
    minted = f"toolu_{a.output}_{number}"
    e.call(after=a, new=[("tool", 9, result(run, "x", minted))], output=2)
    assert tools_of(run)[name].result_tokens == 9
    elsewhere = run.execution(group="g")
    elsewhere.call(new=[("tool", 5, result(run, "z", minted))])
    assert tools_of(run)[UNKNOWN_TOOL].result_tokens == 5


def test_messages_that_share_a_node_share_its_tokens() -> None:
    run = Forest()
    e = run.execution(group="g")
    a = e.call(output=3)
    say(e, a, tool_calls=[call("Bash", {}, "t1"), call("Read", {}, "t2")])
    both = [
        blob(run, {"role": "tool", "content": text, "tool_call_id": n})[0] for text, n in (("x", "t1"), ("y", "t2"))
    ]
    e.call(after=a, new=[("tool", 30, {"message_blobs": tuple(both)})])
    assert [tools_of(run)[name].result_tokens for name in ("Bash", "Read")] == [15, 15]


def test_what_cannot_be_named_is_said() -> None:
    run = Forest()
    e = run.execution(group="g")
    for tool in ("Bash", "Read"):
        say(e, e.call(output=1), tool_calls=[call(tool, {}, "same")])
    new = [("tool", 6, result(run, "x", "same")), ("tool", 7, result(run, "y", None))]
    e.call(new=[*new, ("tool", 8, {"message_blobs": ("0" * 64,)})])
    found = by_tool(run)
    assert tools_of(run)[UNKNOWN_TOOL].result_tokens == 13
    assert found.messages_missing == 1
    assert by_tool(Forest()).tools == ()


def test_each_message_is_read_once_and_many_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Forest()
    e = run.execution(group="g")
    a = e.call(output=3)
    say(e, a, tool_calls=[call("Bash", {}, "t1")])
    for _ in range(3):
        e.call(after=a, new=[("tool", 9, result(run, "equal", "t1"))])
    assert num_messages([run]) == 2
    assert tools_of(run)["Bash"].results == 3
    assert stats(run).tools == by_tool(run)
    monkeypatch.setattr("gyre_data.run_stats.TOOL_MESSAGES", 1)
    found = stats(run)
    assert found.tools is None
    assert (found.left_out["tools"], found.tool_messages) == ("--by tool", 2)
    told = "\n".join(line.plain for line in stats_lines(found, where="runs/a"))
    assert "left out, 2 messages to read:  gyre stats runs/a --by tool" in told
