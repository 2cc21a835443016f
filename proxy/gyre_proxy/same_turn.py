"""When an assistant message that a client sends back is the turn we sampled.

Clients parse a reply and write it again: key order, spacing, number form and block order change, defaults appear,
outer blanks go. That is the same turn. Another value never is: then the client rewrote history, and what it wrote is
context, not a sampled turn. Measured rewrites per client are in the table below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from .json_text import read_object
from .message import Message, ToolCall, canonical

__all__ = ["canonical_hash", "canonical_message", "echoed_as_sent", "message_from_json", "message_json", "same_turn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rewrites:
    """What a client is known to change in a tool call without meaning another one."""

    added_false: bool = False
    """It adds optional arguments with their default, false."""
    line_blanks: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    """(tool, argument) whose lines lose their trailing blanks."""


_KNOWN = {
    "claude-code": _Rewrites(
        added_false=True, line_blanks=frozenset({("Edit", "new_string"), ("Edit", "old_string"), ("Write", "content")})
    )
}
_STRICT = _Rewrites()
# Blocks whose content the canonical text leaves out although it is part of what was said.
_TEXT_BLOCKS = frozenset(
    {"text", "input_text", "output_text", "tool_use", "tool_result", "thinking", "redacted_thinking", "message"}
    | {"function", "function_call", "function_call_output", "reasoning", "ephemeral"}
)


def canonical_message(message: Message) -> bytes:
    """Bytes that are equal for messages that say the same, whatever their JSON form.

    Reasoning, ids of calls and cache markers are left out; outer blanks count, except in assistant text. Images and
    other blocks that are no text enter by digest.
    """
    text = message.content.strip() if message.role == "assistant" else message.content
    value: dict[str, Any] = {"role": message.role, "content": text}
    if message.tool_calls:
        value["calls"] = [[call.name, _arguments(call)] for call in message.tool_calls]
    if message.tool_call_id:
        value["answers"] = message.tool_call_id
    if message.name:
        value["name"] = message.name
    if extra := _foreign_blocks(message.raw):
        value["blocks"] = extra
    return canonical(value)


def canonical_hash(message: Message) -> str:
    """Digest of `canonical_message`."""
    return hashlib.sha256(canonical_message(message)).hexdigest()[:32]


def message_json(message: Message) -> bytes:
    """JSON of a message that keeps argument order and number form, so that it renders as it did; see the inverse."""
    value: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        value["reasoning"] = message.reasoning
    if message.tool_calls:
        value["tool_calls"] = [
            {"name": call.name, "arguments": call.arguments, **({} if call.id is None else {"id": call.id})}
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name", "raw"):
        if (item := getattr(message, name)) is not None:
            value[name] = item
    return orjson.dumps(value)


def message_from_json(data: bytes) -> Message:
    """The message that `message_json` wrote."""
    value = orjson.loads(data)
    calls = value.pop("tool_calls", ())
    return Message(tool_calls=tuple(ToolCall(**call) for call in calls), **value)


def same_turn(sent: Message, echoed: Message, client: str | None) -> bool:
    """Whether `echoed`, as the client named `client` sent it back, is the reply `sent`."""
    if echoed.role != "assistant" or sent.content.strip() != echoed.content.strip():
        return False
    if echoed.reasoning and echoed.reasoning.strip() and echoed.reasoning.strip() != (sent.reasoning or "").strip():
        return False
    if len(sent.tool_calls) != len(echoed.tool_calls) or _foreign_blocks(echoed.raw):
        return False
    known = _KNOWN.get(client or "", _STRICT)
    pairs = zip(sent.tool_calls, echoed.tool_calls, strict=True)
    return all(one.name == two.name and _same_arguments(one, two, known) for one, two in pairs)


def echoed_as_sent(sent: Message, echoed: Message) -> bool:
    """Whether nothing at all was changed, down to the order of arguments and the form of numbers."""
    if (sent.content, sent.reasoning or "") != (echoed.content, echoed.reasoning or ""):
        return False

    def form(message: Message) -> bytes:
        return orjson.dumps([[call.name, call.arguments] for call in message.tool_calls])

    return form(sent) == form(echoed)


def _arguments(call: ToolCall) -> Any:
    if not isinstance(call.arguments, str):
        return call.arguments
    read = read_object(call.arguments)
    return call.arguments.strip() if read is None else read


def _same_arguments(sent: ToolCall, echoed: ToolCall, known: _Rewrites) -> bool:
    one, two = _arguments(sent), _arguments(echoed)
    if not (isinstance(one, Mapping) and isinstance(two, Mapping)):
        return canonical(one) == canonical(two)
    added = set(two) - set(one)
    if set(one) - set(two) or (added and not (known.added_false and all(two[key] is False for key in added))):
        return False
    return all(
        _without_line_blanks(one[key]) == _without_line_blanks(two[key])
        if (sent.name, key) in known.line_blanks
        else canonical(one[key]) == canonical(two[key])
        for key in one
    )


def _without_line_blanks(value: Any) -> Any:
    return "\n".join(line.rstrip() for line in value.split("\n")) if isinstance(value, str) else value


def _foreign_blocks(raw: Any) -> list[str]:
    """Digests of the blocks in `raw` that are neither text nor calls, in order."""
    if isinstance(raw, Mapping):
        kind = raw.get("type")
        if isinstance(kind, str) and kind not in _TEXT_BLOCKS:
            plain = {key: value for key, value in raw.items() if key != "cache_control"}
            return [hashlib.sha256(canonical(plain)).hexdigest()[:32]]
        return _foreign_blocks(raw.get("blocks")) + _foreign_blocks(raw.get("content"))
    if isinstance(raw, list | tuple):
        return [found for item in raw for found in _foreign_blocks(item)]
    return []
