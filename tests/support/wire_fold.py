"""Folds the bytes of a stream into the message that a client ends up with, written apart from the encoders."""

import json
from typing import Any


def sse(data: bytes) -> list[tuple[str, Any]]:
    """(event name, data) of each event; comments are left out."""
    events = []
    for block in data.decode().split("\n\n"):
        name, payload = "", ""
        for line in block.splitlines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                payload += line[6:]
        if payload:
            events.append((name, json.loads(payload) if payload != "[DONE]" else payload))
    return events


def fold_anthropic(data: bytes) -> dict[str, Any]:
    """The message, with the rules of the wire asserted on the way."""
    events = sse(data)
    assert all(name == event["type"] for name, event in events)
    assert [events[0][0], events[-1][0]] == ["message_start", "message_stop"]
    message: dict[str, Any] = events[0][1]["message"]
    inputs: dict[int, str] = {}
    open_index: int | None = None
    for kind, event in events[1:-1]:
        if kind == "content_block_start":
            assert open_index is None
            open_index = event["index"]
            assert open_index == len(message["content"])
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            assert event["index"] == open_index
            block, delta = message["content"][open_index], event["delta"]
            match delta["type"]:
                case "text_delta":
                    assert delta["text"]
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] += delta["signature"]
                case "input_json_delta":
                    inputs[open_index] = inputs.get(open_index, "") + delta["partial_json"]
        elif kind == "content_block_stop":
            assert event["index"] == open_index
            if open_index in inputs:
                message["content"][open_index]["input"] = json.loads(inputs[open_index])
            open_index = None
        else:
            assert kind == "message_delta"
            message |= event["delta"]
            message["usage"] |= event["usage"]
    assert open_index is None
    return message


def fold_chat(data: bytes) -> dict[str, Any]:
    """The completion, in the form of one that was not streamed."""
    events = [event for _, event in sse(data)]
    assert events.pop() == "[DONE]"
    completion = {**events[0], "object": "chat.completion", "choices": []}
    message: dict[str, Any] = {"role": "", "content": None}
    choice = {"index": 0, "message": message, "finish_reason": None, "logprobs": None}
    for event in events:
        if event.get("usage"):
            completion["usage"] = event["usage"]
        for part in event["choices"]:
            assert choice["finish_reason"] is None
            choice["finish_reason"] = part["finish_reason"]
            for field, value in part["delta"].items():
                if field == "tool_calls":
                    for call in value:
                        calls = message.setdefault("tool_calls", [])
                        assert call.pop("index") == len(calls)
                        calls.append(call)
                elif value is not None:
                    message[field] = (message.get(field) or "") + value
    assert choice["finish_reason"] is not None
    return {**completion, "choices": [choice]}


def fold_responses(data: bytes) -> dict[str, Any]:
    """The response of the last event, with the rules of the wire asserted on the way."""
    events = sse(data)
    assert all(name == event["type"] for name, event in events)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    text = ""
    for kind, event in events[2:-1]:
        if kind == "response.in_progress":
            assert event["response"]["output"] == items
            continue
        assert event["output_index"] == len(items)
        match kind.removeprefix("response."):
            case "output_item.added":
                text = ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["delta"]
                text += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == text
            case "function_call_arguments.done":
                assert event["arguments"] == text
            case "content_part.added" | "content_part.done":
                assert event["part"]["text"] == text
            case "output_item.done":
                item = event["item"]
                assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
                items.append(item)
            case _:
                raise AssertionError(kind)
    kind, last = events[-1]
    response: dict[str, Any] = last["response"]
    assert kind == f"response.{response['status']}"
    assert response["output"] == items
    return response
