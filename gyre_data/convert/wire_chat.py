"""Chat messages in OpenAI's form: what chat files, SWE-agent and logs of that API hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .calls import Opening
from .messages import Message, join_lines, list_of, message, objects_of, text_of, tool_call

__all__ = ["chat_message", "chat_messages", "split_opening"]

_KNOWN = ("role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "name", "refusal")


def chat_messages(sent: Any) -> list[Message]:
    """The messages of a conversation."""
    return [chat_message(one) for one in objects_of(sent)]


def split_opening(messages: list[Message], tools: Any = ()) -> tuple[Opening, list[Message]]:
    """Leading system messages with the tools, and the rest."""
    leading = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
    return Opening(system=tuple(messages[:leading]), tools=tuple(list_of(tools))), messages[leading:]


def chat_message(sent: Mapping[str, Any], ignore: Collection[str] = ()) -> Message:
    """One message. Fields that the form has no place for stay in `raw`, but for those to `ignore`."""
    role, content = text_of(sent.get("role")) or "user", sent.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content)
    texts = [text_of(part.get("text")) for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    texts += [text_of(sent.get("refusal"))] if sent.get("refusal") else []
    left = [part for part in parts if not (isinstance(part, Mapping) and part.get("type") == "text")]
    fields = {k: v for k, v in sent.items() if k not in _KNOWN and k not in ignore and v is not None}
    assistant = role == "assistant"
    calls = objects_of(sent.get("tool_calls")) if assistant else []
    return message(
        "system" if role == "developer" else role,
        "".join(texts) if assistant else join_lines(texts),
        reasoning=(text_of(sent.get("reasoning_content")) or text_of(sent.get("reasoning"))) if assistant else None,
        tool_calls=[_call(call) for call in calls],
        tool_call_id=text_of(sent.get("tool_call_id")),
        name=text_of(sent.get("name")),
        blocks=left,
        fields=fields,
    )


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = next((part for part in (call.get("function"), call.get("custom")) if isinstance(part, Mapping)), call)
    given = function.get("arguments", function.get("input", ""))
    return tool_call(function.get("name"), given, call.get("id"))
