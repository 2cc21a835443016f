"""Items of OpenAI Responses as what was said: for Codex's sessions, logs of that API, and the proxy that observes it.

`said` and `turn_said` read items into a form without ids and marks; `conversation` and `turn` make messages of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .calls import Opening
from .messages import Message, join_lines, list_of, message, text_of, tool_call

__all__ = ["ItemsSaid", "conversation", "conversation_said", "is_model", "item_message", "opening", "turn", "turn_said"]

_TEXT = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
# Marks of a client or a server on an item that say nothing of what was said.
_MARKS = ("id", "status", "cache_control", "metadata", "internal_chat_message_metadata_passthrough")


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemsSaid:
    """What one message of the client, or the items of one turn of the model, say."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any, str], ...] = ()
    """Name, arguments as they came, id."""
    answers: str = ""
    """Id of the call whose output it is."""
    left: tuple[Any, ...] = ()
    """Blocks that are no text."""

    def message(self) -> Message:
        """In the form in which a run stores it."""
        return message(
            self.role,
            self.text,
            reasoning=self.reasoning,
            tool_calls=[tool_call(*call) for call in self.calls],
            tool_call_id=self.answers,
            blocks=self.left,
        )


def opening(body: Mapping[str, Any]) -> Opening:
    """Instructions and tools of a request."""
    told = text_of(body.get("instructions"))
    tools = tuple(list_of(body.get("tools")))
    return Opening(system=(message("system", told),) if told else (), tools=tools)


def conversation(given: Any) -> list[Message]:
    """The messages of an input; neighbouring items of the model are one turn."""
    return [said.message() for said in conversation_said(given)]


def conversation_said(given: Any) -> Iterator[ItemsSaid]:
    """What an input says; neighbouring items of the model are one turn."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(given)
    run: list[Mapping[str, Any]] = []
    for item in items:
        if not isinstance(item, Mapping):
            continue
        if is_model(item):
            run.append(item)
            continue
        if run:
            yield turn_said(run)
            run = []
        yield _item_said(item)
    if run:
        yield turn_said(run)


def is_model(item: Mapping[str, Any]) -> bool:
    """Whether the model made the item: its own messages, reasoning, and every kind of call."""
    kind = text_of(item.get("type")) or "message"
    if kind == "message":
        return item.get("role") == "assistant"
    return kind == "reasoning" or (kind.endswith("_call") and not kind.endswith("_output"))


def item_message(item: Mapping[str, Any]) -> Message:
    """An item that the client made: a message, the output of a call, or what is not known."""
    return _item_said(item).message()


def turn(items: Iterable[Mapping[str, Any]]) -> Message:
    """One turn of the model."""
    return turn_said(items).message()


def _item_said(item: Mapping[str, Any]) -> ItemsSaid:
    kind = text_of(item.get("type")) or "message"
    if kind == "message":
        role, (texts, left) = text_of(item.get("role")) or "user", _texts(item.get("content"))
        return ItemsSaid(role="system" if role == "developer" else role, text=join_lines(texts), left=tuple(left))
    if kind.endswith("_output"):
        output = item.get("output")
        texts, left = _texts(output)
        left = [*left, output] if isinstance(output, Mapping) else left
        answers = text_of(item.get("call_id")) or text_of(item.get("id"))
        return ItemsSaid(role="tool", text=join_lines(texts), answers=answers, left=tuple(left))
    return ItemsSaid(role="user", left=(_bare(item),))


def turn_said(items: Iterable[Mapping[str, Any]]) -> ItemsSaid:
    """What one turn of the model says. Ids of items are left out: some clients drop them."""
    text = reasoning = ""
    calls: list[tuple[str, Any, str]] = []
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
                calls.append((f"{space}.{name}" if space else name, given, text_of(item.get("call_id"))))
            case _:
                left.append(_bare(item))
    return ItemsSaid(role="assistant", text=text, reasoning=reasoning, calls=tuple(calls), left=tuple(left))


def _texts(content: Any) -> tuple[list[str], list[Any]]:
    """Texts of a content, and the parts that are none."""
    if isinstance(content, str):
        return [content], []
    parts = [_unmarked(part) for part in content] if isinstance(content, Sequence) else []
    known = [part for part in parts if isinstance(part, Mapping) and part.get("type") in _TEXT]
    return [text_of(part.get("text")) for part in known], [part for part in parts if part not in known]


def _unmarked(part: Any) -> Any:
    """A part without the mark that moves from request to request."""
    return {k: v for k, v in part.items() if k != "cache_control"} if isinstance(part, Mapping) else part


def _bare(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in _MARKS}
