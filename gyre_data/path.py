"""A path of a tree, root to one node: the exact context of a call with its reply, as a conversation and as tokens.

The one place that turns root..node into messages. Positions are of tokens on the path, counted from its root, and
spans are half-open. Arrays over them are one element per token (suffix T). Where token ids are not known (observe mode,
redacted nodes), positions still count what was counted, and arrays of ids or log-probs are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from .errors import DataError
from .json_values import parsed
from .schema import Author, NodeKind
from .types import Call, Floats, Ints, VersionSpan

if TYPE_CHECKING:
    from .admission import Admission, AdmittedExecution
    from .execution import Execution
    from .tree import Tree

__all__ = ["MINTED_CALL", "Path", "PathCall", "PathMessage", "Shared", "ToolAnswer", "minted_number", "stored_message"]

# Ids of tool calls that a proxy of ours minted name the sampled node and a number within its reply.
MINTED_CALL = re.compile(r"[a-z]+_(n_[0-9a-f]{20})_([0-9]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolAnswer:
    """The tool call that a tool result answers."""

    message: int
    """Index of the message that made the call, in the same conversation."""
    number: int | None
    """Which of its tool calls, from 0; None where the record does not tell."""
    name: str | None
    """Name of the tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathMessage:
    """One message of a path. Messages that are rendered in one node share its span."""

    index: int
    node: int
    """Index of its node in the tree."""
    role: str
    author: Author
    """Of its node: policy or provider when it was sampled by this call, client when it was sent."""
    call_id: str
    """The call that added the node."""
    copy_of: str | None
    """Sampled node of which this is a kept or re-rendered copy: context only, trained where it was sampled."""
    start: int
    end: int
    value: Any
    """Canonical message (role, content, reasoning, tool_calls, ...); None when the run holds no text of it."""
    answers: ToolAnswer | None = None

    @property
    def sampled(self) -> bool:
        """True when a model wrote it here."""
        return self.author in (Author.POLICY, Author.PROVIDER)


@dataclass(frozen=True, kw_only=True, slots=True)
class PathCall:
    """One call of a path: [begin, start) is what its request added to the path, [start, end) what was sampled."""

    call: Call
    number: int
    """Its number in the execution, by start time from 1: `c7` in `gyre tree`."""
    node: int
    """Index of its output node."""
    begin: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """How much two paths have in common, from the root on."""

    nodes: int
    tokens: int


class Path:
    """Root to one node of an execution. Get one from `Execution.main`, `Execution.path` or `Execution.paths`."""

    def __init__(self, execution: Execution, leaf: int) -> None:
        self.execution, self.leaf = execution, leaf

    def __repr__(self) -> str:
        return f"Path({self.execution.execution_id!r}, node {self.node_id!r}, tokens={len(self)})"

    def __len__(self) -> int:
        """Tokens on the path, those that were only counted too."""
        return int(self._start_N1[-1])

    @property
    def tree(self) -> Tree:
        """The tree it belongs to."""
        return self.execution.tree

    @property
    def node_id(self) -> str:
        """Id of its last node."""
        return self.tree.node_id[self.leaf]

    @cached_property
    def nodes(self) -> Ints:
        """Indices into the tree, root first."""
        return self.tree.path(self.leaf)

    @property
    def call(self) -> Call | None:
        """The call that sampled its last node; None when it ends with something else."""
        calls = self.tree.outputs.get(self.leaf)
        return calls[0] if calls else None

    # ------------------------------------------------------------------ as a conversation

    def messages(self) -> list[Any]:
        """The path as chat: canonical messages in order, decoded from the run's blobs.

        Raises DataError when the run lacks one: a conversation with a hole is another conversation.
        """
        if getattr(self.execution.run, "blob", None) is None:
            raise DataError("messages need a run on disk; wanted something with blob(id), see gyre_data.open")
        for message in self.conversation:
            if message.value is None and (names := self.tree.message_blobs(message.node)):
                raise DataError(
                    f"wanted the texts of node {self.tree.node_id[message.node]} of {self.execution.execution_id}, the "
                    f"run does not hold all of {', '.join(names)}; run `gyre verify` on it"
                )
        return [message.value for message in self.conversation if message.value is not None]

    @cached_property
    def conversation(self) -> tuple[PathMessage, ...]:
        """The same with each message's node, author, call and span, and what every tool result answers.

        Generation prompts and nodes of the template hold no message. In memory, where there are no blobs, values are
        None and the rest holds.
        """
        tree, found = self.tree, list[PathMessage]()
        for slot, node in enumerate(self.nodes.tolist()):
            values = self._values(node)
            if not values and (
                tree.kind_N[node] == NodeKind.GENERATION_PROMPT or tree.author_N[node] == Author.TEMPLATE
            ):
                continue
            for value in values or [None]:
                told = value.get("role") if isinstance(value, dict) else None
                found.append(
                    PathMessage(
                        index=len(found),
                        node=node,
                        role=str(told or tree.message_role_N[node] or "unknown"),
                        author=tree.author_N[node],
                        call_id=tree.call_of_N[node],
                        copy_of=tree.copy_of_N[node],
                        start=int(self._start_N1[slot]),
                        end=int(self._start_N1[slot + 1]),
                        value=value,
                        answers=self._answered(value, found),
                    )
                )
        return tuple(found)

    @cached_property
    def calls(self) -> tuple[PathCall, ...]:
        """The calls whose outputs lie on the path, in order: the boundaries of the conversation."""
        tree, found, begin = self.tree, list[PathCall](), 0
        number = {call.call_id: n for n, call in enumerate(tree.calls, 1)}
        for slot, node in enumerate(self.nodes.tolist()):
            if (made := tree.outputs.get(node)) is None:
                continue
            start, end = int(self._start_N1[slot]), int(self._start_N1[slot + 1])
            found.append(
                PathCall(call=made[0], number=number[made[0].call_id], node=node, begin=begin, start=start, end=end)
            )
            begin = end
        return tuple(found)

    def tools(self) -> list[Any]:
        """The tools that the newest call of the path was given; empty when it had none or the run holds no blobs."""
        blob = getattr(self.execution.run, "blob", None)
        name = self.calls[-1].call.tools_blob if self.calls else None
        found = parsed(blob(name)) if name and blob is not None else None
        return found if isinstance(found, list) else []

    def shared_with(self, other: Path) -> Shared:
        """The part this path has in common with another one of the same execution; nothing with any other."""
        if self.execution.execution_id != other.execution.execution_id:
            return Shared(nodes=0, tokens=0)
        nodes = 0
        for mine, its in zip(self.nodes.tolist(), other.nodes.tolist(), strict=False):
            if self.tree.node_id[mine] != other.tree.node_id[its]:
                break
            nodes += 1
        return Shared(nodes=nodes, tokens=int(self._start_N1[nodes]))

    # ------------------------------------------------------------------ as tokens

    @property
    def token_ids(self) -> Ints:
        """Ids along the path, read-only; a view of the file where the nodes lie side by side in it, else one copy."""
        self._known_ids()
        return _joined([self.tree.ids(i) for i in self.nodes.tolist()])

    @property
    def logprobs(self) -> Floats:
        """Behaviour log-prob of each token; NaN where none was recorded, so also on all that was not sampled."""
        self._known_ids()
        out_T = np.full(len(self), np.nan, np.float32)
        for slot, node in enumerate(self.nodes.tolist()):
            if (values := self.tree.logprobs(node)) is not None:
                out_T[self._start_N1[slot] : self._start_N1[slot + 1]] = values
        return out_T

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Policy versions of the sampled tokens that have one recorded, in positions of the path."""
        return tuple(
            VersionSpan(policy_id=span.policy_id, n=span.n, start=start + span.start, end=start + span.end)
            for start, node in zip(self._start_N1.tolist(), self.nodes.tolist(), strict=False)
            for span in self.tree.versions(node) or ()
        )

    @property
    def sampled_T(self) -> npt.NDArray[np.bool_]:
        """Whether each token was sampled, by our engines or a hosted model."""
        author_N = self.tree.author_N[self.nodes]
        return np.repeat((author_N == Author.POLICY) | (author_N == Author.PROVIDER), np.diff(self._start_N1))

    def owner_T(self, admission: Admission | AdmittedExecution) -> Ints:
        """Index of the kept trajectory that trains each token; -1 where none does, or the execution is not admitted.

        Where several train it (`count="per_row"`), the first of them.
        """
        whole: Any = getattr(admission, "executions", (admission,))
        owner = {
            e.tree.node_id[node]: t.index
            for e in whole
            if e.execution_id == self.execution.execution_id
            for t in reversed(e.trajectories)
            for node in t.owned
        }
        of_N = np.array([owner.get(self.tree.node_id[i], -1) for i in self.nodes.tolist()], np.int32)
        return np.repeat(of_N, np.diff(self._start_N1))

    def loss_mask_T(self, admission: Admission | AdmittedExecution) -> npt.NDArray[np.bool_]:
        """Whether each token is trained, through whichever trajectory owns it."""
        return self.owner_T(admission) >= 0

    # ------------------------------------------------------------------ inside

    @cached_property
    def _start_N1(self) -> npt.NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.tree.num_tokens_N[self.nodes])])

    def _known_ids(self) -> None:
        unknown = self.nodes[self.tree.counted_N[self.nodes]]
        if len(unknown):
            raise DataError(
                f"wanted token ids along {self.node_id} of {self.execution.execution_id}, but those of {len(unknown)} "
                "nodes are not known: they were counted only (observe mode) or redacted; use its messages"
            )

    def _values(self, node: int) -> list[Any]:
        blob = getattr(self.execution.run, "blob", None)
        return [] if blob is None else [stored_message(blob, name) for name in self.tree.message_blobs(node)]

    def _answered(self, value: Any, before: Sequence[PathMessage]) -> ToolAnswer | None:
        """The newest call of that id, by the id itself or by what an id of ours names."""
        wanted = value.get("tool_call_id") if isinstance(value, dict) else None
        if not wanted:
            return None
        minted = MINTED_CALL.fullmatch(str(wanted))
        for message in reversed(before):
            calls = message.value.get("tool_calls") if isinstance(message.value, dict) else None
            for number, call in enumerate(calls or ()):
                if call.get("id") == wanted:
                    return ToolAnswer(message=message.index, number=number, name=call.get("name"))
            if calls and minted and minted[1] in (self.tree.node_id[message.node], message.copy_of):
                wires = {call.wire for call in self.tree.outputs.get(message.node, ())}
                place = minted_number(message.value, int(minted[2]), anthropic="anthropic" in wires)
                return ToolAnswer(
                    message=message.index, number=place, name=None if place is None else calls[place].get("name")
                )
        return None


def minted_number(message: Mapping[str, Any], minted: int, *, anthropic: bool) -> int | None:
    """Which call of a reply an id of ours means: its number, or on the Anthropic wire its block's number."""
    calls = message.get("tool_calls") or ()
    if len(calls) == 1:
        return 0
    if anthropic:
        minted -= bool(message.get("reasoning")) + bool(message.get("content"))
    return minted if 0 <= minted < len(calls) else None


def stored_message(blob: Callable[[str], bytes], name: str) -> Any:
    """The message of a blob; None when the run does not hold it (`gyre verify` names it) or it is no JSON."""
    try:
        return parsed(blob(name))
    except KeyError:
        return None


def _joined(views: Sequence[Ints]) -> Ints:
    """One array of these; a slice of their common memory where each begins where the one before ended."""
    views = [view for view in views if len(view)]
    if not views:
        return np.empty(0, np.int32)
    starts = [view.__array_interface__["data"][0] for view in views]
    ends = [start + view.nbytes for start, view in zip(starts, views, strict=True)]
    if ends[:-1] == starts[1:] and all(view.base is views[0].base is not None for view in views):
        return as_strided(views[0], (sum(map(len, views)),), writeable=False)
    out = np.concatenate(views)
    out.flags.writeable = False
    return out
