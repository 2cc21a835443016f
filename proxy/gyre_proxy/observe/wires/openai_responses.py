"""OpenAI Responses: requests, replies, and streams folded into the items that they stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gyre_data.convert.wire_responses import ItemsSaid, conversation_said, turn_said
from gyre_proxy.dialects.inbound import arguments_of
from gyre_proxy.message import Message, ToolCall
from gyre_proxy.observe.said import Said, kept, text_of
from gyre_proxy.observe.wires.anthropic import error_text

__all__ = ["error_text", "messages_of", "reply", "streamed", "tools_of"]

_LAST = ("response.completed", "response.incomplete", "response.failed")


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """The conversation: `instructions` first; neighbouring items of the model are one turn."""
    instructions = text_of(body.get("instructions"))
    first = [Message(role="system", content=instructions)] if instructions else []
    return [*first, *map(_message, conversation_said(body.get("input")))]


def tools_of(body: Mapping[str, Any]) -> list[Any]:
    """Tools of the request."""
    return [kept(tool) for tool in body.get("tools") or ()]


def reply(body: Mapping[str, Any]) -> Said:
    """A response that came whole."""
    items = [item for item in body.get("output") or () if isinstance(item, Mapping)]
    said = Said(form=items, message=_message(turn_said(items)) if items else None)
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


def _message(said: ItemsSaid) -> Message:
    return Message(
        role=said.role,
        content=said.text,
        reasoning=said.reasoning or None,
        tool_calls=tuple(
            ToolCall(name=name, arguments=arguments_of(given), id=call_id or None)
            for name, given, call_id in said.calls
        ),
        tool_call_id=said.answers or None,
        raw={"blocks": list(said.left)} if said.left else None,
    )
