"""The ids of tool calls as a chat template wants them.

Clients echo the ids that we minted, which name a node. Some templates print an id or refuse one that is not like their
own: Mistral's take nine letters and digits only, Kimi's write `functions.NAME:0` for a call and expect the same of its
result. Which is which is found out by asking the template; all others get the ids as they come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto

from .message import Message, ToolCall

__all__ = ["IdStyle", "id_style", "with_ids"]

_NAME = "gyre_probe"
_ID = "call_n_0123456789abcdef0123_0"


class IdStyle(Enum):
    """How a template wants ids."""

    AS_SENT = auto()
    NINE = auto()
    """Nine letters and digits."""
    NAMED = auto()
    """`functions.NAME:INDEX`, the index within its message."""


def id_style(render: Callable[[Sequence[Message]], str | None]) -> IdStyle:
    """The style of the template behind `render`, which gives None for what the template refuses."""
    call = ToolCall(name=_NAME, arguments={"text": "a"}, id=_ID)
    probe = (
        Message(role="user", content="a"),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content="b", tool_call_id=_ID, name=_NAME),
    )
    text = render(probe)
    if text is None:
        return IdStyle.AS_SENT if render(with_ids(probe, IdStyle.NINE)) is None else IdStyle.NINE
    return IdStyle.NAMED if f"functions.{_NAME}:0" in text and _ID in text else IdStyle.AS_SENT


def with_ids(messages: Sequence[Message], style: IdStyle) -> Sequence[Message]:
    """`messages` with ids in the style."""
    if style is IdStyle.AS_SENT:
        return messages
    known: dict[str, str] = {}
    out = []
    for message in messages:
        calls = []
        for i, call in enumerate(message.tool_calls):
            name = _nine(call.id or f"{i}") if style is IdStyle.NINE else f"functions.{call.name}:{i}"
            if call.id:
                known[call.id] = name
            calls.append(replace(call, id=name))
        answered = message.tool_call_id
        if answered and style is IdStyle.NINE:
            answered = _nine(answered)
        elif answered:
            answered = known.get(answered, answered)
        out.append(replace(message, tool_calls=tuple(calls), tool_call_id=answered))
    return out


def _nine(call_id: str) -> str:
    return call_id if len(call_id) == 9 and call_id.isalnum() else hashlib.sha256(call_id.encode()).hexdigest()[:9]
