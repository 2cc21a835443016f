"""P16: the same message in another shape is the same prompt, and another message never is, on both wires."""

import json
from pathlib import Path
from typing import Any

import pytest

from gyre_proxy.dialects import BadRequest, load
from gyre_proxy.history import PromptPlan
from tests.support.driver import Driver
from tests.support.toy_template import ToyTemplate

CASE = json.loads((Path(__file__).parents[1] / "data" / "cases" / "P16.json").read_text(encoding="utf-8"))
ROUND = {"role": "user", "content": "?"}


def anthropic(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The case's message on the Anthropic wire, where null content does not exist beside calls."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    for call_id, name, arguments in message.get("tool_calls", ()):
        blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": arguments})
    shown = content if isinstance(content, str) and "tool_calls" not in message else blocks
    return [{"role": message["role"], "content": shown}]


def chat(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for call_id, name, arguments in message.get("tool_calls", ())
    ]
    return [{**message, **({"tool_calls": calls} if calls else {})}]


def planned(driver: Driver, wire: str, messages: list[dict[str, Any]]) -> PromptPlan | None:
    """The plan of a request; None when it is refused."""
    body = {"model": "m", "max_tokens": 9, "messages": [ROUND, *messages, ROUND]}
    try:
        request = load(wire).parse(json.dumps(body).encode(), {})
    except BadRequest:
        return None
    return driver.history.plan(request, driver.label)


@pytest.mark.parametrize(("wire", "shape"), [("openai_chat", chat), ("anthropic", anthropic)])
@pytest.mark.parametrize("pair", CASE["input"]["pairs"], ids=lambda pair: json.dumps(pair[:2])[:60])
def test_p16_same_message_other_shape(pair: list[Any], wire: str, shape: Any) -> None:
    one, two, same = pair
    driver = Driver(ToyTemplate())
    first = planned(driver, wire, shape(one))
    if first is None:  # an image: refused, so it is nobody's twin
        assert not same
        return
    driver.history.reserve(first)
    second = planned(driver, wire, shape(two))
    assert second is not None
    assert (second.node_ids == first.node_ids) is same
    assert (second.prompt_ids.tolist() == first.prompt_ids.tolist()) is same
    assert (second.chain[-1] == first.chain[-1]) is same
