"""What a call is in its execution: its role, how its prompt relates to the record, and why it does not simply extend.

A call simply extends when it only adds messages after a sampled turn that nothing follows yet. Everything else gets a
reason and says where it first differs from the newest call of its conversation and what is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre_data.schema import AgentRole, BranchReason, Extension
from gyre_data.types import Ints

from .extend import CannotExtend, StripsThinking
from .forest import Entry, Path
from .lineage import CallState, Lineage, Spawn, labelled_conversation, new_conversation
from .matching import Turn, Walk
from .message import Message
from .roles import SUMMARIES, AgentLabel, base_role, summary_role
from .same_turn import difference, echoed_as_sent

__all__ = ["Kinship", "Told", "describe"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kinship:
    """A request laid onto the tree."""

    label: AgentLabel
    messages: Sequence[Message]
    walk: Walk
    copies: Sequence[Turn | None]
    path: Sequence[Entry]
    """Nodes of the prompt that exist already."""
    prompt_ids: Ints
    prompt_node: str
    retried: bool
    """The whole prompt exists already, for the same messages."""
    from_turn: bool
    """The ids of the deepest sampled turn were kept."""
    check: CannotExtend | None
    begins_with: Entry | None
    """End of the longest earlier prompt whose messages are the first of this one's."""
    path_of: Callable[[Entry], Path]
    """The path to a node."""

    @property
    def turn(self) -> Turn | None:
        """The deepest sampled turn that the request continues."""
        return None if self.walk.last is None else self.walk.turns[self.walk.last]

    @property
    def only_adds(self) -> bool:
        """Whether what comes after that turn holds no assistant message."""
        last = self.walk.last
        return last is not None and all(message.role != "assistant" for message in self.messages[last + 1 :])

    @property
    def copied(self) -> Turn | None:
        """The last sampled turn that is repeated outside its place."""
        return next((turn for turn in reversed(self.copies) if turn is not None), None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Told:
    """The answers."""

    role: AgentRole
    role_source: str
    agent_id: str | None
    parent_agent_id: str | None
    conversation: str
    extension: Extension
    branch_reason: BranchReason | None
    fork_check: str | None
    continues_from: str | None
    spawned_by: Spawn
    first_difference_message: int | None
    first_difference_token: int | None
    tokens_lost: int | None
    echo_difference: str | None


def describe(kin: Kinship, lineage: Lineage) -> Told:
    """Everything a call's row says about its place."""
    place = _place(kin, lineage)
    role, conversation = place.role, place.conversation
    newest = lineage.newest.get(conversation)
    spawned_by = place.spawned_by
    if base_role(role) is AgentRole.SUB_AGENT and spawned_by == (None, None):
        spawned_by = lineage.spawned_by(place.agent_id, place.parent_agent_id, kin.messages)
    extension = _extension(kin, lineage, conversation)
    reason = _reason(kin, extension, role, newest)
    technical = kin.check is not None and not isinstance(kin.check, StripsThinking)
    simple = extension in (Extension.BRIDGE, Extension.REPAIR)
    message, token, lost = (None, None, None) if simple or newest is None else _difference(kin, newest)
    return Told(
        role=role,
        role_source=place.source,
        agent_id=place.agent_id,
        parent_agent_id=place.parent_agent_id,
        conversation=conversation,
        extension=extension,
        branch_reason=reason,
        fork_check=str(kin.check) if technical else None,
        continues_from=_continues_from(kin, lineage, extension, reason, place, newest),
        spawned_by=spawned_by,
        first_difference_message=message,
        first_difference_token=token,
        tokens_lost=lost,
        echo_difference=_echo_difference(kin, lineage) if extension in (Extension.FORK, Extension.ROOT) else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Whose call it is and how that is known."""

    role: AgentRole
    source: str
    conversation: str
    agent_id: str | None
    parent_agent_id: str | None
    spawned_by: Spawn = (None, None)
    after: CallState | None = None
    """The call that it goes on from, if it holds no turn that says so."""


def _place(kin: Kinship, lineage: Lineage) -> _Place:
    """The place that the label gives, or for a request that has none what it repeats and what came before."""
    label = kin.label
    if label.role is not None:
        return _labelled(kin, lineage, label.role)
    if kin.retried and (uses := lineage.uses(kin.prompt_node)):
        return _of_label(label, uses[-1].role, "inherited", uses[-1].conversation)
    turn = kin.turn or kin.copied
    summed_up = lineage.summary_in(kin.messages)
    held = lineage.call_of(turn) if turn is not None else summed_up
    if held is None and kin.begins_with is not None:  # a client may leave out a turn that it could not use
        held = lineage.call_with(kin.begins_with)
    main = labelled_conversation(label.agent_id, AgentRole.MAIN)
    if label.summary:
        held = held or lineage.newest.get(main)
        return _like(held, summary_role(base_role(held.role)), "shape") if held else _stranger(kin)
    if held is not None:
        return replace(_like(held, base_role(held.role), "inherited"), after=held)
    started = lineage.started_by(label.spawner, kin.messages) if label.spawner else None
    if started is not None:
        by, spawn = started
        return _Place(
            role=AgentRole.SUB_AGENT,
            source="spawn",
            conversation=labelled_conversation(spawn[1], AgentRole.SUB_AGENT),
            agent_id=spawn[1],  # nothing else names it, and a call starts one agent
            parent_agent_id=by.agent_id,
            spawned_by=spawn,
        )
    return _of_label(label, AgentRole.MAIN, "first", main) if lineage.untouched else _stranger(kin)


def _labelled(kin: Kinship, lineage: Lineage, role: AgentRole) -> _Place:
    """The words alone of a summary request prove nothing: there must be a conversation to sum up, and the request must
    hold it, unless words that only the client can have written say so."""
    label = kin.label
    conversation = labelled_conversation(label.agent_id, role)
    if not label.summary or label.source != "shape":
        return _of_label(label, role, label.source, conversation)
    if conversation in lineage.newest and (label.evident or kin.path):
        return _of_label(label, role, "shape", conversation)
    return _stranger(kin) if label.evident else _of_label(label, base_role(role), "client", conversation)


def _of_label(label: AgentLabel, role: AgentRole, source: str, conversation: str) -> _Place:
    return _Place(
        role=role,
        source=source,
        conversation=conversation,
        agent_id=label.agent_id,
        parent_agent_id=label.parent_agent_id,
    )


def _like(state: CallState, role: AgentRole, source: str) -> _Place:
    """The place of a call that belongs to the conversation of an earlier one."""
    return _Place(
        role=role,
        source=source,
        conversation=state.conversation,
        agent_id=state.agent_id,
        parent_agent_id=state.parent_agent_id,
    )


def _stranger(kin: Kinship) -> _Place:
    """A conversation that nobody labelled and that extends nothing: never trained."""
    return _of_label(kin.label, AgentRole.UNKNOWN, "none", new_conversation(kin.prompt_node))


def _extension(kin: Kinship, lineage: Lineage, conversation: str) -> Extension:
    if kin.retried:
        same = any(use.conversation == conversation for use in lineage.uses(kin.prompt_node))
        return Extension.RETRY if same else Extension.FORK
    turn, last = kin.turn, kin.walk.last
    if kin.from_turn and turn is not None and last is not None:
        own = lineage.call_of(turn).conversation == conversation and not lineage.followed(turn, conversation)
        if not (kin.only_adds and own):
            return Extension.FORK
        as_sent = echoed_as_sent(turn.reply, kin.messages[last])
        return Extension.BRIDGE if as_sent else Extension.REPAIR
    return Extension.FORK if kin.path else Extension.ROOT


def _reason(kin: Kinship, extension: Extension, role: AgentRole, newest: CallState | None) -> BranchReason | None:
    if extension is Extension.RETRY:
        return BranchReason.RETRY
    if extension in (Extension.BRIDGE, Extension.REPAIR):
        return None
    if newest is None:
        if base_role(role) is AgentRole.SUB_AGENT:
            return BranchReason.SUB_AGENT
        return BranchReason.CONTEXT_REWRITE if extension is Extension.FORK else None
    if kin.check is not None and kin.only_adds:
        return BranchReason.TEMPLATE
    goes_back = kin.from_turn and kin.only_adds
    if role in SUMMARIES or (newest.role in SUMMARIES and not goes_back):
        return BranchReason.COMPACTION
    return BranchReason.REWIND if goes_back else BranchReason.CONTEXT_REWRITE


def _continues_from(
    kin: Kinship,
    lineage: Lineage,
    extension: Extension,
    reason: BranchReason | None,
    place: _Place,
    newest: CallState | None,
) -> str | None:
    if extension is Extension.RETRY:
        uses = [use for use in lineage.uses(kin.prompt_node) if use.conversation == place.conversation]
        return uses[-1].continues_from
    held = kin.turn or kin.copied
    if place.role in SUMMARIES:
        if held is not None or newest is None:
            return held.call_id if held is not None else None
        return newest.continues_from if newest.role in SUMMARIES else newest.call_id
    if reason is BranchReason.COMPACTION and newest is not None and newest.role in SUMMARIES:
        return newest.call_id
    if held is not None:
        return held.call_id
    return place.after.call_id if place.after else None


def _echo_difference(kin: Kinship, lineage: Lineage) -> str | None:
    """What differs of the first turn that is named as ours and is another one now."""
    for message, turn, copied in zip(kin.messages, kin.walk.turns, kin.copies, strict=True):
        sent = lineage.named(message) if turn is None and copied is None else None
        if sent is not None and (told := difference(sent.reply, message, kin.label.client)) is not None:
            return told
    return None


def _difference(kin: Kinship, newest: CallState) -> tuple[int, int, int]:
    """First message and first token that differ from the newest call's path, and how many of its tokens are lost."""
    newest_path = kin.path_of(newest.end)
    old, ids = newest_path.nodes, newest_path.token_ids
    shared = 0
    while shared < min(len(old), len(kin.path)) and old[shared] is kin.path[shared]:
        shared += 1
    kept = old[:shared]
    width = min(len(ids), len(kin.prompt_ids))
    differs = np.flatnonzero(ids[:width] != kin.prompt_ids[:width])
    token = int(differs[0]) if len(differs) else width
    lost = len(ids) - (kept[-1].end_pos if kept else 0)
    return sum(node.num_messages for node in kept), token, lost
