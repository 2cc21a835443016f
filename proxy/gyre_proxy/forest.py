"""The nodes of one execution in memory, and where the tokens of a new prompt attach to them.

A node is shared by two prompts when its tokens are the same, start at the same place under the same parent, and the
messages up to its end are the same (the hash chain). Equal tokens of different messages stay apart, because the
record says which message a node is.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gyre_data.errors import CaptureError
from gyre_data.schema import Author, NodeKind
from gyre_data.types import Ints

from .message import Message

__all__ = ["Draft", "Entry", "Forest", "Path", "Piece", "new_node_id"]


def new_node_id() -> str:
    """A fresh node id."""
    return f"n_{secrets.token_hex(10)}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Tokens of a prompt between two message borders, before it is known which of them are recorded already.

    `chain_before` and `chain` are the hash chain before and after the messages rendered here.
    """

    ids: Ints
    kind: NodeKind
    author: Author
    role: str | None
    messages: tuple[Message, ...]
    chain_before: str
    chain: str
    copy_of: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draft:
    """A node that a plan would add."""

    node_id: str
    parent_id: str | None
    root_id: str
    start_pos: int
    kind: NodeKind
    author: Author
    role: str | None
    copy_of: str | None
    token_ids: Ints
    chain: str
    messages: tuple[Message, ...]


@dataclass(kw_only=True, slots=True, eq=False)
class Entry:
    """A node that is written or reserved. Whatever is above a written node is written too."""

    node_id: str
    parent: Entry | None
    root_id: str
    start_pos: int
    kind: NodeKind
    author: Author
    role: str | None
    copy_of: str | None
    token_ids: Ints
    chain: str
    order: int
    messages: tuple[Message, ...] = ()
    """Messages rendered here; dropped once the node is written."""
    num_messages: int = 0
    written: bool = False
    children: list[Entry] = field(default_factory=list)

    @property
    def end_pos(self) -> int:
        """Tokens up to and including this node on its path."""
        return self.start_pos + len(self.token_ids)

    @property
    def sampled(self) -> bool:
        """Whether the policy made these tokens."""
        return self.kind is NodeKind.OUTPUT


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Path:
    """Nodes from a root to one node, their ids, and all their tokens."""

    nodes: tuple[Entry, ...]
    node_ids: tuple[str, ...]
    token_ids: Ints


_NOTHING = Path(nodes=(), node_ids=(), token_ids=np.empty(0, dtype=np.int32))
_MAX_PATHS = 4


class Forest:
    """All nodes of an execution: roots, children in the order they came, and lookup by id."""

    def __init__(self) -> None:
        self.roots: list[Entry] = []
        self._by_id: dict[str, Entry] = {}
        self._order = 0
        self._paths: dict[str, Path] = {}

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._by_id

    def __getitem__(self, node_id: str) -> Entry:
        return self._by_id[node_id]

    def get(self, node_id: str | None) -> Entry | None:
        """The node of that id, if it is here."""
        return self._by_id.get(node_id) if node_id else None

    def add(self, draft: Draft, *, written: bool = False) -> Entry:
        """Put a node under its parent."""
        parent = self.get(draft.parent_id)
        if draft.node_id in self._by_id or (draft.parent_id is not None and parent is None):
            raise CaptureError(
                f"node {draft.node_id} does not fit under {draft.parent_id}: the tree changed since it was planned; "
                "plan the call again"
            )
        self._order += 1
        entry = Entry(
            node_id=draft.node_id,
            parent=parent,
            root_id=draft.root_id,
            start_pos=draft.start_pos,
            kind=draft.kind,
            author=draft.author,
            role=draft.role,
            copy_of=draft.copy_of,
            token_ids=draft.token_ids,
            chain=draft.chain,
            order=self._order,
            messages=draft.messages,
            num_messages=len(draft.messages),
            written=written,
        )
        (self.roots if parent is None else parent.children).append(entry)
        self._by_id[entry.node_id] = entry
        return entry

    def path(self, leaf: Entry | None) -> Path:
        """The path to `leaf`; the empty one to None.

        The last few are kept, each in place of the one that it prolongs, so that a conversation that grows costs a
        copy of its tokens and no walk over its nodes.
        """
        added: list[Entry] = []
        at = leaf
        while at is not None and at.node_id not in self._paths:
            added.append(at)
            at = at.parent
        above = _NOTHING if at is None else self._paths[at.node_id]
        if leaf is None or not added:
            return above
        added.reverse()
        path = Path(
            nodes=(*above.nodes, *added),
            node_ids=(*above.node_ids, *(node.node_id for node in added)),
            token_ids=np.concatenate([above.token_ids, *(node.token_ids for node in added)]),
        )
        path.token_ids.flags.writeable = False
        if at is not None:
            del self._paths[at.node_id]
        while len(self._paths) >= _MAX_PATHS:
            del self._paths[next(iter(self._paths))]
        self._paths[leaf.node_id] = path
        return path

    def attach(self, base: Entry | None, pieces: Sequence[Piece]) -> tuple[list[Entry], list[Draft]]:
        """Split `pieces`, which come right after `base`, into nodes that exist and nodes to add.

        The deepest run of existing nodes wins; among equals the one with more sampled nodes, then the newest.
        """
        ids = np.concatenate([piece.ids for piece in pieces]) if pieces else np.empty(0, dtype=np.int32)
        bounds = np.cumsum([0, *(len(piece.ids) for piece in pieces)])
        best: tuple[tuple[int, int, int], tuple[Entry, ...]] = ((0, 0, 0), ())
        open_paths: list[tuple[int, int, tuple[Entry, ...]]] = [(0, 0, ())]
        while open_paths:
            at, num_sampled, path = open_paths.pop()
            key = (at, num_sampled, path[-1].order if path else 0)
            if key > best[0]:
                best = (key, path)
            parent = path[-1] if path else base
            for child in self.roots if parent is None else parent.children:
                end = at + len(child.token_ids)
                if end > len(ids) or not _same_place(child, pieces, bounds, end):
                    continue
                if np.array_equal(child.token_ids, ids[at:end]):
                    open_paths.append((end, num_sampled + child.sampled, (*path, child)))
        (at, _, _), found = best
        top = found[-1] if found else base
        return list(found), list(_drafts(pieces, bounds, at, top))


def _same_place(child: Entry, pieces: Sequence[Piece], bounds: np.ndarray, end: int) -> bool:
    """Whether `child`, ending at token `end`, stands for the messages that the pieces have there."""
    index = int(np.searchsorted(bounds, end, side="left")) - 1
    piece = pieces[index]
    if child.kind is NodeKind.GENERATION_PROMPT and piece.kind is not NodeKind.GENERATION_PROMPT:
        return child.chain == piece.chain_before and end < bounds[index + 1]
    if end < bounds[index + 1] and not child.sampled:
        return False
    return child.chain == piece.chain


def _drafts(pieces: Sequence[Piece], bounds: np.ndarray, at: int, top: Entry | None) -> Iterator[Draft]:
    parent_id = top.node_id if top else None
    root_id = top.root_id if top else None
    start = top.end_pos if top else 0
    for n, piece in enumerate(pieces):
        begin, end = int(bounds[n]), int(bounds[n + 1])
        if end <= at:
            continue
        # What is left of a turn after its sampled tokens is its closing token, which we add.
        closes = begin < at and top is not None and top.sampled
        node_id = new_node_id()
        ids = piece.ids[max(at - begin, 0) :].copy()
        ids.flags.writeable = False
        yield Draft(
            node_id=node_id,
            parent_id=parent_id,
            root_id=root_id or node_id,
            start_pos=start,
            kind=piece.kind,
            author=Author.TEMPLATE if closes else piece.author,
            role=piece.role,
            copy_of=None if closes else piece.copy_of,
            token_ids=ids,
            chain=piece.chain,
            messages=() if closes else piece.messages,
        )
        parent_id, root_id, start = node_id, root_id or node_id, start + len(ids)
