"""Reads the bodies of one execution, each part once: a conversation is sent again with every call, a little longer.

A body that begins like an earlier one is scanned only from where it differs, and its known messages are the objects
that were read before. Whether a body is known or not, what is read from it is the same.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from gyre_proxy.dialects.base import BadRequest, load_body
from gyre_proxy.dialects.pieces import Cut, cut_body
from gyre_proxy.json_text import load_tolerant
from gyre_proxy.message import BodyPart, Message
from gyre_proxy.same_turn import canonical_message, message_json

__all__ = ["Body", "Reader"]

_MAX_TRAILS = 6
"""Conversations of one execution whose bodies are known; sub-agents run side by side."""
_MAX_FIELDS = 12
_REVISED = 4
"""Messages at the end that a client writes in another way next time: cache marks move, blocks become a string."""
_BLANKS = b" \t\r\n"
_T = TypeVar("_T")


@dataclass(kw_only=True, slots=True, eq=False)
class _Trail:
    """The last body of a conversation, up to its last message."""

    begin: bytes
    """What came before the first message."""
    whole: bytes
    """Everything up to the end of the last message."""
    ends: tuple[int, ...]
    """Where the messages begin, and where each of them ends."""
    parts: list[BodyPart]
    values: list[Any]
    """What was read from each part."""
    read: tuple[Message, ...]
    """The messages before they were joined to turns."""
    messages: tuple[Message, ...]
    context: Any


@dataclass(kw_only=True, slots=True, eq=False)
class Body:
    """One request's body. `fields` is the object, with a list of as many blanks in place of the messages."""

    parts: tuple[BodyPart, ...]
    fields: dict[str, Any]
    _reader: Reader
    _listed: list[Any]
    """The messages: parts to read, or values when the body is one part."""
    _whole: bytes = b""
    _ends: tuple[int, ...] = ()
    _known: int = 0
    """Messages at the front whose values are `_trail`'s."""
    _trail: _Trail | None = None
    _raw: dict[str, bytes] = field(default_factory=dict)
    _values: list[Any] = field(default_factory=list)
    _context: Any = None

    def each(self, read: Callable[[Any, int], _T], context: Any = None, where: bytes = b"") -> list[_T]:
        """What `read` makes of each message and its number, made anew only where the bytes are new.

        Messages with `where` in them are also made anew when `context` is another object than the last time.
        """
        done: list[Any] = self._trail.values[: self._known] if self._trail else []
        if self._trail is not None and context is not self._trail.context:
            listed = self._listed[: len(done)]
            done = [
                read(_loaded(part), index) if where in part.data else value
                for index, (part, value) in enumerate(zip(listed, done, strict=True))
            ]
        before = self._trail.values if self._trail else []
        for index in range(len(done), len(self._listed)):
            part = self._listed[index]
            value: Any = read(_loaded(part) if isinstance(part, BodyPart) else part, index)
            # A part that is only written in another way than the last time is the value of the last time.
            done.append(before[index] if index < len(before) and _same(before[index], value) else value)
        self._values, self._context = done, context
        return list(self._values)

    def once(self, name: str, make: Callable[[], _T], variant: str = "") -> _T:
        """What `make` makes of a large field, or of the "rest" that is not messages: made anew only when its bytes, or
        the `variant`, are new."""
        return self._reader.kept(name + variant, self._raw[name], make) if self._raw.get(name) else make()

    def led_by(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages that do not stand in the list; the objects of the last time when they say the same."""
        before = self._trail.messages[: len(messages)] if self._trail else ()
        same = len(before) == len(messages) and all(map(_alike, before, messages))
        return before if same else messages

    def finish(
        self, messages: Sequence[Message], settle: Callable[[Sequence[Message]], Sequence[Message]] = tuple
    ) -> tuple[Message, ...]:
        """The request's messages, those that were there before as the same objects. The reading has succeeded.

        `settle` checks and joins messages. It is given those from an assistant message on that follows none: what
        comes before that has been through it, and is not touched by what comes after.
        """
        read, trail = tuple(messages), self._trail
        settled: tuple[Message, ...] = ()
        if trail is not None and len(trail.read) == len(trail.messages):
            known = _num_same(trail.read, read)
            while known > 1 and not (known < len(read) and _opens_turn(read, known)):
                known -= 1
            if known > 1:
                settled = trail.messages[:known]
        done = (*settled, *settle(read[len(settled) :]))
        if trail is not None and len(settled) < len(done):
            pairs = zip(trail.messages[len(settled) :], done[len(settled) :], strict=False)
            known_too = [old if old is new or _same(old, new) else new for old, new in pairs]
            done = (*settled, *known_too, *done[len(settled) + len(known_too) :])
        if self._whole:
            kept = _Trail(
                begin=self._whole[: self._ends[0]],
                whole=self._whole,
                ends=self._ends,
                parts=self._listed,
                values=self._values,
                read=read,
                messages=done,
                context=self._context,
            )
            self._reader.keep(kept, trail, self._known)
        return done


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Found:
    """A trail that a body follows over `known` messages, from `start` to `end`."""

    trail: _Trail
    known: int
    start: int
    end: int


class Reader:
    """What was read of an execution's bodies. Not thread-safe: used where the execution's calls are accepted."""

    def __init__(self) -> None:
        self._trails: list[_Trail] = []
        self._parts: dict[bytes, BodyPart] = {}
        self._fields: dict[tuple[str, bytes], Any] = {}

    def open(self, body: bytes, key: str) -> Body:
        """A body whose messages are the list `key`; BadRequest when it is no JSON object."""
        found = self._longest(body)
        if found is not None and (opened := self._prolonged(body, key, found)) is not None:
            return opened
        cut = cut_body(body, key)
        if cut is None or not cut.num_messages:
            fields = load_body(body)
            listed = fields.get(key)
            parts = tuple(self._part(piece) for piece in (cut.pieces if cut else (body,)))
            return Body(parts=parts, fields=fields, _reader=self, _listed=listed if isinstance(listed, list) else [])
        return self._opened(cut, key, body)

    def _longest(self, body: bytes) -> _Found | None:
        """The trail that the body follows furthest."""
        best: _Found | None = None
        for trail in self._trails:
            if body.startswith(trail.begin):
                start, known = len(trail.begin), bisect_right(trail.ends, _num_common(body, trail.whole)) - 1
                end = trail.ends[known]
            else:
                start = end = body.find(trail.parts[0].data)
                known = 0
                while end >= 0 and known < len(trail.parts) and body.startswith(trail.parts[known].data, end):
                    end += len(trail.parts[known].data)
                    known += 1
            if known and (best is None or known >= best.known):
                best = _Found(trail=trail, known=known, start=start, end=end)
        return best

    def _prolonged(self, body: bytes, key: str, found: _Found) -> Body | None:
        """A body whose first messages are known: only the rest of it is scanned. None where that is not certain.

        The known messages are left out of what is scanned. That the list begins where they stood, and goes on with
        another one, says that they were whole elements of it.
        """
        start = _after_blanks(body, found.end)
        if body[start : start + 1] != b",":
            return None
        start = _after_blanks(body, start + 1)
        cut = cut_body(body[: found.start] + body[start:], key)
        if cut is None or not cut.num_messages or sum(map(len, cut.pieces[: cut.first])) != found.start:
            return None
        first = body[found.end : start] + cut.pieces[cut.first]
        pieces = (*cut.pieces[: cut.first], first, *cut.pieces[cut.first + 1 :])
        return self._opened(replace(cut, pieces=pieces), key, body, found)

    def _opened(self, cut: Cut, key: str, body: bytes, found: _Found | None = None) -> Body:
        known = found.trail.parts[: found.known] if found else []
        end = cut.first + cut.num_messages
        head = [self._part(piece) for piece in cut.pieces[: cut.first]]
        fresh = [BodyPart(data=piece) for piece in cut.pieces[cut.first : end]]
        tail = [self._part(piece) for piece in cut.pieces[end:]]
        start = sum(len(part.data) for part in head)
        if found is not None and start == found.trail.ends[0]:
            ends = found.trail.ends[: found.known + 1]
        else:
            ends = tuple(accumulate((len(part.data) for part in known), initial=start))
        rest = self.kept("fields", cut.rest, lambda: load_body(cut.rest))
        fields = {**rest, key: [None] * (len(known) + len(fresh))}
        return Body(
            parts=(*head, *known, *fresh, *tail),
            fields=fields,
            _reader=self,
            _listed=[*known, *fresh],
            _whole=body[: len(body) - sum(len(part.data) for part in tail)],
            _ends=(*ends[:-1], *accumulate((len(part.data) for part in fresh), initial=ends[-1])),
            _known=len(known),
            _trail=found.trail if found else None,
            _raw={**cut.fields, "rest": cut.rest},
        )

    def _part(self, piece: bytes) -> BodyPart:
        """The part of these bytes, which stand around the messages."""
        part = self._parts.pop(piece, None) or BodyPart(data=piece)
        self._parts[piece] = part
        while len(self._parts) > _MAX_FIELDS:
            del self._parts[next(iter(self._parts))]
        return part

    def kept(self, name: str, raw: bytes, make: Callable[[], _T]) -> _T:
        """See `Body.once`."""
        key = (name, raw)
        value: _T = self._fields.pop(key) if key in self._fields else make()
        self._fields[key] = value
        while len(self._fields) > _MAX_FIELDS:
            del self._fields[next(iter(self._fields))]
        return value

    def keep(self, trail: _Trail, before: _Trail | None, known: int) -> None:
        """A body was read; it takes the place of the one that it prolongs."""
        if before in self._trails and before is not None and len(before.parts) - known <= _REVISED:
            self._trails.remove(before)
        self._trails = [*self._trails[-(_MAX_TRAILS - 1) :], trail]


def _num_common(one: bytes, two: bytes) -> int:
    """Bytes that both begin with."""
    size = min(len(one), len(two))
    differs = np.frombuffer(one, np.uint8, size) != np.frombuffer(two, np.uint8, size)
    at = int(differs.argmax()) if size else 0
    return at if size and differs[at] else size


def _num_same(one: Sequence[Message], two: Sequence[Message]) -> int:
    """Objects that both begin with."""
    return next((i for i, same in enumerate(map(operator.is_, one, two)) if not same), min(len(one), len(two)))


def _opens_turn(messages: Sequence[Message], at: int) -> bool:
    return messages[at].role == "assistant" and messages[at - 1].role != "assistant"


def _after_blanks(body: bytes, at: int) -> int:
    while at < len(body) and body[at] in _BLANKS:
        at += 1
    return at


def _loaded(part: BodyPart) -> Any:
    """The value of a message, read as it would be inside its body."""
    try:
        return load_tolerant(b"[[" + part.data.lstrip(b"," + _BLANKS) + b"]]")[0][0]
    except ValueError as error:
        raise BadRequest(f"The request body must be JSON: {error}.") from error


def _same(one: Any, two: Any) -> bool:
    """Whether nothing tells one message from the other, or those of one list, down to the form of a number."""
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    if not isinstance(one, Message) or not isinstance(two, Message):
        return False
    if one.content != two.content or one.role != two.role or one.node_hint != two.node_hint:
        return False
    return message_json(one) == message_json(two)


def _alike(one: Message, two: Message) -> bool:
    """Whether both say the same. What else is beside the first stays with it: the bodies are kept anyway."""
    return one is two or (one.role == two.role and canonical_message(one) == canonical_message(two))
