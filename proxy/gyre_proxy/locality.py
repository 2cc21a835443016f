"""Whether what a template writes after a turn depends on the history before the turn.

For most templates it does not: then a turn of a long conversation costs no more than one of a short one, since the new
messages can be rendered after a stand-in. It cannot be read from a template, so it is tried when the proxy starts, on
conversations that differ in everything but the turn and what follows. A trial is no proof for all histories: every 64th
extension, chosen by its hash, is also rendered with its real history. Where the two differ, the real one is used, and
from then on every extension is rendered in full. Earlier ones may then have had other tokens than a full rendering
gives them; what was sent and recorded is the same, and the log says how many they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .extend import CannotExtend, seam
from .message import Message, ToolCall
from .template import RenderError, Template

__all__ = ["Locality"]

log = logging.getLogger(__name__)

_CHECKED = 64
"""One extension in so many is rendered in full as well."""
_Tools = Sequence[Mapping[str, Any]]


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": f"of {name}"}}}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters}}


_STAND_IN = (Message(role="user", content="Go on."),)
_STAND_IN_TOOLS: _Tools = (_tool("stand_in"),)
_TOOLS: tuple[_Tools, ...] = ((), (_tool("look"), _tool("move")))


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _said(text: str, *names: str, reasoning: str | None = None) -> Message:
    calls = tuple(ToolCall(name=name, arguments={"a": f"{text}{i}"}, id=f"c{text}{i}") for i, name in enumerate(names))
    return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=calls)


def _results(turn: Message) -> tuple[Message, ...]:
    return tuple(
        Message(role="tool", content=f"of {call.id}", tool_call_id=call.id, name=call.name) for call in turn.tool_calls
    )


def _histories() -> Iterator[tuple[Message, ...]]:
    """Conversations before a turn."""
    system, start = Message(role="system", content="You are one."), _user("first")
    one, two = _said("x", "look"), _said("", "move", "look", reasoning="both")
    thought = _said("y", reasoning="why")
    yield (start,)
    yield (system, start)
    yield (system, start, _said("z"), _user("second"))
    yield (start, thought, _user("second"), _said("v"), _user("third"))
    yield (start, one, *_results(one))
    yield (system, start, two, *_results(two))
    yield (start, two, *_results(two), thought, _user("second"))
    yield (system, start, one, *_results(one), _said("w", "look", reasoning="more"), *_results(one), thought, start)
    yield (start, thought, Message(role="system", content="Late."), _user("second"))


def _turns() -> Iterator[Message]:
    yield _said("done")
    yield _said("done", reasoning="because")
    yield _said("", "move")
    yield _said("so", "look", "move", reasoning="because")


def _follow_ups(turn: Message) -> Iterator[tuple[Message, ...]]:
    results, late = _results(turn), Message(role="system", content="Note.")
    yield (*results, _user("next"))
    yield (*results, late)
    yield (*results, late, _user("next"))
    if results:
        yield results
        yield results[:1]
    else:
        yield (_user("next"), _user("and"))


class Locality:
    """What is known about one template in this process."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self.proved = True
        self.reads_tools = False
        """Whether the tools matter for what comes after a turn."""
        self.num_short = 0
        """Extensions rendered after a stand-in only, since the last that was checked."""
        for turn in _turns():
            for tools in _TOOLS:
                histories = [history for history in _histories() if self._takes(history, turn, tools)]
                for new in _follow_ups(turn):
                    self.proved = self.proved and self._try(turn, new, tools, histories)

    def stand_in(self, tools: _Tools) -> tuple[Sequence[Message], _Tools]:
        """The history, and the tools, to render a turn after."""
        return _STAND_IN, tools if self.reads_tools or not tools else _STAND_IN_TOOLS

    def due(self, chain: str) -> bool:
        """Whether the extension with that hash is one of those to check."""
        return int(chain[:8], 16) % _CHECKED == 0

    def refute(self, difference: str) -> None:
        """A check failed: no stand-ins any more."""
        self.proved = False
        log.error(
            "the chat template looks at earlier messages after all (%s); turns are rendered with their whole history "
            "from here on; %d extensions since the last check may have other tokens than such a rendering",
            difference,
            self.num_short,
        )

    def _try(
        self, turn: Message, new: Sequence[Message], tools: _Tools, histories: Sequence[Sequence[Message]]
    ) -> bool:
        """Whether `new` after `turn` is rendered the same whatever came before."""
        short = self._after(_STAND_IN, turn, new, tools)
        if short is None:
            return True  # such an extension is rendered in full
        if tools and short != self._after(_STAND_IN, turn, new, _STAND_IN_TOOLS):
            self.reads_tools = True
        return all(self._after(history, turn, new, tools) == short for history in histories)

    def _takes(self, history: Sequence[Message], turn: Message, tools: _Tools) -> bool:
        """Whether the template takes the history at all, with a user message or results after the turn."""
        try:
            self._template.render([*history, turn, *(_results(turn) or (_user("next"),))], tools, True)
        except RenderError:
            return False
        return True

    def _after(self, history: Sequence[Message], turn: Message, new: Sequence[Message], tools: _Tools) -> str | None:
        """Text after the turn; None where the turn could not be extended."""
        try:
            return seam(lambda them: self._template.render(them, tools, True), [*history, turn, *new], len(history))[1]
        except (CannotExtend, RenderError):
            return None
