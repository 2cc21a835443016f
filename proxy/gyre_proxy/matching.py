"""Which sampled turns a request holds: a walk over its messages from the front, along hash chains.

The chain starts from tokenizer, template and tools. A message adds its canonical hash; an assistant message that is
the same turn as an output sampled after exactly these messages adds that node's id instead. The walk follows every
reading that is recorded, and takes the one whose last sampled turn is deepest; among equals the one with more turns
that the client named by the ids we minted, then the one that goes on furthest along recorded messages, then the one
whose turn is newest. A turn that is named is never taken for another one in its place.

A conversation is sent again and again, a little longer each time. So a walk resumes where an earlier one had found its
last sampled turn, when the messages up to there are the same objects and nothing was recorded since that would have
led it elsewhere; it then says exactly what a walk from the front says.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from .forest import Entry
from .message import Message
from .same_turn import canonical_message, same_turn

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["Matcher", "Turn", "Walk", "chain_start", "chain_turn", "chained", "hydrated"]

_MAX_RESUMED = 8
"""Conversations of one execution that go on side by side without being walked from the front."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """A sampled output, the reply that was read from it, and the call that it belongs to."""

    entry: Entry
    reply: Message
    call_id: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Walk:
    """`chain[i]` is the hash before message i, `chain[-1]` that of the whole; `turns[i]` the turn that message i is."""

    chain: tuple[str, ...]
    turns: tuple[Turn | None, ...]
    digest: str
    """Of the messages as they were sent, whatever turns they are."""

    @property
    def last(self) -> int | None:
        """Index of the deepest sampled turn."""
        return next((i for i in range(len(self.turns) - 1, -1, -1) if self.turns[i]), None)


def chain_start(fingerprint: str, tools_digest: str | None) -> str:
    """Hash before the first message."""
    return _link(fingerprint, (tools_digest or "").encode())


def chained(before: str, message: Message) -> str:
    """Hash after a message that is taken as it stands."""
    return _link(before, canonical_message(message))


def chain_turn(before: str, node_id: str) -> str:
    """Hash after a sampled turn."""
    return _link(before, b"node:" + node_id.encode())


def _link(before: str, content: bytes) -> str:
    return hashlib.sha256(before.encode() + b"\0" + content).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Reading:
    """One way to read the messages so far, as a linked list; the first of a resumed walk has what is before it."""

    hash: str
    before: _Reading | None = None
    turn: Turn | None = None
    last: int = -1
    named: int = 0
    """Turns that the client named by their id."""
    order: int = 0
    chain: tuple[str, ...] = ()
    turns: tuple[Turn | None, ...] = ()

    def unrolled(self) -> tuple[tuple[str, ...], tuple[Turn | None, ...]]:
        """Hashes before each message and after the last, and the turn that each is."""
        chain: list[str] = []
        turns: list[Turn | None] = []
        at = self
        while at.before is not None:
            chain.append(at.hash)
            turns.append(at.turn)
            at = at.before
        return (*at.chain, at.hash, *reversed(chain)), (*at.turns, *reversed(turns))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Resume:
    """A walk at its last sampled turn."""

    start: str
    client: str | None
    messages: tuple[Message, ...]
    alive: tuple[_Reading, ...]
    said: _Hash
    passed: set[str]
    """Hashes that readings went through: a turn recorded after one of them would have been tried."""
    missed: set[str]
    """Hashes at which readings ended, because they were not recorded."""

    def begins(self, messages: Sequence[Message], start: str, client: str | None) -> bool:
        """Whether a request begins with the same messages."""
        same = len(messages) >= len(self.messages) and (start, client) == (self.start, self.client)
        return same and all(map(operator.is_, self.messages, messages))


class Matcher:
    """What is recorded of one execution, as far as walks need it: outputs by the hash before them, and known hashes."""

    def __init__(self) -> None:
        self._turns: dict[str, list[Turn]] = {}
        self._known: set[str] = set()
        self._resumes: list[_Resume] = []

    def note_turn(self, before: str, turn: Turn) -> None:
        """An output was sampled after the messages whose hash is `before`."""
        self._turns.setdefault(before, []).append(turn)
        self._resumes = [one for one in self._resumes if before not in one.passed]
        self.note_known((turn.entry.chain,))

    def note_known(self, chain: Iterable[str]) -> None:
        """Hashes along a recorded or reserved conversation."""
        fresh = {link for link in chain if link not in self._known}
        self._known |= fresh
        self._resumes = [one for one in self._resumes if not one.missed & fresh]

    def match(self, messages: Sequence[Message], start: str, client: str | None) -> Walk:
        """The best reading of `messages`."""
        begun = [one for one in self._resumes if one.begins(messages, start, client)]
        resume = max(begun, key=lambda one: len(one.messages), default=None)
        first = len(resume.messages) if resume else 0
        alive: Sequence[_Reading] = resume.alive if resume else [_Reading(hash=start)]
        levels = [alive]
        missed: list[tuple[int, str]] = []
        ended: list[tuple[int, _Reading]] = []
        canon = [canonical_message(message) for message in messages[first:]]
        for i, content in enumerate(canon, first):
            if not alive:
                break
            alive = self._step(i, messages[i], content, alive, client, ended, missed)
            levels.append(alive)
        ended += [(len(messages), reading) for reading in alive]
        _, best = max(ended, key=lambda found: (found[1].last, found[1].named, found[0], found[1].order))
        chain, turns = best.unrolled()
        tail = list(accumulate(canon[len(turns) - first :], _link, initial=chain[-1]))[1:]
        said = resume.said.copy() if resume else hashlib.sha256()
        if (stop := best.last + 1) > first:
            self._remember(messages[:stop], start, client, resume, levels, missed, said, canon[: stop - first])
            first, canon = stop, canon[stop - first :]
        for content in canon:
            _say(said, content)
        return Walk(chain=(*chain, *tail), turns=(*turns, *(None for _ in tail)), digest=said.hexdigest()[:32])

    def _step(
        self,
        i: int,
        message: Message,
        content: bytes,
        alive: Sequence[_Reading],
        client: str | None,
        ended: list[tuple[int, _Reading]],
        missed: list[tuple[int, str]],
    ) -> list[_Reading]:
        """The readings that go on after message i."""
        following: list[_Reading] = []
        for reading in alive:
            nexts = [
                _Reading(
                    hash=chain_turn(reading.hash, turn.entry.node_id),
                    before=reading,
                    turn=turn,
                    last=i,
                    named=reading.named + (turn.entry.node_id == message.node_hint),
                    order=turn.entry.order,
                )
                for turn in _candidates(message, self._turns.get(reading.hash, ()), client)
            ]
            plain = _Reading(
                hash=_link(reading.hash, content),
                before=reading,
                last=reading.last,
                named=reading.named,
                order=reading.order,
            )
            live = [one for one in (*nexts, plain) if one.hash in self._known]
            ended += [(i, one) for one in nexts if one.hash not in self._known] + ([] if live else [(i, plain)])
            if plain.hash not in self._known:
                missed.append((i, plain.hash))
            following += live
        return following

    def _remember(
        self,
        messages: Sequence[Message],
        start: str,
        client: str | None,
        resume: _Resume | None,
        levels: Sequence[Sequence[_Reading]],
        missed: Sequence[tuple[int, str]],
        said: _Hash,
        canon: Sequence[bytes],
    ) -> None:
        """Resume here next time: after the last turn of the best reading. Readings that ended before it never win."""
        first = len(messages) - len(canon)
        for content in canon:
            _say(said, content)
        roots = []
        for reading in levels[len(canon)]:
            chain, turns = reading.unrolled()
            roots.append(replace(reading, before=None, turn=None, chain=chain[:-1], turns=turns))
        passed = resume.passed if resume else set()
        passed |= {reading.hash for level in levels[: len(canon)] for reading in level}
        ends = {link for i, link in missed if first <= i < len(messages)} | (resume.missed if resume else set())
        kept = [one for one in self._resumes if one is not resume][-(_MAX_RESUMED - 1) :]
        one = _Resume(
            start=start,
            client=client,
            messages=tuple(messages),
            alive=tuple(roots),
            said=said.copy(),
            passed=passed,
            missed=ends,
        )
        self._resumes = [*kept, one]


def _say(said: _Hash, content: bytes) -> None:
    said.update(len(content).to_bytes(8, "little") + content)


def _candidates(message: Message, turns: Sequence[Turn], client: str | None) -> list[Turn]:
    if message.role != "assistant":
        return []
    same = [turn for turn in turns if same_turn(turn.reply, message, client)]
    named = [turn for turn in same if turn.entry.node_id == message.node_hint]
    return named or same


def hydrated(message: Message, turn: Turn | None) -> Message:
    """A sampled turn as it was sampled, its reasoning put back, ids of calls as echoed; another message as it is."""
    if turn is None:
        return message
    calls = zip(turn.reply.tool_calls, message.tool_calls, strict=True)
    return replace(turn.reply, tool_calls=tuple(replace(call, id=echoed.id) for call, echoed in calls))
