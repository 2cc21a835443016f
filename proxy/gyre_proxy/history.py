"""The history of one execution: which tokens a request stands for, and where they lie in the tree.

Single-threaded and without I/O. `plan` says what a request would be and changes nothing; `reserve` makes its new nodes
known to later plans; `commit` returns the rows to write once the reply is there; `release` takes a refused call back;
`restore` rebuilds everything from recorded rows, so that after a crash the next request extends exactly.

Always: the ids of a prompt are the ids along its path, sampled ids are never made again from text, and a sampled token
lies in exactly one node.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre_data.errors import CaptureError, ConfigError
from gyre_data.schema import Author, NodeKind
from gyre_data.types import Call, Floats, Ints, Node, VersionSpan

from .branching import Kinship, describe
from .extend import CannotExtend, Item, after_turn, whole
from .forest import Draft, Entry, Forest, Piece
from .late_system import SystemForm, placed, system_form
from .lineage import Lineage
from .matching import Turn, Walk, chain_start, chain_turn, chained, hydrated, match
from .message import Message, Reply, Request, canonical, digest
from .plan import PromptPlan, Written
from .roles import AgentLabel
from .same_turn import canonical_message, message_from_json, message_json
from .template import RenderError, Template

__all__ = ["History", "Layout", "PromptPlan", "Written"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """A prompt laid onto the tree. `check` is set when extension was tried and failed."""

    path: Sequence[Entry]
    drafts: Sequence[Draft]
    from_turn: bool = False
    check: CannotExtend | None = None
    retried: bool = False


class History:
    """All state of one execution. `thinking` keep: sampled reasoning stays in the context whatever the template says;
    fork: the template is followed, and a turn whose reasoning it strips is left behind."""

    def __init__(
        self,
        template: Template,
        *,
        execution_id: str,
        thinking: str = "keep",
        late_system: SystemForm | None = None,
    ) -> None:
        if thinking not in ("keep", "fork"):
            raise ConfigError(f"--thinking: wanted keep or fork, got {thinking!r}")
        self._template = template
        self._execution_id = execution_id
        self._thinking = thinking
        self._late_system = late_system or system_form(template)
        self._forest = Forest()
        self._lineage = Lineage()
        self._turns: dict[str, list[Turn]] = {}
        self._known: Counter[str] = Counter()
        self._prompts: dict[str, list[Entry]] = {}
        self._active: dict[int, PromptPlan] = {}

    # ------------------------------------------------------------------ plan

    def plan(self, request: Request, label: AgentLabel) -> PromptPlan:
        """Prompt and place of `request`. Raises RenderError when the template refuses the conversation."""
        if not request.messages:
            raise RenderError("wanted a conversation, got no messages; send at least one")
        request = replace(request, messages=placed(request.messages, self._late_system))
        tools_digest = digest(list(request.tools)) if request.tools else None
        start = chain_start(self._template.fingerprint, tools_digest)
        walk = match(request.messages, start, self._turns, self._known, label.client)
        copies = self._lineage.copies(request.messages, walk, label.client)
        layout = self._lay(request, walk, copies)
        path: list[Entry | Draft] = [*layout.path, *layout.drafts]
        assert path, "a prompt has at least one node"
        prompt_ids = np.concatenate([node.token_ids for node in path])
        kinship = Kinship(
            label=label,
            walk=walk,
            copies=copies,
            path=tuple(layout.path),
            from_turn=layout.from_turn,
            check=layout.check,
            retried=layout.retried,
            prompt_ids=prompt_ids,
            prompt_node=path[-1].node_id,
            messages=request.messages,
            quiet=not self._active,
        )
        told = describe(kinship, self._lineage)
        return PromptPlan(
            prompt_ids=prompt_ids,
            node_ids=tuple(node.node_id for node in path),
            new_nodes=tuple(layout.drafts),
            opening_ids=path[-1].token_ids if path[-1].kind == NodeKind.GENERATION_PROMPT else prompt_ids[:0],
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
            agent_id=label.agent_id,
            parent_agent_id=label.parent_agent_id,
            spawned_by_node=told.spawned_by[0],
            spawned_by_tool_call=told.spawned_by[1],
            identity=_identity(request, label, tools_digest),
            tools_digest=tools_digest,
            chain=walk.chain,
            conversation=told.conversation,
            wire=request.wire,
        )

    def _lay(self, request: Request, walk: Walk, copies: Sequence[Turn | None]) -> Layout:
        if (retried := self._retried(walk)) is not None:
            return retried
        messages = hydrated(request.messages, walk)
        items = [
            Item(
                message=message,
                chain_before=walk.chain[i],
                chain=walk.chain[i + 1],
                copy_of=source.entry.node_id if (source := walk.turns[i] or copies[i]) else None,
            )
            for i, message in enumerate(messages)
        ]
        check: CannotExtend | None = None
        if (last := walk.last) is not None:
            turn = walk.turns[last]
            assert turn is not None
            try:
                pieces = after_turn(
                    self._template, request.tools, turn, items, last, follow_template=self._thinking == "fork"
                )
                return self._attached(turn.entry, pieces, from_turn=True)
            except CannotExtend as failed:
                check = failed
        return self._attached(None, whole(self._template, request.tools, items), check=check)

    def _retried(self, walk: Walk) -> Layout | None:
        """The newest prompt of exactly these messages."""
        prompts = self._prompts.get(walk.chain[-1])
        if not prompts:
            return None
        return Layout(path=max(prompts, key=lambda entry: entry.order).path(), drafts=(), retried=True)

    def _attached(
        self, base: Entry | None, pieces: Sequence[Piece], *, from_turn: bool = False, check: CannotExtend | None = None
    ) -> Layout:
        walked, drafts = self._forest.attach(base, pieces)
        path = [*(base.path() if base else []), *walked]
        ids = np.concatenate([*(node.token_ids for node in path), *(draft.token_ids for draft in drafts)])
        rendered = np.concatenate([*([base.path_ids()] if base else []), *(piece.ids for piece in pieces)])
        assert np.array_equal(ids, rendered), "the ids of a prompt are the ids along its path"
        return Layout(path=path, drafts=drafts, from_turn=from_turn, check=check)

    # ------------------------------------------------------------------ reserve, release, commit

    def reserve(self, plan: PromptPlan) -> None:
        """Make the plan's nodes known to later plans. Raises CaptureError if the tree changed since it was made."""
        if id(plan) in self._active:
            raise CaptureError("this plan is reserved already; plan the call again")
        missing = [
            node for node in plan.node_ids[: len(plan.node_ids) - len(plan.new_nodes)] if node not in self._forest
        ]
        if missing:
            raise CaptureError(f"node {missing[0]} was released since this call was planned; plan the call again")
        for draft in plan.new_nodes:
            self._forest.add(draft)
        for node_id in plan.node_ids:
            self._forest[node_id].users += 1
        self._known.update(plan.chain)
        self._note_prompt(plan.chain[-1], self._forest[plan.node_ids[-1]])
        self._lineage.reserve(plan)
        self._active[id(plan)] = plan

    def release(self, plan: PromptPlan) -> None:
        """Take back a reserved plan that never became a call; nodes that no other plan holds are forgotten."""
        self._finish(plan)
        self._known.subtract(plan.chain)
        for key in {key for key in plan.chain if self._known[key] <= 0}:
            del self._known[key]
        self._lineage.release(plan)
        for node_id in reversed(plan.node_ids):
            entry = self._forest[node_id]
            if entry.written or entry.users or entry.children:
                continue
            prompts = self._prompts.get(entry.chain, [])
            if entry in prompts:
                prompts.remove(entry)
                if not prompts:
                    del self._prompts[entry.chain]
            self._forest.remove(entry)

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
        for node_id in plan.node_ids:
            entry = self._forest[node_id]
            if not entry.written:
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
        self._lineage.commit(plan, call_id, self._forest[plan.node_ids[-1]], output)
        return Written(nodes=tuple(nodes), blobs=blobs)

    def _finish(self, plan: PromptPlan) -> None:
        if self._active.pop(id(plan), None) is None:
            raise CaptureError("this plan is not reserved, so it cannot be ended; reserve it first")
        for node_id in plan.node_ids:
            self._forest[node_id].users -= 1

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
        self._turns.setdefault(before, []).append(turn)
        self._known[entry.chain] += 1
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
        self._known.update(starts)
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
                    self._known[at] += 1
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
        self._known[entry.chain] += 1


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


def _identity(request: Request, label: AgentLabel, tools_digest: str | None) -> str:
    parts = [
        request.wire,
        str(label.agent_id),
        str(tools_digest),
        request.model,
        canonical(request.sampling.to_json()).hex(),
        *(canonical_message(message).hex() for message in request.messages),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
