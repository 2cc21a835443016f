"""When an assistant message that a client sends back is the turn we sampled.

Clients parse a reply and write it again: key order, spacing, number form and block order change, defaults appear,
outer blanks go. That is the same turn. Another value never is: then the client rewrote history, and what it wrote is
context, not a sampled turn. Measured rewrites per client are in the table below. What clients make of arguments that
do not parse is not among them: such a call goes out as text and comes back as text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from .json_text import read_object
from .message import Message, ToolCall, canonical

__all__ = [
    "canonical_hash",
    "canonical_message",
    "difference",
    "echoed_as_sent",
    "message_from_json",
    "message_json",
    "same_turn",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rewrites:
    """What a client is known to change in a tool call without meaning another one."""

    added_false: bool = False
    """It adds optional arguments with their default, false."""
    line_blanks: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    """(tool, argument) whose lines lose their trailing blanks."""
    renames: bool = False
    """A tool that it does not have comes back in lower case, or as `invalid` with the name as an argument."""


_KNOWN = {
    "claude-code": _Rewrites(
        added_false=True,
        line_blanks=frozenset({("Edit", "new_string"), ("Edit", "old_string"), ("Write", "content")}),
    ),
    "opencode": _Rewrites(renames=True),
}
_STRICT = _Rewrites()
_EXACT = 2**53  # the readers of most harnesses have doubles for numbers: beyond this they come back rounded
# Blocks whose content the canonical text leaves out although it is part of what was said.
_TEXT_BLOCKS = frozenset(
    {"text", "input_text", "output_text", "tool_use", "tool_result", "thinking", "redacted_thinking", "message"}
    | {"function", "function_call", "function_call_output", "reasoning", "ephemeral"}
)


def canonical_message(message: Message) -> bytes:
    """Bytes that are equal for messages that say the same, whatever their JSON form.

    Ids of calls and cache markers are left out; outer blanks count, except in assistant text. Reasoning counts: this
    is for turns that were not sampled here, and a model must not be given other thoughts than the client sent. Images
    and other blocks that are no text enter by digest.
    """
    text = message.content.strip() if message.role == "assistant" else message.content
    value: dict[str, Any] = {"role": message.role, "content": text}
    if message.role == "assistant" and message.reasoning and (thought := message.reasoning.strip()):
        value["reasoning"] = thought
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
    return difference(sent, echoed, client) is None


def difference(sent: Message, echoed: Message, client: str | None) -> str | None:
    """What makes `echoed` another turn than the reply `sent`: role, text, reasoning, blocks, or a call; None: it is it.

    Reasoning may be left out of an echo, never changed.
    """
    if echoed.role != "assistant":
        return "role"
    if sent.content.strip() != echoed.content.strip():
        return "text"
    if echoed.reasoning and echoed.reasoning.strip() and echoed.reasoning.strip() != (sent.reasoning or "").strip():
        return "reasoning"
    if _foreign_blocks(echoed.raw) != _foreign_blocks(sent.raw):
        return "blocks"
    if len(sent.tool_calls) != len(echoed.tool_calls):
        return "number of calls"
    known = _KNOWN.get(client or "", _STRICT)
    for one, two in zip(sent.tool_calls, echoed.tool_calls, strict=True):
        if known.renames and _is_rename(one, two):
            continue
        if one.name != two.name and not (known.renames and two.name == one.name.lower()):
            return "tool name"
        if not _same_arguments(one, two, known):
            return "arguments"
    return None


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


def _is_rename(sent: ToolCall, echoed: ToolCall) -> bool:
    """A call of a tool that the client does not have; the arguments are gone, the name stands where they were."""
    told = echoed.arguments
    return echoed.name == "invalid" and isinstance(told, Mapping) and told.get("tool") == sent.name


def _same_arguments(sent: ToolCall, echoed: ToolCall, known: _Rewrites) -> bool:
    one, two = _arguments(sent), _arguments(echoed)
    if not (isinstance(one, Mapping) and isinstance(two, Mapping)):
        return canonical(one) == canonical(two)
    added = set(two) - set(one)
    if set(one) - set(two) or (added and not (known.added_false and all(two[key] is False for key in added))):
        return False
    return all(_same_value(one[key], two[key], known, (sent.name, key)) for key in one)


def _same_value(one: Any, two: Any, known: _Rewrites, place: tuple[str, str]) -> bool:
    if place in known.line_blanks and isinstance(one, str) and isinstance(two, str):
        return _without_line_blanks(one) == _without_line_blanks(two)
    return canonical(one) == canonical(two) or canonical(_doubles(one)) == canonical(_doubles(two))


def _doubles(value: Any) -> Any:
    """`value` with every whole number as a reader whose numbers are doubles has it."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT:
        return float(value)
    if isinstance(value, Mapping):
        return {key: _doubles(item) for key, item in value.items()}
    return [_doubles(item) for item in value] if isinstance(value, list | tuple) else value


def _without_line_blanks(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.split("\n"))


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
