"""System messages after the beginning, for chat templates that refuse them, drop them, or move them to the front.

Harnesses send reminders as system messages between turns. Rendered in place they only add to what was there; moved to
the front they would change the prompt from its start with every turn. So a template is probed once, at start, and what
it cannot place is given to it as user text, in the form in which Claude Code reminds models that take no late ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import reduce

from .dialects.inbound import join_lines
from .message import Message, ToolCall
from .template import RenderError, Template

__all__ = ["Placer", "SystemForm", "system_form"]

_MAX_MADE = 1024
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
        if _shows(template, Placer(form)(_TALK)) and (
            not _shows(template, _TOOLS[:-1]) or _shows(template, Placer(form)(_TOOLS))
        ):
            return form
    return SystemForm.JOINED


class Placer:
    """Gives the messages of one execution as its template takes them.

    Each result depends on the messages up to the next turn only, and is the same object for the same messages: a
    conversation that is sent again is known by its objects.
    """

    def __init__(self, form: SystemForm) -> None:
        self._form = form
        self._made: OrderedDict[tuple[int, ...], tuple[Sequence[Message], Message]] = OrderedDict()

    def __call__(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages, placed."""
        if self._form is SystemForm.IN_PLACE:
            return tuple(messages)
        groups = _groups(messages, self._form)
        return tuple(self._one(group, leading=index == 0) for index, group in enumerate(groups))

    def _one(self, group: Sequence[Message], leading: bool) -> Message:
        if len(group) == 1 and (leading or group[0].role != "system"):
            return group[0]
        key = tuple(map(id, group))
        if key not in self._made:  # the messages are kept with what was made of them, so that their ids stay theirs
            late = group if group[0].role == "system" and leading else [_as_user(message) for message in group]
            self._made[key] = group, reduce(_joined, late)
        self._made.move_to_end(key)
        if len(self._made) > _MAX_MADE:
            self._made.popitem(last=False)
        return self._made[key][1]


def _groups(messages: Sequence[Message], form: SystemForm) -> list[list[Message]]:
    """Messages that become one; the first group holds the system messages at the beginning, if there are any."""
    groups: list[list[Message]] = []
    role = ""  # of the last group, as it is rendered
    for message in messages:
        if message.role != "system":
            joins = form is SystemForm.JOINED and message.role == role == "user"
        elif role in ("", "system"):
            joins = role == "system"
        else:
            joins = form is SystemForm.JOINED and role in ("user", "tool")
        if joins:
            groups[-1].append(message)
            continue
        role = "user" if message.role == "system" and groups else message.role
        groups.append([message])
    return groups


def _joined(first: Message, second: Message) -> Message:
    raws = [message.raw for message in (first, second) if message.raw]
    content = join_lines([first.content, second.content])
    return replace(first, content=content, raw={"blocks": raws} if raws else None)


def _as_user(message: Message) -> Message:
    if message.role != "system":
        return message
    raw = {**(message.raw or {}), "sent_as": "system"}
    return replace(message, role="user", content=_OPEN + message.content + _CLOSE, raw=raw)


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
