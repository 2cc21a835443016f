"""docs/requests.md is true: what it lists is refused, or accepted without a trace in the prompt, field by field."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gyre_data.counts import TreeCounts
from gyre_proxy.dialects import BadRequest, load
from gyre_proxy.dialects.openai_chat import _NEUTRAL

DOC = (Path(__file__).parents[2] / "docs" / "requests.md").read_text(encoding="utf-8")
MESSAGES = [{"role": "user", "content": "q"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
BASE: dict[str, dict[str, Any]] = {
    "anthropic": {
        "model": "m",
        "max_tokens": 9,
        "messages": MESSAGES,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
    "openai_chat": {"model": "m", "messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
}
WIRES = {"Anthropic": ["anthropic"], "Chat": ["openai_chat"], "both": ["anthropic", "openai_chat"]}
WITHOUT_EFFECT: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"},
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "output_config.effort": "high",
    "reasoning_effort": "low",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "safeguards": [],
    "strict": True,
    "store": True,
    "user": "u",
    "safety_identifier": "u",
    "prompt_cache_key": "k",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "parallel_tool_calls": True,
}
REFUSED: dict[str, Any] = {
    "tool_choice": {"anthropic": {"type": "any"}, "openai_chat": "required"},
    "disable_parallel_tool_use": True,
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "mcp_servers": [{"url": "http://a.example"}],
    "container": "c",
    "input_ids": [1],
    "n": 2,
    "best_of": 2,
    "top_logprobs": 1,
    "logit_bias": {"5": 1},
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["audio"],
    "continue_final_message": True,
    "add_generation_prompt": False,
    "chat_template": "x",
    "chat_template_kwargs": {"enable_thinking": False},
}


def rows(title: str) -> dict[str, str]:
    """Field and wire of each row below a heading."""
    section = DOC.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| (\w+) \|", section, re.MULTILINE))


def with_field(wire: str, name: str, value: Any) -> bytes:
    """A body that is as the base but for one field, where it belongs."""
    body = json.loads(json.dumps(BASE[wire]))
    if name == "strict":
        (body["tools"][0] if wire == "anthropic" else body["tools"][0]["function"])["strict"] = value
    elif name == "cache_control":
        body["messages"][0]["content"] = [{"type": "text", "text": "q", name: value}]
    elif name == "disable_parallel_tool_use":
        body["tool_choice"] = {"type": "auto", name: value}
    elif "." in name:
        outer, _, inner = name.partition(".")
        body[outer] = {inner: value}
    else:
        body[name] = value
    return json.dumps(body).encode()


@pytest.mark.parametrize(("name", "wires"), rows("Fields without effect").items())
def test_a_field_without_effect(name: str, wires: str) -> None:
    for wire in WIRES[wires]:
        plain = load(wire).parse(json.dumps(BASE[wire]).encode(), {})
        sent = load(wire).parse(with_field(wire, name, WITHOUT_EFFECT[name]), {})
        assert (sent.messages, sent.tools, sent.sampling) == (plain.messages, plain.tools, plain.sampling)


@pytest.mark.parametrize(("name", "wires"), rows("Fields that are refused").items())
def test_a_field_that_is_refused(name: str, wires: str) -> None:
    for wire in WIRES[wires]:
        value = REFUSED.get(name, 0.5)
        value = value[wire] if name == "tool_choice" else value
        with pytest.raises(BadRequest) as caught:
            load(wire).parse(with_field(wire, name, value), {})
        outer = "tool_choice" if name == "disable_parallel_tool_use" else name
        assert caught.value.param == outer


def test_the_tables_are_whole() -> None:
    assert set(WITHOUT_EFFECT) == set(rows("Fields without effect"))
    section = DOC.partition("## Fields that are refused")[2]
    assert [name for name in _NEUTRAL if f"`{name}`" not in section] == []
    assert all(f"`{name}`" in DOC for name in TreeCounts().to_json() if "false_fork" in name or "echo" in name)
