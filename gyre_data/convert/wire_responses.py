"""Items of OpenAI Responses as messages: what Codex's sessions and logs of that API hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .calls import Opening
from .messages import Message, join_lines, list_of, message, text_of, tool_call

__all__ = ["conversation", "is_model", "item_message", "opening", "turn"]

_TEXT = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
# Marks of a client or a server on an item that say nothing of what was said.
_MARKS = ("id", "status", "cache_control", "metadata", "internal_chat_message_metadata_passthrough")


def opening(body: Mapping[str, Any]) -> Opening:
    """Instructions and tools of a request."""
    told = text_of(body.get("instructions"))
    tools = tuple(list_of(body.get("tools")))
    return Opening(system=(message("system", told),) if told else (), tools=tools)


def conversation(given: Any) -> list[Message]:
    """The messages of an input; neighbouring items of the model are one turn."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(given)
    found: list[Message] = []
    run: list[Mapping[str, Any]] = []
    for item in items:
        if not isinstance(item, Mapping):
            continue
        if is_model(item):
            run.append(item)
            continue
        if run:
            found.append(turn(run))
            run = []
        found.append(item_message(item))
    return [*found, turn(run)] if run else found


def is_model(item: Mapping[str, Any]) -> bool:
    """Whether the model made the item: its own messages, reasoning, and every kind of call."""
    kind = text_of(item.get("type")) or "message"
    if kind == "message":
        return item.get("role") == "assistant"
    return kind == "reasoning" or (kind.endswith("_call") and not kind.endswith("_output"))


def item_message(item: Mapping[str, Any]) -> Message:
    """An item that the client made: a message, the output of a call, or what is not known."""
    kind = text_of(item.get("type")) or "message"
    if kind == "message":
        role, (texts, left) = text_of(item.get("role")) or "user", _texts(item.get("content"))
        return message("system" if role == "developer" else role, join_lines(texts), blocks=left)
    if kind.endswith("_output"):
        output = item.get("output")
        texts, left = _texts(output)
        left = [*left, output] if isinstance(output, Mapping) else left
        answers = text_of(item.get("call_id")) or text_of(item.get("id"))
        return message("tool", join_lines(texts), tool_call_id=answers, blocks=left)
    return message("user", blocks=[_bare(item)])


def turn(items: Iterable[Mapping[str, Any]]) -> Message:
    """One turn of the model. Ids of items are left out: some clients drop them."""
    text = reasoning = ""
    calls: list[dict[str, Any]] = []
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
                space, name = text_of(item.get("namespace")), text_of(item.get("name"))
                given = item.get("arguments", item.get("input", ""))
                calls.append(tool_call(f"{space}.{name}" if space else name, given, item.get("call_id")))
            case _:
                left.append(_bare(item))
    return message("assistant", text, reasoning=reasoning, tool_calls=calls, blocks=left)


def _texts(content: Any) -> tuple[list[str], list[Any]]:
    """Texts of a content, and the parts that are none."""
    if isinstance(content, str):
        return [content], []
    parts = list(content) if isinstance(content, Sequence) else []
    known = [part for part in parts if isinstance(part, Mapping) and part.get("type") in _TEXT]
    return [text_of(part.get("text")) for part in known], [part for part in parts if part not in known]


def _bare(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in _MARKS}
