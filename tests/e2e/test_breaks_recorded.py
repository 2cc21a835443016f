"""What a client does to its history, recorded by a real proxy: `gyre tree --breaks` names each by its likely cause."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from gyre_data.breaks import Break, Cause, breaks
from gyre_data.main import app
from gyre_data.store import open as open_run
from gyre_data.types import Call
from tests.support.proxy_server import serve_proxy
from tests.support.reply_texts import CALLS
from tests.support.scripted_engine import ScriptedEngine
from tests.support.toy_tokenizer import encode

Body = dict[str, Any]
TOOLS = [
    {"name": name, "description": f"To {name}.", "input_schema": {"type": "object", "properties": {}}}
    for name in ("move", "look")
]


def reply(text: str) -> dict[str, Any]:
    ids = encode(text + "<|im_end|>")
    return {"deltas": [{"ids": ids, "lps": [-0.1] * len(ids)}], "finish": {"type": "stop", "matched": 257}}


def system(body: Body) -> None:
    body["system"] = body["system"].replace("Mon Nov 2", "Tue Nov 3")


def other_system(body: Body) -> None:
    body["system"] = "You are somebody else."


def task(body: Body) -> None:
    body["messages"][0]["content"] = "mend the printer"


def arguments(body: Body) -> None:
    (block,) = (
        b for m in body["messages"] if m["role"] == "assistant" for b in m["content"] if b["type"] == "tool_use"
    )
    block["input"] = {**block["input"], "extra": "x"}


def cleared(body: Body) -> None:
    body["messages"][2]["content"][0]["content"] = "[old result cleared]"


def reminder(body: Body) -> None:
    body["messages"][0]["content"] = f"{body['messages'][0]['content']}\n<system-reminder>be quick</system-reminder>"


def tools(body: Body) -> None:
    body["tools"] = body["tools"][:-1]


def rewind(body: Body) -> None:
    del body["messages"][1:]
    body["messages"].append({"role": "user", "content": "no, something else"})


def turn(body: Body) -> None:
    body["messages"][-2]["content"] = [{"type": "text", "text": "not ok"}]


EDITS: dict[Callable[[Body], None], Cause] = {
    system: Cause.SYSTEM_NONCE,
    other_system: Cause.SYSTEM,
    task: Cause.TASK,
    arguments: Cause.ARGUMENTS,
    cleared: Cause.TOOL_RESULT,
    reminder: Cause.REMINDER,
    tools: Cause.TOOLS,
    rewind: Cause.REWIND,
    turn: Cause.TURN,
}


async def test_each_edit_of_a_client_is_named(tmp_path: Path) -> None:
    engine, run = ScriptedEngine([reply(CALLS["hermes"]), reply("ok"), reply("ok")] * len(EDITS)), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served:
        for edit in EDITS:
            await converse(served.anthropic(edit.__name__), edit)
    for edit, cause in EDITS.items():
        (found,) = breaks(open_run(run)[edit.__name__])
        assert (found.number, found.old_number, found.cause) == (3, 2, cause), edit.__name__
        check_place(found, open_run(run)[edit.__name__].tree.call(found.call_id))
    told = CliRunner().invoke(app, ["tree", str(run), "arguments", "--breaks"])
    assert told.exit_code == 0, told.output
    assert "arguments: arguments of a tool call were re-written" in told.output


async def converse(client: Any, edit: Callable[[Body], None]) -> None:
    """Two turns that go on from one another, and a third one with an edited history."""
    body: Body = {
        "model": "toy",
        "max_tokens": 64,
        "system": "You mend things. Today is Mon Nov 2.",
        "tools": TOOLS,
        "messages": [{"role": "user", "content": "mend the parser"}],
    }
    for text in ("it was long " * 9, "and now?"):
        message = await client.messages.create(**body)
        body["messages"].append({"role": "assistant", "content": [b.model_dump() for b in message.content]})
        used = [b.id for b in message.content if b.type == "tool_use"]
        answer = [{"type": "tool_result", "tool_use_id": used[0], "content": text}] if used else text
        body["messages"].append({"role": "user", "content": answer})
    body = copy.deepcopy(body)
    edit(body)
    await client.messages.create(**body)


def check_place(found: Break, call: Call) -> None:
    """The token named is the first one that differs, and the one that the proxy noted when it rendered the call."""
    assert found.token is not None
    assert (found.token, found.tokens_lost) == (call.first_difference_token, call.tokens_lost)
    assert found.old.ids_before == found.new.ids_before
    assert found.old.ids_after[:1] != found.new.ids_after[:1]
