"""SGLang's own parsers, given whole replies, find the calls and the reasoning that ours find."""

import json
import os
import random
import subprocess
from typing import Any

import pytest

from gyre_proxy.parse import parse_reply
from tests.support.engines import sglang_venv
from tests.support.reply_texts import CALLS, TOOLS

pytestmark = pytest.mark.real

READ = """
import json, sys
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
asked = json.load(sys.stdin)
tools = [Tool(**tool) for tool in asked["tools"]]
told = []
for calls, reasoning, text in asked["replies"]:
    thought = ""
    if reasoning:
        thought, text = ReasoningParser(reasoning).parse_non_stream(text)
    shown, found = FunctionCallParser(tools, calls).parse_non_stream(text or "")
    told.append([thought or "", shown, [[call.name, json.loads(call.parameters)] for call in found]])
print(json.dumps(told))
"""

GROUPS = {
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_dsml": ("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "harmony": ("<|start|>assistant", ""),
}
THEIRS = {
    "hermes": ("qwen25", "qwen3"),
    "qwen3_coder": ("qwen3_coder", "qwen3"),
    "glm": ("glm45", "glm45"),
    "deepseek": ("deepseekv31", "deepseek-r1"),
    "deepseek_dsml": ("deepseekv32", "deepseek-r1"),
    "kimi": ("kimi_k2", None),
    "harmony": ("gpt-oss", None),
}
CRATES = ["7", "two\nlines", '<b> & "q"', "é🚚", "a/b.c", "seven"]


def arguments(random: random.Random) -> dict[str, Any]:
    value: dict[str, Any] = {"crate": random.choice(CRATES), "bay": random.randint(-9, 999)}
    more = {"gently": random.random() < 0.5, "weights": [1, 2.5][: random.randint(0, 2)], "note": {"a": [None, "x"]}}
    return value | {key: item for key, item in more.items() if random.random() < 0.5}


def call(name: str, value: dict[str, Any]) -> str:
    """The call in the spelling of the family's own template."""
    bare = {key: item if isinstance(item, str) else json.dumps(item) for key, item in value.items()}
    match name:
        case "hermes":
            return f"<tool_call>\n{json.dumps({'name': 'move', 'arguments': value})}\n</tool_call>"
        case "qwen3_coder":
            pairs = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in bare.items())
            return f"<tool_call>\n<function=move>\n{pairs}</function>\n</tool_call>"
        case "glm":
            pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{text}</arg_value>\n" for k, text in bare.items())
            return f"<tool_call>move\n{pairs}</tool_call>"
        case "deepseek_dsml":
            pairs = "".join(
                f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value[key], str) else "false"}">'
                f"{text}</｜DSML｜parameter>\n"
                for key, text in bare.items()
            )
            return f'<｜DSML｜invoke name="move">\n{pairs}</｜DSML｜invoke>'
        case _:
            return CALLS[name].replace('{"crate": "7", "bay": 1}', json.dumps(value))


def reply(name: str, random: random.Random) -> str:
    opening, closing = GROUPS.get(name, ("", ""))
    num_calls = random.randint(1, 1 if name == "harmony" else 3)
    calls = "\n".join(call(name, arguments(random)) for _ in range(num_calls))
    if name == "harmony":
        return f"<|channel|>commentary<|message|>First a look.<|end|>{opening}{calls}"
    thought = "<think>hm</think>" if THEIRS[name][1] else ""
    return f"{thought}First a look.{opening}{calls}{closing}"


def theirs(replies: list[tuple[str, str | None, str]]) -> list[Any]:
    done = subprocess.run(
        [str(sglang_venv() / "bin" / "python"), "-c", READ],
        input=json.dumps({"tools": TOOLS, "replies": replies}),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    return list(json.loads(done.stdout.splitlines()[-1]))


# Replies of which SGLang 0.5.23 and we make different things on purpose: why, family, text, its text and calls.
KNOWN = (
    ("text after a call is dropped", "hermes", CALLS["hermes"] + "Done.", "", {"crate": "7", "bay": 1}),
    ("null is null even where only a string is allowed", "qwen3_coder",
     CALLS["qwen3_coder"].replace("\n7\n", "\nnull\n"), "", {"crate": None, "bay": 1}),
    ("a string that reads as a value is made one, and back", "glm",
     CALLS["glm"].replace(">7<", ">true<"), "", {"crate": "True", "bay": 1}),
    ("a call without a name is given one", "kimi",
     GROUPS["kimi"][0] + CALLS["kimi"].replace("functions.move:0", "3"), "", {"crate": "7", "bay": 1}),
)  # fmt: skip


def test_sglang_finds_the_same() -> None:
    rng = random.Random(5)
    asked = [(name, reply(name, rng)) for name in THEIRS for _ in range(12)]
    known = [(name, text) for _, name, text, _, _ in KNOWN]
    found = theirs([*((*THEIRS[name], text) for name, text in asked), *((THEIRS[n][0], None, t) for n, t in known)])
    for (name, text), (thought, shown, calls) in zip(asked, found, strict=False):
        ours = parse_reply(text, "stop", name, tools=TOOLS)
        assert ours.tool_calls, (name, text)
        assert [[call.name, call.arguments] for call in ours.tool_calls] == calls, (name, text)
        assert (ours.reasoning, ours.text.strip()) == (thought.strip(), shown.strip()), (name, text)
    for (why, name, text, shown, arguments), got in zip(KNOWN, found[len(asked) :], strict=True):
        assert got == ["", shown, [["move", arguments]]], why
        ours = parse_reply(text, "stop", name, tools=TOOLS)
        assert [ours.text, [[call.name, call.arguments] for call in ours.tool_calls]] != got[1:], why
