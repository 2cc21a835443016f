"""The history of an execution whose token ids are not known: the same tree, extended by the identity of messages.

In memory a message stands as an array that has its count as length and a number of its own as every value, so that
positions, sharing and first differences come out as they do for real ids. On disk there is the count alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from gyre_data.schema import Author, NodeKind
from gyre_data.types import Call, Ints, Node
from gyre_proxy.forest import Piece
from gyre_proxy.history import History, Layout
from gyre_proxy.late_system import SystemForm
from gyre_proxy.matching import Turn, Walk, chain_turn
from gyre_proxy.message import Message, Reply, Request
from gyre_proxy.observe.counting import TokenCounter, count_message, count_tools
from gyre_proxy.plan import PromptPlan, Written
from gyre_proxy.template import Template

__all__ = ["ObservedHistory"]

_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Observed(Reply):
    """A reply whose message came whole from the provider."""

    said: Message

    def message(self) -> Message:
        return self.said


@dataclass(frozen=True, kw_only=True, slots=True)
class _NoTemplate:
    """Stands where a chat template would: observed messages are never rendered, tokenised or decoded."""

    fingerprint: str


class ObservedHistory(History):
    """All state of one observed execution."""

    def __init__(self, counter: TokenCounter, *, execution_id: str) -> None:
        template = cast(Template, _NoTemplate(fingerprint=counter.name))
        super().__init__(template, execution_id=execution_id, late_system=SystemForm.IN_PLACE)
        self._counter = counter

    def record(self, plan: PromptPlan, *, call_id: str, output_node_id: str, said: Message | None) -> Written:
        """Take in a call that is over, with what the model said, and return the rows to write."""
        num_tokens = count_message(self._counter, said) if said is not None else 0
        written = self.commit(
            plan,
            call_id=call_id,
            output_node_id=output_node_id,
            output_ids=_stand_in(chain_turn(plan.chain[-1], output_node_id), num_tokens),
            logprobs=None,
            versions=(),
            reply=_Observed(events=(), finish="stop", said=said or Message(role="assistant")),
        )
        return Written(nodes=tuple(_counted(node) for node in written.nodes), blobs=written.blobs)

    def restore(self, nodes: Sequence[Node], calls: Sequence[Call], blobs: Callable[[str], bytes]) -> None:
        """Rebuild the state from the recorded rows."""
        standing = [
            replace(node, token_ids=_stand_in(node.content_hash or "", node.counted_tokens or 0)) for node in nodes
        ]
        super().restore(standing, calls, blobs)

    def _lay(self, request: Request, walk: Walk, copies: Sequence[Turn | None]) -> Layout:
        if (known := self._retried(walk)) is not None:
            return known
        first = 0 if walk.last is None else walk.last + 1
        base = None if walk.last is None else walk.turns[walk.last]
        pieces = self._pieces(request, walk, copies, first)
        if base is not None and not pieces:  # the model is to go on with its own words
            path = self._forest.path(base.entry)
            return Layout(path=path, drafts=(), prompt_ids=path.token_ids, from_turn=True)
        return self._attached(base.entry if base else None, pieces, from_turn=base is not None)

    def _pieces(self, request: Request, walk: Walk, copies: Sequence[Turn | None], first: int) -> list[Piece]:
        """A piece for each message; leading system messages and the tools are one."""
        messages = request.messages
        num_system = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
        pieces: list[Piece] = []
        begin = first
        if first == 0 and (num_system or request.tools):
            begin = num_system
            count = count_tools(self._counter, request.tools) or 0
            pieces.append(self._piece(messages[:num_system], walk.chain[0], walk.chain[num_system], count, "system"))
        for i in range(begin, len(messages)):
            copied = walk.turns[i] or copies[i]
            piece = self._piece(messages[i : i + 1], walk.chain[i], walk.chain[i + 1], 0, messages[i].role)
            pieces.append(replace(piece, copy_of=copied.entry.node_id) if copied else piece)
        return pieces

    def _piece(self, messages: Sequence[Message], before: str, after: str, extra: int, role: str) -> Piece:
        num_tokens = extra + sum(count_message(self._counter, message) for message in messages)
        return Piece(
            ids=_stand_in(after, num_tokens),
            kind=NodeKind.PROMPT,
            author=Author.CLIENT,
            role=role,
            messages=tuple(messages),
            chain_before=before,
            chain=after,
        )


def _stand_in(chain: str, num_tokens: int) -> Ints:
    """An array of `num_tokens` that no other message has."""
    return np.full(num_tokens, int(chain[:7] or "0", 16), np.int32)


def _counted(node: Node) -> Node:
    author = Author.PROVIDER if node.kind is NodeKind.OUTPUT else node.author
    return replace(
        node, token_ids=_NO_IDS, counted_tokens=len(node.token_ids), author=author, logprobs=None, policy_versions=None
    )
