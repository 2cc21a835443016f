"""OpenAI Chat Completions: requests, replies, and streams folded into the message that they stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gyre_proxy.dialects.inbound import arguments_of, join_lines
from gyre_proxy.message import Message, ToolCall
from gyre_proxy.observe.said import Said, kept, text_of
from gyre_proxy.observe.wires.anthropic import error_text

__all__ = ["error_text", "messages_of", "reply", "streamed", "tools_of"]

_KNOWN = ("role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "name", "refusal")


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """The conversation."""
    return [_message(message) for message in body.get("messages") or () if isinstance(message, Mapping)]


def tools_of(body: Mapping[str, Any]) -> list[Any]:
    """Tools of the request."""
    return [kept(tool) for tool in body.get("tools") or ()]


def reply(body: Mapping[str, Any]) -> Said:
    """A completion that came whole; of several choices the first is the reply."""
    choices = [choice for choice in body.get("choices") or () if isinstance(choice, Mapping)]
    said = Said(odd=[f"{len(choices) - 1} more choices are not shown"] if len(choices) > 1 else [])
    if choices and isinstance(message := choices[0].get("message"), Mapping):
        said.form = {name: value for name, value in message.items() if value is not None}
        said.message = _message({**message, "role": "assistant"})
        said.stop_reason = text_of(choices[0].get("finish_reason")) or None
        said.at_limit = said.stop_reason == "length"
    usage = body.get("usage")
    said.usage = usage if isinstance(usage, Mapping) else None
    said.model = text_of(body.get("model")) or None
    return said


def streamed(events: Sequence[Any]) -> Said:
    """The completion that a stream of chunks builds."""
    body: dict[str, Any] = {}
    messages: dict[int, dict[str, Any]] = {}
    finish: dict[int, Any] = {}
    error, other = None, 0
    for event in events:
        if not isinstance(event, Mapping) or not ("choices" in event or "error" in event):
            other += 1
            continue
        if event.get("error"):
            error = error_text(event)
        body |= {name: event[name] for name in ("model", "usage") if event.get(name)}
        for choice in event.get("choices") or ():
            index = choice.get("index", 0)
            _grow(messages.setdefault(index, {}), choice.get("delta") or {})
            finish[index] = choice.get("finish_reason") or finish.get(index)
    for message in messages.values():
        if calls := message.pop("calls", None):
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
    choices = [{"message": messages[index], "finish_reason": finish.get(index)} for index in sorted(messages)]
    said = reply({**body, "choices": choices})
    said.error, said.whole = error, bool(choices) and all(choice["finish_reason"] for choice in choices)
    said.odd += [f"{other} events of unknown type"] if other else []
    return said


def _grow(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for piece in value or ():
                _grow_call(message.setdefault("calls", {}), piece)
        elif isinstance(value, str) and name != "role":
            message[name] = text_of(message.get(name)) + value
        elif isinstance(value, list):
            message[name] = [*(message.get(name) or ()), *value]
        elif value is not None:
            message[name] = value


def _grow_call(calls: dict[int, dict[str, Any]], piece: Mapping[str, Any]) -> None:
    call = calls.setdefault(piece.get("index", len(calls)), {"type": "function", "function": {"arguments": ""}})
    if piece.get("id"):
        call["id"] = piece["id"]
    function = piece.get("function") or {}
    if function.get("name"):
        call["function"]["name"] = function["name"]
    call["function"]["arguments"] += text_of(function.get("arguments"))


def _message(sent: Mapping[str, Any]) -> Message:
    role, content = text_of(sent.get("role")) or "user", sent.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [kept(p) for p in content or ()]
    texts = [text_of(part.get("text")) for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    texts += [text_of(sent.get("refusal"))] if sent.get("refusal") else []
    left = [part for part in parts if not (isinstance(part, Mapping) and part.get("type") == "text")]
    fields = {name: value for name, value in sent.items() if name not in _KNOWN and value is not None}
    raw = {**({"blocks": left} if left else {}), **({"fields": fields} if fields else {})}
    assistant = role == "assistant"
    calls = [call for call in sent.get("tool_calls") or () if isinstance(call, Mapping)] if assistant else []
    reasoning = text_of(sent.get("reasoning_content")) or text_of(sent.get("reasoning"))
    return Message(
        role="system" if role == "developer" else role,
        content="".join(texts) if assistant else join_lines(texts),
        reasoning=(reasoning or None) if assistant else None,
        tool_calls=tuple(_call(call) for call in calls),
        tool_call_id=text_of(sent.get("tool_call_id")) or None,
        name=text_of(sent.get("name")) or None,
        raw=raw or None,
    )


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function") or call.get("custom") or {}
    given = function.get("arguments", function.get("input", ""))
    return ToolCall(
        name=text_of(function.get("name")), arguments=arguments_of(given), id=text_of(call.get("id")) or None
    )
