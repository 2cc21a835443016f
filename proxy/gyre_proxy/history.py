"""The history of one execution: which tokens a request stands for, and where they lie in the tree.

Single-threaded and without I/O. `plan` says what a request would be and changes nothing that another plan could see;
`reserve` makes its new nodes known to later plans; `commit` returns the rows to write once the reply is there;
`restore` rebuilds everything from recorded rows, so that after a crash the next request extends exactly.

Always: the ids of a prompt are the ids along its path, sampled ids are never made again from text, and a sampled token
lies in exactly one node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from gyre_data.errors import CaptureError, ConfigError
from gyre_data.schema import Author, NodeKind
from gyre_data.types import Call, Floats, Ints, Node, VersionSpan

from .branching import Kinship, describe
from .extend import CannotExtend, Item, after_turn, whole
from .forest import Draft, Entry, Forest, Path, Piece
from .ids_text import IdsText
from .late_system import Placer, SystemForm, system_form
from .lineage import Lineage
from .locality import Locality
from .matching import Matcher, Turn, Walk, chain_start, chain_turn, chained, hydrated
from .message import Message, Reply, Request, canonical
from .plan import PromptPlan, Written
from .roles import AgentLabel
from .same_turn import message_from_json, message_json
from .template import RenderError, Template

__all__ = ["History", "Layout", "PromptPlan", "Written"]


_MAX_BASES = 4
"""Sampled turns, from the deepest up, that are tried as the base of a prompt before all of it is rendered."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """A prompt laid onto the tree. `check` says why the deepest sampled turn could not be extended."""

    path: Path
    """Nodes that exist; its tokens are the beginning of the prompt."""
    drafts: Sequence[Draft]
    prompt_ids: Ints
    from_turn: bool = False
    check: CannotExtend | None = None
    retried: bool = False


class History:
    """All state of one execution. `thinking` keep: sampled reasoning stays in the context whatever the template says;
    fork: the template is followed, and a turn whose reasoning it strips is left behind. `locality` is what was found
    out about the template; without it every extension is rendered with its whole history."""

    def __init__(
        self,
        template: Template,
        *,
        execution_id: str,
        thinking: str = "keep",
        late_system: SystemForm | None = None,
        locality: Locality | None = None,
    ) -> None:
        if thinking not in ("keep", "fork"):
            raise ConfigError(f"--thinking: wanted keep or fork, got {thinking!r}")
        self._template = template
        self._execution_id = execution_id
        self._thinking = thinking
        self._placed = Placer(late_system or system_form(template))
        self._forest = Forest()
        self._lineage = Lineage()
        self._matcher = Matcher()
        self._locality = locality
        self.ids_text = IdsText()
        """What engines are sent of its prompts."""
        self._tools: tuple[Sequence[Any], bytes] = ((), b"")
        self._prompts: dict[str, list[Entry]] = {}
        self._active: dict[int, PromptPlan] = {}

    # ------------------------------------------------------------------ plan

    def plan(self, request: Request, label: AgentLabel) -> PromptPlan:
        """Prompt and place of `request`. Raises RenderError when the template refuses the conversation."""
        if not request.messages:
            raise RenderError("wanted a conversation, got no messages; send at least one")
        request = replace(request, messages=self._placed(request.messages))
        tools_json = self._tools_json(request.tools)
        tools_digest = hashlib.sha256(tools_json).hexdigest()[:32] if tools_json else None
        start = chain_start(self._template.fingerprint, tools_digest)
        walk = self._matcher.match(request.messages, start, label.client)
        copies = self._lineage.copies(request.messages, walk, label.client)
        layout = self._lay(request, walk, copies)
        drafts, prompt_ids = layout.drafts, layout.prompt_ids
        last = drafts[-1] if drafts else layout.path.nodes[-1]
        kinship = Kinship(
            label=label,
            walk=walk,
            copies=copies,
            path=layout.path.nodes,
            from_turn=layout.from_turn,
            check=layout.check,
            retried=layout.retried,
            prompt_ids=prompt_ids,
            prompt_node=last.node_id,
            messages=request.messages,
            begins_with=next((self._prompts[at][-1] for at in walk.chain[-2::-1] if at in self._prompts), None),
            path_of=self._forest.path,
        )
        told = describe(kinship, self._lineage)
        return PromptPlan(
            prompt_ids=prompt_ids,
            node_ids=(*layout.path.node_ids, *(draft.node_id for draft in drafts)),
            new_nodes=tuple(drafts),
            opening_ids=last.token_ids if last.kind == NodeKind.GENERATION_PROMPT else prompt_ids[:0],
            extension=told.extension,
            branch_reason=told.branch_reason,
            fork_check=told.fork_check,
            first_difference_message=told.first_difference_message,
            first_difference_token=told.first_difference_token,
            tokens_lost=told.tokens_lost,
            echo_difference=told.echo_difference,
            continues_from=told.continues_from,
            agent_role=told.role,
            role_source=told.role_source,
            agent_id=told.agent_id,
            parent_agent_id=told.parent_agent_id,
            spawned_by_node=told.spawned_by[0],
            spawned_by_tool_call=told.spawned_by[1],
            identity=_identity(request, label, tools_digest, walk),
            tools_digest=tools_digest,
            tools_json=tools_json or None,
            chain=walk.chain,
            conversation=told.conversation,
            wire=request.wire,
        )

    def _tools_json(self, tools: Sequence[Mapping[str, Any]]) -> bytes:
        """Canonical JSON of the tool list, made once for as long as the same list comes."""
        if self._tools[0] is not tools:
            self._tools = (tools, canonical(list(tools)) if tools else b"")
        return self._tools[1]

    def _lay(self, request: Request, walk: Walk, copies: Sequence[Turn | None]) -> Layout:
        if (retried := self._retried(walk)) is not None:
            return retried
        failed: CannotExtend | None = None
        for at, turn in islice(_sampled(walk), _MAX_BASES):
            try:
                pieces = self._extension(request, walk, copies, at, turn)
            except CannotExtend as check:
                failed = failed or check
                continue
            return self._attached(turn.entry, pieces, from_turn=failed is None, check=failed)
        items = _items(request.messages, walk, copies, 0)
        return self._attached(None, whole(self._template, request.tools, items), check=failed)

    def _extension(
        self, request: Request, walk: Walk, copies: Sequence[Turn | None], at: int, turn: Turn
    ) -> list[Piece]:
        """Pieces after the sampled turn that is message `at`; raises CannotExtend."""
        item, *new = _items(request.messages, walk, copies, at)
        follow = self._thinking == "fork"

        def extended(before: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
            return after_turn(self._template, tools, turn, before, item, new, follow_template=follow)

        local, short = self._locality, None
        if local is not None and local.proved and not follow and all(one.message.role != "assistant" for one in new):
            with suppress(CannotExtend):
                short = extended(*local.stand_in(request.tools))
            if short is not None and not local.due(walk.chain[-1]):
                local.num_short += 1
                return short
        before = [hydrated(one, source) for one, source in zip(request.messages[:at], walk.turns, strict=False)]
        try:
            full = extended(before, request.tools)
        except CannotExtend as check:
            if local is not None and short is not None:
                local.refute(str(check))
            raise
        if local is not None and short is not None:
            if not _same_pieces(short, full):
                local.refute("a turn is followed by other tokens when its history is rendered with it")
            local.num_short = 0
        return full

    def _retried(self, walk: Walk) -> Layout | None:
        """The newest prompt of exactly these messages."""
        prompts = self._prompts.get(walk.chain[-1])
        if not prompts:
            return None
        path = self._forest.path(max(prompts, key=lambda entry: entry.order))
        return Layout(path=path, drafts=(), prompt_ids=path.token_ids, retried=True)

    def _attached(
        self, base: Entry | None, pieces: Sequence[Piece], *, from_turn: bool = False, check: CannotExtend | None = None
    ) -> Layout:
        walked, drafts = self._forest.attach(base, pieces)
        above = self._forest.path(base)
        new_ids = np.concatenate([piece.ids for piece in pieces])
        laid = [*(node.token_ids for node in walked), *(draft.token_ids for draft in drafts)]
        assert np.array_equal(np.concatenate(laid), new_ids), "the ids of a prompt are the ids along its path"
        path = Path(
            nodes=(*above.nodes, *walked),
            node_ids=(*above.node_ids, *(node.node_id for node in walked)),
            token_ids=above.token_ids,
        )
        prompt_ids = np.concatenate([above.token_ids, new_ids])
        return Layout(path=path, drafts=drafts, prompt_ids=prompt_ids, from_turn=from_turn, check=check)

    def spans(self, plan: PromptPlan) -> Iterator[tuple[str, int, int]]:
        """Each node of a prompt with the positions that it covers, half open."""
        new = {draft.node_id: draft for draft in plan.new_nodes}
        for node_id in plan.node_ids:
            node = new.get(node_id) or self._forest[node_id]
            yield node_id, node.start_pos, node.start_pos + len(node.token_ids)

    # ------------------------------------------------------------------ reserve, commit

    def reserve(self, plan: PromptPlan) -> None:
        """Make the plan's nodes known to later plans. Raises CaptureError if the tree changed since it was made."""
        if id(plan) in self._active:
            raise CaptureError("this plan is reserved already; plan the call again")
        for draft in plan.new_nodes:
            self._forest.add(draft)
        self._matcher.note_known(plan.chain)
        self._note_prompt(plan.chain[-1], self._forest[plan.node_ids[-1]])
        self._lineage.reserve(plan)
        self._active[id(plan)] = plan

    def commit(
        self,
        plan: PromptPlan,
        *,
        call_id: str,
        output_node_id: str,
        output_ids: Ints,
        logprobs: Floats | None,
        versions: Sequence[VersionSpan],
        reply: Reply,
    ) -> Written:
        """The nodes that this call is the first to write, parents first, its output last.

        A call that sampled nothing has no output node. If the rows cannot be made durable, this history is ahead of
        the disk and must be restored from it.
        """
        if len(output_ids) and logprobs is not None and len(logprobs) != len(output_ids):
            raise CaptureError(
                f"call {call_id}: wanted a log-prob for each of {len(output_ids)} sampled tokens, got {len(logprobs)}; "
                "the call cannot be recorded"
            )
        self._finish(plan)
        nodes: list[Node] = []
        blobs: dict[str, bytes] = {}
        prompt = self._forest[plan.node_ids[-1]]
        for entry in _unwritten(prompt):
            nodes.append(self._row(entry, call_id, blobs))
            entry.written, entry.messages = True, ()
        output: Turn | None = None
        if len(output_ids):
            output = self._add_output(plan, call_id, output_node_id, output_ids, reply.message())
            nodes.append(
                replace(
                    self._row(output.entry, call_id, blobs),
                    logprobs=None if logprobs is None else np.asarray(logprobs, dtype=np.float32),
                    policy_versions=tuple(versions),
                )
            )
            output.entry.written, output.entry.messages = True, ()
        self._lineage.commit(plan, call_id, prompt, output)
        return Written(nodes=tuple(nodes), blobs=blobs)

    def _finish(self, plan: PromptPlan) -> None:
        if self._active.pop(id(plan), None) is None:
            raise CaptureError("this plan is not reserved, so it cannot be ended; reserve it first")

    def _add_output(self, plan: PromptPlan, call_id: str, node_id: str, output_ids: Ints, message: Message) -> Turn:
        parent = self._forest[plan.node_ids[-1]]
        ids = np.array(output_ids, dtype=np.int32)
        ids.flags.writeable = False
        entry = self._forest.add(
            Draft(
                node_id=node_id,
                parent_id=parent.node_id,
                root_id=parent.root_id,
                start_pos=parent.end_pos,
                kind=NodeKind.OUTPUT,
                author=Author.POLICY,
                role="assistant",
                copy_of=None,
                token_ids=ids,
                chain=chain_turn(plan.chain[-1], node_id),
                messages=(message,),
            )
        )
        return self._note_turn(plan.chain[-1], entry, message, call_id)

    def _note_turn(self, before: str, entry: Entry, message: Message, call_id: str) -> Turn:
        turn = Turn(entry=entry, reply=message, call_id=call_id)
        self._matcher.note_turn(before, turn)
        self._lineage.sampled(turn)
        return turn

    def _note_prompt(self, chain: str, entry: Entry) -> None:
        prompts = self._prompts.setdefault(chain, [])
        if entry not in prompts:
            prompts.append(entry)

    def _row(self, entry: Entry, call_id: str, blobs: dict[str, bytes]) -> Node:
        texts = [message_json(message) for message in entry.messages]
        ids = [hashlib.sha256(text).hexdigest() for text in texts]
        blobs.update(zip(ids, texts, strict=True))
        return Node(
            node_id=entry.node_id,
            execution_id=self._execution_id,
            root_id=entry.root_id,
            parent_id=entry.parent.node_id if entry.parent else None,
            call_id=call_id,
            start_pos=entry.start_pos,
            kind=entry.kind,
            message_role=entry.role,
            author=entry.author,
            copy_of=entry.copy_of,
            token_ids=entry.token_ids,
            message_blobs=tuple(ids) or None,
            content_hash=entry.chain,
            fingerprint=self._template.fingerprint,
        )

    # ------------------------------------------------------------------ restore

    def restore(self, nodes: Sequence[Node], calls: Sequence[Call], blobs: Callable[[str], bytes]) -> None:
        """Rebuild the state from an execution's recorded rows, in the order they were written.

        Only nodes on the path of a recorded call count: a crash can leave nodes whose call was never acknowledged.
        """
        if self._forest.roots:
            raise CaptureError("this history is in use; restore into a new one")
        rows = {node.node_id: node for node in nodes}
        starts = {chain_start(self._template.fingerprint, tools) for tools in {call.tools_digest for call in calls}}
        for call in calls:
            if call.prompt_node is None:
                continue
            for row in _path(rows, call.output_node or call.prompt_node, call.call_id):
                if row.node_id not in self._forest:
                    self._restore_node(row, starts, blobs)
            prompt = self._forest[call.prompt_node]
            self._note_prompt(prompt.chain, prompt)
            output = None
            if call.output_node is not None:
                entry = self._forest[call.output_node]
                message = message_from_json(blobs((rows[call.output_node].message_blobs or ("",))[0]))
                output = self._note_turn(prompt.chain, entry, message, call.call_id)
            self._lineage.restore(call, prompt, output)

    def _restore_node(self, row: Node, starts: set[str], blobs: Callable[[str], bytes]) -> None:
        if row.fingerprint != self._template.fingerprint:
            raise ConfigError(
                f"node {row.node_id} was made by tokenizer and template {row.fingerprint}, this proxy has "
                f"{self._template.fingerprint}; start it with the files the run was recorded with"
            )
        messages = row.message_blobs or ()
        if len(messages) > 1:  # hashes between messages that share a node
            befores = [self._forest[row.parent_id].chain] if row.parent_id else sorted(starts)
            for before in befores:
                at = before
                for blob in messages[:-1]:
                    at = chained(at, message_from_json(blobs(blob)))
                    self._matcher.note_known((at,))
        entry = self._forest.add(
            Draft(
                node_id=row.node_id,
                parent_id=row.parent_id,
                root_id=row.root_id,
                start_pos=row.start_pos,
                kind=row.kind,
                author=row.author,
                role=row.message_role,
                copy_of=row.copy_of,
                token_ids=row.token_ids,
                chain=row.content_hash or "",
                messages=(),
            ),
            written=True,
        )
        entry.num_messages = len(messages)
        self._matcher.note_known((entry.chain,))


def _path(rows: Mapping[str, Node], leaf: str, call_id: str) -> list[Node]:
    path: list[Node] = []
    at: str | None = leaf
    while at is not None:
        row = rows.get(at)
        if row is None:
            raise CaptureError(
                f"call {call_id} was recorded, but its node {at} is not in the run; run `gyre verify` on it"
            )
        path.append(row)
        at = row.parent_id
    return path[::-1]


def _identity(request: Request, label: AgentLabel, tools_digest: str | None, walk: Walk) -> str:
    sampling = canonical(request.sampling.to_json()).hex()
    parts = [request.wire, str(label.agent_id), str(tools_digest), request.model, sampling, walk.digest]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _sampled(walk: Walk) -> Iterator[tuple[int, Turn]]:
    """The sampled turns of a conversation and their places, the deepest first."""
    for at in range(len(walk.turns) - 1, -1, -1):
        if (turn := walk.turns[at]) is not None:
            yield at, turn


def _items(messages: Sequence[Message], walk: Walk, copies: Sequence[Turn | None], first: int) -> list[Item]:
    """What is to be rendered, from message `first` on."""
    return [
        Item(
            message=hydrated(messages[i], walk.turns[i]),
            chain_before=walk.chain[i],
            chain=walk.chain[i + 1],
            copy_of=source.entry.node_id if (source := walk.turns[i] or copies[i]) else None,
        )
        for i in range(first, len(messages))
    ]


def _unwritten(leaf: Entry) -> list[Entry]:
    """Nodes on the path to `leaf` that no call has written, parents first."""
    found: list[Entry] = []
    at: Entry | None = leaf
    while at is not None and not at.written:
        found.append(at)
        at = at.parent
    return found[::-1]


def _same_pieces(one: Sequence[Piece], two: Sequence[Piece]) -> bool:
    gist = [[(piece.ids.tolist(), piece.kind, piece.chain) for piece in pieces] for pieces in (one, two)]
    return gist[0] == gist[1]
