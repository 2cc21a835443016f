"""Logs of a model's API become executions: three wires, streamed or not, of several tools that write such logs."""

import json
from pathlib import Path
from typing import Any

import pytest

from gyre_data import open as open_run
from gyre_data.hosted import hosted
from gyre_data.schema import AgentRole, BranchReason, Extension
from tests.support.importing import conversation, imported, only_execution, said, write_lines
from tests.support.provider import anthropic_stream, chat_stream, responses_stream, sse

CLAUDE = {"user-agent": "claude-cli/2.1.220 (external, cli)", "X-Claude-Code-Session-Id": "s1"}
ANTHROPIC = {"model": "claude-opus-4-5", "system": "Be good.", "tools": [{"name": "Bash"}], "max_tokens": 9}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def tap(path: str, body: dict[str, Any], response: dict[str, Any], **headers: str) -> dict[str, Any]:
    """A line of claude-tap."""
    request = {"method": "POST", "path": path, "headers": headers, "body": body}
    at = {"timestamp": "2026-01-02T03:04:05+00:00", "duration_ms": 1500, "turn": 1}
    return {**at, "request": request, "response": response, "upstream_base_url": "https://api.anthropic.com"}


def anthropic_reply(words: str, **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 3, "output_tokens": 4}
    return {
        "id": f"msg_{words}",
        "type": "message",
        "content": [text(words)],
        "stop_reason": "end_turn",
        "usage": usage,
        **more,
    }


def test_claude_tap(tmp_path: Path) -> None:
    """Agents by their headers, a summary by its words; other requests are told apart."""
    begin = [{"role": "user", "content": "go"}]
    more = [*begin, {"role": "assistant", "content": [text("one")]}, {"role": "user", "content": [text("more")]}]
    summary = [
        *more[:-1],
        {"role": "user", "content": [text("more"), text("CRITICAL: Respond with TEXT ONLY. Sum up.")]},
    ]

    def line(messages: list[Any], words: str, **headers: str) -> dict[str, Any]:
        body = {**ANTHROPIC, "messages": messages}
        return tap("/v1/messages?beta=true", body, {"status": 200, "body": anthropic_reply(words)}, **CLAUDE, **headers)

    lines = [
        line(begin, "one"),
        line([{"role": "user", "content": "look"}], "seen", **{"x-claude-code-agent-id": "a1"}),
        line(more, "two"),
        line(summary, "summed up"),
        line([{"role": "user", "content": "so far: summed up"}], "three"),
        tap("/v1/messages/count_tokens", {"messages": begin}, {"status": 200, "body": {"input_tokens": 9}}),
        tap(
            "/v1/messages",
            {**ANTHROPIC, "messages": begin},
            {"status": 529, "body": {"error": {"type": "overloaded"}}},
            **CLAUDE,
        ),
        {"level": "info"},
    ]
    done = imported(write_lines(tmp_path / "trace.jsonl", lines), tmp_path / "run").sessions[0]
    assert (done.num_calls, done.num_failed, done.beside) == (6, 1, {"request for something else": 1})
    assert done.not_understood == {"no pair of request and response": 1}
    execution = only_execution(tmp_path / "run")
    calls = said(execution)
    assert {words: str(call.agent_role) for words, call in calls.items()} == {
        "one": "main",
        "seen": "sub_agent",
        "two": "main",
        "summed up": "main_summary",
        "three": "main",
    }
    assert calls["three"].branch_reason is BranchReason.COMPACTION
    assert calls["three"].continues_from == calls["summed up"].call_id
    assert calls["two"].extension is Extension.BRIDGE
    assert calls["one"].upstream == "https://api.anthropic.com"
    assert calls["one"].tools_blob is not None
    assert ((calls["one"].ended_at or calls["one"].started_at) - calls["one"].started_at).total_seconds() == 1.5


def chat_body(*messages: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": "Be good."}, *messages]}


WIRES = {
    "anthropic": (
        "/v1/messages",
        {**ANTHROPIC, "messages": [{"role": "user", "content": "go"}]},
        sse(*anthropic_stream({"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}, text("one"))),
    ),
    "openai_chat": (
        "/v1/chat/completions",
        chat_body({"role": "user", "content": "go"}),
        sse(*chat_stream("one", None)),
    ),
    "openai_responses": (
        "/v1/responses",
        {"model": "m", "instructions": "Be good.", "input": "go"},
        sse(
            *responses_stream(
                {"type": "message", "id": "x", "role": "assistant", "content": [{"type": "output_text", "text": "one"}]}
            )
        ),
    ),
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("form", ["cctrace", "claude-trace"])
def test_streams_are_put_together(tmp_path: Path, wire: str, form: str) -> None:
    path, body, stream = WIRES[wire]
    url = f"https://api.example.com{path}"
    raw = b"".join(stream).decode()
    if form == "cctrace":
        lines = [
            {
                "id": "p1",
                "request": {"timestamp": 1767323045000, "method": "POST", "url": url, "headers": {}, "body": body},
                "response": {"timestamp": 1767323046000, "status": 200, "headers": {}, "bodyRaw": raw},
                "duration": 1000,
            }
        ]
    else:
        lines = [
            {
                "request": {"timestamp": 1767323045.0, "method": "POST", "url": url, "headers": {}, "body": body},
                "response": {"timestamp": 1767323046.0, "status_code": 200, "headers": {}, "body_raw": raw},
                "logged_at": "2026-01-02T03:04:06Z",
            }
        ]
    imported(write_lines(tmp_path / "log.jsonl", lines), tmp_path / "run")
    execution = only_execution(tmp_path / "run")
    (call,) = execution.tree.calls
    assert conversation(execution, call.output_node or "") == [
        ("system", "Be good."),
        ("user", "go"),
        ("assistant", "one"),
    ]
    assert (call.wire, str(call.status), call.upstream) == (wire, "ok", "https://api.example.com")
    assert call.agent_role is AgentRole.MAIN
    assert ((call.ended_at or call.started_at) - call.started_at).total_seconds() == 1
    bill = hosted(open_run(tmp_path / "run"))
    assert bill is not None
    assert bill.usage.output > 0
    cut = raw[: len(raw) // 2]
    response = {
        **lines[0]["response"],
        **{name: cut for name in ("bodyRaw", "body_raw") if name in lines[0]["response"]},
    }
    imported(write_lines(tmp_path / "cut.jsonl", [{**lines[0], "response": response}]), tmp_path / "cut")
    assert {str(call.status) for call in only_execution(tmp_path / "cut").tree.calls} <= {"aborted", "failed"}


def test_responses_that_go_on_from_one_another(tmp_path: Path) -> None:
    """Bare pairs; only what is new is sent."""

    def pair(id_: str, given: Any, words: str, before: str | None = None) -> dict[str, Any]:
        content = [{"type": "output_text", "text": words}]
        item = {"type": "message", "role": "assistant", "content": content}
        request = {"model": "m", "input": given, **({"previous_response_id": before} if before else {})}
        usage = {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
        return {
            "request": request,
            "response": {"id": id_, "object": "response", "status": "completed", "output": [item], "usage": usage},
        }

    lines = [
        pair("r1", "go", "one"),
        pair("r2", [{"role": "user", "content": "left"}], "two", "r1"),
        pair("r3", [{"role": "user", "content": "right"}], "three", "r1"),
        pair("r4", "something else", "four"),
        {"request": {"model": "m", "input": "lost"}, "response": None},
    ]
    imported(write_lines(tmp_path / "log.jsonl", lines), tmp_path / "run")
    execution = only_execution(tmp_path / "run")
    calls = said(execution)
    assert conversation(execution, calls["three"].output_node) == [
        ("user", "go"),
        ("assistant", "one"),
        ("user", "right"),
        ("assistant", "three"),
    ]
    assert calls["three"].branch_reason is BranchReason.REWIND
    assert [str(call.agent_role) for call in execution.tree.calls] == ["main"] * 3 + ["unknown"] * 2
    assert execution.tree.calls[-1].error == "the log holds no response"
    bill = hosted(open_run(tmp_path / "run"))
    assert bill is not None
    assert (bill.calls, bill.usage.input, bill.usage.cache_read, bill.usage.output) == (4, 16, 4, 8)


def test_a_socket_that_stays_open_is_several_calls(tmp_path: Path) -> None:
    def create(given: Any, **more: Any) -> dict[str, Any]:
        return {"type": "response.create", "model": "m", "input": given, **more}

    def events(id_: str, words: str) -> list[dict[str, Any]]:
        item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": words}]}
        done = {"id": id_, "output": [item] if words else []}
        return [{"type": "response.created", "response": {"id": id_}}, {"type": "response.completed", "response": done}]

    second = create([{"role": "user", "content": "more"}], previous_response_id="r1")
    request = {"path": "/v1/responses", "headers": {}, "body": second}
    request["ws_events"] = [create([], generate=False), create("go"), second]
    came = [*events("r0", ""), *events("r1", "one"), *events("r2", "two")]
    line = {
        "timestamp": "2026-01-02T03:04:05Z",
        "request": request,
        "response": {"status": 101, "body": None, "ws_events": came},
    }
    done = imported(write_lines(tmp_path / "trace.jsonl", [json.dumps(line)]), tmp_path / "run").sessions[0]
    assert (done.num_calls, done.num_failed, done.beside) == (2, 0, {"warm-up": 1})
    execution = only_execution(tmp_path / "run")
    assert [words for _, words in conversation(execution, said(execution)["two"].output_node)] == [
        "go",
        "one",
        "more",
        "two",
    ]
