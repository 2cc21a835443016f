"""Streamed replies put together again: the body that the same call would have had without streaming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .lines import load_json
from .messages import objects_of, text_of

__all__ = ["events_of", "folded"]

_TEXT = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
_LAST = ("response.completed", "response.incomplete", "response.failed")


def events_of(text: str) -> list[Any]:
    """Data of the server-sent events in `text`; what is no JSON is left out."""
    found = []
    for block in text.replace("\r\n", "\n").replace("\r", "\n").split("\n\n"):
        data = "\n".join(line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:"))
        try:
            found.append(load_json(data.encode()))
        except ValueError:  # [DONE], a comment, a cut end
            continue
    return found


def folded(events: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    """The body that events build, and whether the last one came."""
    told = [event for event in events if isinstance(event, Mapping)]
    if any(text_of(event.get("type")).startswith("response.") for event in told):
        return _responses(told)
    if any("choices" in event for event in told):
        return _chat(told)
    return _anthropic(told)


def _responses(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
    """The last event holds the response; a cut stream gives its finished items."""
    body: dict[str, Any] = {}
    done: list[Any] = []
    whole = False
    for event in events:
        response = event.get("response")
        if event.get("type") == "response.output_item.done":
            done.append(event.get("item"))
        elif isinstance(response, Mapping):
            body |= response
            whole = whole or event.get("type") in _LAST
    return {**body, "output": body.get("output") or done}, whole


def _chat(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
    body: dict[str, Any] = {}
    said: dict[str, Any] = {"role": "assistant"}
    calls: dict[int, dict[str, Any]] = {}
    finish = None
    for event in events:
        body |= {name: event[name] for name in ("id", "model", "usage", "error") if event.get(name)}
        for choice in objects_of(event.get("choices")):
            if choice.get("index", 0) != 0:
                continue
            finish = choice.get("finish_reason") or finish
            delta = choice.get("delta")
            for name, value in (delta if isinstance(delta, Mapping) else {}).items():
                if name == "tool_calls":
                    for piece in objects_of(value):
                        _grow_call(calls, piece)
                elif isinstance(value, str) and name != "role":
                    said[name] = text_of(said.get(name)) + value
    if calls:
        said["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {**body, "choices": [{"message": said, "finish_reason": finish}]}, finish is not None


def _grow_call(calls: dict[int, dict[str, Any]], piece: Mapping[str, Any]) -> None:
    call = calls.setdefault(
        piece.get("index", len(calls)), {"type": "function", "function": {"name": "", "arguments": ""}}
    )
    call["id"] = piece.get("id") or call.get("id")
    function = piece.get("function")
    if isinstance(function, Mapping):
        call["function"]["name"] = text_of(function.get("name")) or call["function"]["name"]
        call["function"]["arguments"] += text_of(function.get("arguments"))


def _anthropic(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
    body: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    whole = False
    for event in events:
        index, delta = event.get("index", 0), event.get("delta")
        match event.get("type"):
            case "message_start" if isinstance(event.get("message"), Mapping):
                body |= event["message"]
            case "content_block_start" if isinstance(event.get("content_block"), Mapping):
                blocks[index] = dict(event["content_block"])
            case "content_block_delta" if isinstance(delta, Mapping):
                block, kind = blocks.setdefault(index, {}), text_of(delta.get("type"))
                if name := _TEXT.get(kind):
                    block[name] = text_of(block.get(name)) + text_of(delta.get(name))
                elif kind == "input_json_delta":
                    inputs[index] = inputs.get(index, "") + text_of(delta.get("partial_json"))
            case "message_delta":
                body |= {k: v for k, v in delta.items() if v is not None} if isinstance(delta, Mapping) else {}
                used = event.get("usage")
                if isinstance(used, Mapping):
                    body["usage"] = {**(body.get("usage") or {}), **{k: v for k, v in used.items() if v is not None}}
            case "message_stop":
                whole = True
            case "error":
                body["error"] = event.get("error")
            case _:
                pass
    for index, text in inputs.items():
        blocks[index]["input"] = text
    return {**body, "content": [blocks[index] for index in sorted(blocks)]}, whole
