"""Which sampled turns a request holds: a walk over its messages from the front, along hash chains.

The chain starts from tokenizer, template and tools. A message adds its canonical hash; an assistant message that is
the same turn as an output sampled after exactly these messages adds that node's id instead. The walk follows every
reading that is recorded, and takes the one whose last sampled turn is deepest; among equals the one with more turns
that the client named by the ids we minted, then the one that goes on furthest along recorded messages, then the one
whose turn is newest. A turn that is named is never taken for another one in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from .forest import Entry
from .message import Message
from .same_turn import canonical_message, same_turn

__all__ = ["Turn", "Walk", "chain_start", "chain_turn", "chained", "hydrated", "match"]


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
    """One way to read the messages so far, as a linked list."""

    hash: str
    before: _Reading | None = None
    turn: Turn | None = None
    last: int = -1
    named: int = 0
    """Turns that the client named by their id."""
    order: int = 0


def match(
    messages: Sequence[Message],
    start: str,
    turns: Mapping[str, Sequence[Turn]],
    known: Collection[str],
    client: str | None,
) -> Walk:
    """The best reading of `messages`. `turns` are the outputs by the hash before them, oldest first."""
    alive = [_Reading(hash=start)]
    ended: list[tuple[int, _Reading]] = []
    canon = [canonical_message(message) for message in messages]
    for i, message in enumerate(messages):
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
                for turn in _candidates(message, turns.get(reading.hash, ()), client)
            ]
            plain = _Reading(
                hash=_link(reading.hash, canon[i]),
                before=reading,
                last=reading.last,
                named=reading.named,
                order=reading.order,
            )
            live = [one for one in (*nexts, plain) if one.hash in known]
            ended += [(i, one) for one in nexts if one.hash not in known] + ([] if live else [(i, plain)])
            following += live
        alive = following
        if not alive:
            break
    ended += [(len(messages), reading) for reading in alive]
    _, best = max(ended, key=lambda found: (found[1].last, found[1].named, found[0], found[1].order))
    return _unrolled(best, canon)


def _candidates(message: Message, turns: Sequence[Turn], client: str | None) -> list[Turn]:
    if message.role != "assistant":
        return []
    same = [turn for turn in turns if same_turn(turn.reply, message, client)]
    named = [turn for turn in same if turn.entry.node_id == message.node_hint]
    return named or same


def _unrolled(best: _Reading, canon: Sequence[bytes]) -> Walk:
    chain, turns = [best.hash], []
    at: _Reading | None = best
    while at is not None and at.before is not None:
        turns.append(at.turn)
        chain.append(at.before.hash)
        at = at.before
    chain, turns = chain[::-1], turns[::-1]
    for content in canon[len(turns) :]:
        chain.append(_link(chain[-1], content))
        turns.append(None)
    return Walk(chain=tuple(chain), turns=tuple(turns))


def hydrated(messages: Sequence[Message], walk: Walk) -> list[Message]:
    """The messages with each sampled turn as it was sampled, its reasoning put back; ids of calls as echoed."""
    out = []
    for message, turn in zip(messages, walk.turns, strict=True):
        if turn is None:
            out.append(message)
            continue
        calls = tuple(
            replace(call, id=echoed.id) for call, echoed in zip(turn.reply.tool_calls, message.tool_calls, strict=True)
        )
        out.append(replace(turn.reply, tool_calls=calls))
    return out
