"""Anthropic Messages: requests, replies, and streams folded into the message that they stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from gyre_proxy.dialects.inbound import arguments_of, join_lines
from gyre_proxy.json_text import load_tolerant
from gyre_proxy.message import Message, ToolCall
from gyre_proxy.observe.said import Said, kept, text_of

__all__ = ["error_text", "messages_of", "reply", "streamed", "tools_of"]

_BILLING = "x-anthropic-billing-header:"  # changes in the middle of a session
_STREAMED_TEXT = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """The conversation; leading system text is its first message."""
    found: list[Message] = []
    system = [block for block in _blocks(body.get("system")) if not _text(block).startswith(_BILLING)]
    if system:
        found.append(_plain("system", system))
    for message in body.get("messages") or ():
        if not isinstance(message, Mapping):
            continue
        role, blocks = text_of(message.get("role")) or "user", _blocks(message.get("content"))
        if role == "assistant":
            found.append(_assistant(blocks))
            continue
        results = [block for block in blocks if _kind(block) == "tool_result"]
        rest = [block for block in blocks if _kind(block) != "tool_result"]
        found += [_result(block) for block in results]
        if rest or not results:
            found.append(_plain(role, rest))
    return found


def tools_of(body: Mapping[str, Any]) -> list[Any]:
    """Tools of the request but the deferred ones, which come and go without changing what was said."""
    tools = [kept(tool) for tool in body.get("tools") or ()]
    return [tool for tool in tools if not (isinstance(tool, Mapping) and tool.get("defer_loading"))]


def reply(body: Mapping[str, Any]) -> Said:
    """A message that came whole."""
    said = Said(form=_form(body))
    said.message = _assistant(_blocks(body.get("content")))
    said.stop_reason = text_of(body.get("stop_reason")) or None
    said.at_limit = said.stop_reason in ("max_tokens", "model_context_window_exceeded")
    usage = body.get("usage")
    said.usage = usage if isinstance(usage, Mapping) else None
    said.model = text_of(body.get("model")) or None
    return said


def streamed(events: Sequence[Any]) -> Said:
    """The message that a stream of events builds. Unknown events are kept with it, broken ones are named."""
    message: dict[str, Any] = {"role": "assistant", "content": []}
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    other: list[Any] = []
    error, whole = None, False
    for event in events:
        kind = event.get("type") if isinstance(event, Mapping) else None
        if kind == "message_start":
            start = event.get("message")
            message |= {**start, "content": []} if isinstance(start, Mapping) else {}
        elif kind == "content_block_start" and isinstance(event.get("content_block"), Mapping):
            blocks[event.get("index", len(blocks))] = dict(event["content_block"])
        elif kind == "content_block_delta" and isinstance(event.get("delta"), Mapping):
            _grow(blocks.setdefault(event.get("index", 0), {}), event["delta"], inputs, event.get("index", 0))
        elif kind == "message_delta":
            delta, usage = event.get("delta"), event.get("usage")
            message |= {k: v for k, v in delta.items() if v is not None} if isinstance(delta, Mapping) else {}
            if isinstance(usage, Mapping):
                message["usage"] = {**(message.get("usage") or {}), **{k: v for k, v in usage.items() if v is not None}}
        elif kind == "message_stop":
            whole = True
        elif kind == "error":
            error = error_text(event)
        elif kind not in ("ping", "content_block_stop"):
            other.append(event)
    odd = []
    for index, text in inputs.items():
        blocks[index]["input"], fault = _input(text, blocks[index].get("input"))
        odd += [fault] if fault else []
    message["content"] = [blocks[index] for index in sorted(blocks)]
    said = reply(message)
    said.error, said.whole = error, whole
    said.odd = odd + ([f"{len(other)} events of unknown type are kept with the message"] if other else [])
    if other and said.message is not None:
        said.message = _with_events(said.message, other)
    return said


def error_text(body: Any) -> str:
    """`type: message` of an error body."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        return orjson.dumps(body).decode()[:500]
    return f"{error.get('type') or error.get('code') or 'error'}: {error.get('message')}"[:2000]


def _grow(block: dict[str, Any], delta: Mapping[str, Any], inputs: dict[int, str], index: int) -> None:
    kind = text_of(delta.get("type"))
    if kind in _STREAMED_TEXT:
        name = _STREAMED_TEXT[kind]
        block[name] = text_of(block.get(name)) + text_of(delta.get(name))
    elif kind == "input_json_delta":
        inputs[index] = inputs.get(index, "") + text_of(delta.get("partial_json"))
    elif kind == "citations_delta":
        block["citations"] = [*(block.get("citations") or ()), delta.get("citation")]
    else:
        block["deltas"] = [*block.get("deltas", ()), dict(delta)]


def _input(text: str, start: Any) -> tuple[Any, str | None]:
    """Input of a streamed tool call: an object, or the text of what is none."""
    if not text.strip():
        return start if start is not None else {}, None
    try:
        return load_tolerant(text.encode()), None
    except ValueError as error:
        return text, f"the input of a tool call is no JSON: {error}"


def _form(body: Mapping[str, Any]) -> dict[str, Any]:
    names = ("role", "content", "stop_reason", "stop_sequence", "usage")
    return {name: body[name] for name in names if body.get(name) is not None}


def _with_events(message: Message, other: Iterable[Any]) -> Message:
    # Kept beside the blocks, where matching does not look: a client cannot send them back.
    raw = {**(message.raw or {}), "fields": {"events": list(other)}}
    return Message(
        role="assistant",
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=message.tool_calls,
        raw=raw,
    )


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [kept(block) for block in content] if isinstance(content, Sequence) else []


def _kind(block: Any) -> str:
    return text_of(block.get("type")) if isinstance(block, Mapping) else ""


def _text(block: Any) -> str:
    return text_of(block.get("text")) if _kind(block) == "text" else ""


def _raw(blocks: list[Any]) -> dict[str, Any] | None:
    return {"blocks": blocks} if blocks else None


def _plain(role: str, blocks: Sequence[Any]) -> Message:
    texts = [_text(block) for block in blocks if _kind(block) == "text"]
    return Message(role=role, content=join_lines(texts), raw=_raw([b for b in blocks if _kind(b) != "text"]))


def _result(block: Mapping[str, Any]) -> Message:
    inner = _blocks(block.get("content"))
    left: list[Any] = [item for item in inner if _kind(item) != "text"]
    if block.get("is_error"):
        left.append({"type": "tool_result", "is_error": True})
    return Message(
        role="tool",
        content=join_lines(_text(item) for item in inner if _kind(item) == "text"),
        tool_call_id=text_of(block.get("tool_use_id")) or None,
        raw=_raw(left),
    )


def _assistant(blocks: Sequence[Any]) -> Message:
    """One turn. Texts join without a gap; signatures and blocks of server tools stay in `raw`."""
    text = reasoning = ""
    calls: list[ToolCall] = []
    left: list[Any] = []
    for block in blocks:
        match _kind(block):
            case "text":
                text += _text(block)
                if block.get("citations"):
                    left.append({"type": "text", "citations": block["citations"]})
            case "thinking":
                reasoning += text_of(block.get("thinking"))
                left.append({"type": "thinking", "signature": block.get("signature")})
            case "tool_use":
                name, given = text_of(block.get("name")), arguments_of(block.get("input", {}))
                calls.append(ToolCall(name=name, arguments=given, id=text_of(block.get("id")) or None))
            case _:
                left.append(block)
    return Message(role="assistant", content=text, reasoning=reasoning or None, tool_calls=tuple(calls), raw=_raw(left))
