"""System messages after the beginning, for chat templates that refuse them, drop them, or move them to the front.

Harnesses send reminders as system messages between turns. Rendered in place they only add to what was there; moved to
the front they would change the prompt from its start with every turn. So a template is probed once, at start, and what
it cannot place is given to it as user text, in the form in which Claude Code reminds models that take no late ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from .dialects.inbound import join_lines
from .message import Message, ToolCall
from .template import RenderError, Template

__all__ = ["SystemForm", "placed", "system_form"]

_OPEN, _CLOSE = "<system-reminder>\n", "\n</system-reminder>"


class SystemForm(StrEnum):
    """How a late system message is rendered; every value but `in_place` also makes one of several leading ones."""

    IN_PLACE = "in_place"
    """As it stands."""
    USER_TURN = "user_turn"
    """As a user message of its own."""
    JOINED = "joined"
    """The same, joined with the user messages beside it or the tool result before it, for templates that want user and
    assistant by turns."""


def system_form(template: Template) -> SystemForm:
    """The first form in which the template shows every message of a conversation once and in its place."""
    for form in (SystemForm.IN_PLACE, SystemForm.USER_TURN):
        if _shows(template, placed(_TALK, form)) and (
            not _shows(template, _TOOLS[:-1]) or _shows(template, placed(_TOOLS, form))
        ):
            return form
    return SystemForm.JOINED


def placed(messages: Sequence[Message], form: SystemForm) -> tuple[Message, ...]:
    """The messages as the template takes them. Each result depends on the messages up to the next turn only."""
    if form is SystemForm.IN_PLACE:
        return tuple(messages)
    out: list[Message] = []
    for message in messages:
        last = out[-1] if out else None
        if message.role != "system":
            joins = form is SystemForm.JOINED and message.role == "user" and last is not None and last.role == "user"
        elif last is None or last.role == "system":
            joins = last is not None
        else:
            message = _as_user(message)
            joins = form is SystemForm.JOINED and last.role in ("user", "tool")
        if joins and last is not None:
            out[-1] = replace(last, content=join_lines([last.content, message.content]), raw=_both(last, message))
        else:
            out.append(message)
    return tuple(out)


def _as_user(message: Message) -> Message:
    raw = {**(message.raw or {}), "sent_as": "system"}
    return replace(message, role="user", content=_OPEN + message.content + _CLOSE, raw=raw)


def _both(first: Message, second: Message) -> dict[str, object] | None:
    """What the canonical form of two joined messages leaves out."""
    raws = [message.raw for message in (first, second) if message.raw]
    return {"blocks": raws} if raws else None


def _shows(template: Template, messages: Sequence[Message]) -> bool:
    try:
        text = template.render(messages, (), True)
    except RenderError:
        return False
    words = [word for message in messages for word in _WORDS if word in message.content]
    places = [text.find(word) for word in words]
    return places == sorted(places) and all(text.count(word) == 1 for word in words)


_WORDS = tuple(f"GyreProbe{index}x" for index in range(9))
_CALL = ToolCall(name="probe", arguments={"a": 1}, id="call000001")
_TALK = (
    Message(role="system", content=_WORDS[0]),
    Message(role="user", content=_WORDS[1]),
    Message(role="system", content=_WORDS[2]),
    Message(role="assistant", content=_WORDS[3]),
    Message(role="user", content=_WORDS[4]),
    Message(role="system", content=_WORDS[5]),
)
_TOOLS = (
    Message(role="user", content=_WORDS[6]),
    Message(role="assistant", tool_calls=(_CALL,)),
    Message(role="tool", content=_WORDS[7], tool_call_id=_CALL.id),
    Message(role="system", content=_WORDS[8]),
)
