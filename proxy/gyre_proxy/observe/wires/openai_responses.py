"""OpenAI Responses: requests, replies, and streams folded into the items that they stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gyre_proxy.dialects.inbound import arguments_of, join_lines
from gyre_proxy.message import Message, ToolCall
from gyre_proxy.observe.said import Said, kept, text_of
from gyre_proxy.observe.wires.anthropic import error_text

__all__ = ["error_text", "messages_of", "reply", "streamed", "tools_of"]

_TEXT = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_LAST = ("response.completed", "response.incomplete", "response.failed")


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """The conversation: `instructions` first; neighbouring items of the model are one turn."""
    found: list[Message] = []
    if instructions := text_of(body.get("instructions")):
        found.append(Message(role="system", content=instructions))
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or ()
    turn: list[Mapping[str, Any]] = []
    for item in items:
        if not isinstance(item, Mapping):
            continue
        if _is_model(item):
            turn.append(item)
            continue
        if turn:
            found.append(_turn(turn))
            turn = []
        found.append(_item(item))
    return [*found, _turn(turn)] if turn else found


def tools_of(body: Mapping[str, Any]) -> list[Any]:
    """Tools of the request."""
    return [kept(tool) for tool in body.get("tools") or ()]


def reply(body: Mapping[str, Any]) -> Said:
    """A response that came whole."""
    items = [item for item in body.get("output") or () if isinstance(item, Mapping)]
    said = Said(form=items, message=_turn(items) if items else None)
    status, details = text_of(body.get("status")), body.get("incomplete_details")
    said.stop_reason = text_of(details.get("reason")) if isinstance(details, Mapping) else status or None
    said.at_limit = said.stop_reason == "max_output_tokens"
    said.error = error_text(body) if status == "failed" or body.get("error") else None
    usage = body.get("usage")
    said.usage = usage if isinstance(usage, Mapping) else None
    said.model = text_of(body.get("model")) or None
    return said


def streamed(events: Sequence[Any]) -> Said:
    """The response that a stream of events builds: its last event holds it; a cut one gives its finished items."""
    done: list[Any] = []
    first: Mapping[str, Any] = {}
    last: Mapping[str, Any] | None = None
    error, other = None, 0
    for event in events:
        kind = text_of(event.get("type")) if isinstance(event, Mapping) else ""
        if kind == "response.output_item.done":
            done.append(event.get("item"))
        elif kind in ("response.created", "response.in_progress") and isinstance(event.get("response"), Mapping):
            first = event["response"]
        elif kind in _LAST and isinstance(event.get("response"), Mapping):
            last = event["response"]
        elif kind == "error":
            error = error_text({"error": event.get("error") or event})
        elif not kind.startswith("response."):
            other += 1
    body = {**first, **(last or {})}
    if not body.get("output"):  # a minimal last event holds an id only
        body["output"] = done
    if last is None:
        body.pop("status", None)
    said = reply(body)
    said.error, said.whole = said.error or error, last is not None
    said.odd += [f"{other} events of unknown type"] if other else []
    return said


def _is_model(item: Mapping[str, Any]) -> bool:
    """Whether the model made the item: its own messages, reasoning, and every kind of call."""
    kind = text_of(item.get("type")) or "message"
    if kind == "message":
        return item.get("role") == "assistant"
    return kind == "reasoning" or (kind.endswith("_call") and not kind.endswith("_output"))


def _texts(content: Any) -> tuple[list[str], list[Any]]:
    """Texts of a content, and the parts that are none."""
    if isinstance(content, str):
        return [content], []
    parts = [kept(part) for part in content] if isinstance(content, Sequence) else []
    known = [part for part in parts if isinstance(part, Mapping) and part.get("type") in _TEXT]
    return [text_of(part.get("text")) for part in known], [part for part in parts if part not in known]


def _item(item: Mapping[str, Any]) -> Message:
    """An item that the client made: a message, the output of a call, or what is not known."""
    kind = text_of(item.get("type")) or "message"
    if kind == "message":
        role, (texts, left) = text_of(item.get("role")) or "user", _texts(item.get("content"))
        raw = {"blocks": left} if left else None
        return Message(role="system" if role == "developer" else role, content=join_lines(texts), raw=raw)
    if kind.endswith("_output"):
        texts, left = _texts(item.get("output"))
        output = item.get("output")
        left = [*left, output] if isinstance(output, Mapping) else left
        return Message(
            role="tool",
            content=join_lines(texts),
            tool_call_id=text_of(item.get("call_id")) or text_of(item.get("id")) or None,
            raw={"blocks": left} if left else None,
        )
    return Message(role="user", raw={"blocks": [_without_id(item)]})


def _turn(items: Iterable[Mapping[str, Any]]) -> Message:
    """One turn of the model. Ids of items are left out: some clients drop them."""
    text = reasoning = ""
    calls: list[ToolCall] = []
    left: list[Any] = []
    for item in items:
        match text_of(item.get("type")) or "message":
            case "message":
                texts, rest = _texts(item.get("content"))
                text += "".join(texts)
                left += rest
            case "reasoning":
                reasoning += "".join(_texts(item.get("content"))[0] or _texts(item.get("summary"))[0])
                left.append({"type": "reasoning", "encrypted_content": item.get("encrypted_content")})
            case "function_call" | "custom_tool_call":
                space = text_of(item.get("namespace"))
                name = f"{space}.{text_of(item.get('name'))}" if space else text_of(item.get("name"))
                given = arguments_of(item.get("arguments", item.get("input", "")))
                calls.append(ToolCall(name=name, arguments=given, id=text_of(item.get("call_id")) or None))
            case _:
                left.append(_without_id(item))
    return Message(
        role="assistant",
        content=text,
        reasoning=reasoning or None,
        tool_calls=tuple(calls),
        raw={"blocks": left} if left else None,
    )


def _without_id(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "status", "cache_control")}
