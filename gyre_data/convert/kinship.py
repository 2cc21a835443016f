"""What a call is among the calls of its session: role, how it extends, why it branches. The recorder's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gyre_data.links import SUMMARIES
from gyre_data.schema import AgentRole, BranchReason, Extension, NodeKind

from .calls import SourceCall

if TYPE_CHECKING:
    from .builder import Entry

__all__ = ["CallState", "Kin", "Lineage", "Told"]

_BASE = {AgentRole.MAIN_SUMMARY: AgentRole.MAIN, AgentRole.SUB_AGENT_SUMMARY: AgentRole.SUB_AGENT}


@dataclass(kw_only=True, slots=True, eq=False)
class CallState:
    """A call that was taken in. `conversation` names the calls of one agent that belong together."""

    call_id: str
    prompt: Entry | None
    output: Entry | None
    role: AgentRole | None = None
    agent_id: str | None = None
    parent_agent_id: str | None = None
    conversation: str = ""
    continues_from: str | None = None

    @property
    def end(self) -> Entry | None:
        """Last node of its path."""
        return self.output or self.prompt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kin:
    """A call laid onto the tree."""

    call: SourceCall
    state: CallState
    by_key: Mapping[str, CallState]
    same: Callable[[str, str], Entry | None]
    """The newest reply that says what an assistant message says."""

    def up(self) -> Iterator[Entry]:
        """The nodes of the prompt, last first. Only what is asked for is walked: a session has thousands."""
        at = self.state.prompt
        while at is not None:
            yield at
            at = at.parent

    @property
    def turn(self) -> Entry | None:
        """The deepest reply that the prompt continues."""
        return next((entry for entry in self.up() if entry.kind is NodeKind.OUTPUT), None)

    @property
    def begun(self) -> bool:
        """Whether the first node of the prompt was held by a call before."""
        return self.state.prompt is not None and self.state.prompt.root.call_id is not None

    @property
    def only_adds(self) -> bool:
        """Whether no assistant message comes after that reply."""
        for entry in self.up():
            if entry.kind is NodeKind.OUTPUT:
                return True
            if entry.role == "assistant":
                return False
        return False

    @property
    def held(self) -> CallState | None:
        """The call whose reply the prompt continues, or else repeats."""
        turn = self.turn
        if turn is None:
            copy = next((entry for entry in self.up() if entry.copy_of is not None), None)
            turn = self.same(copy.loose, copy.reasoning) if copy is not None else None
        return turn.by if turn is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """The answers."""

    role: AgentRole
    role_source: str
    agent_id: str | None
    parent_agent_id: str | None
    conversation: str
    extension: Extension
    reason: BranchReason | None
    continues_from: str | None
    first_difference_message: int | None = None
    first_difference_token: int | None = None
    tokens_lost: int | None = None


@dataclass(kw_only=True, slots=True)
class _Place:
    role: AgentRole
    source: str
    conversation: str
    agent_id: str | None
    parent_agent_id: str | None


@dataclass(kw_only=True, slots=True)
class Lineage:
    """What earlier calls of the session say about a new one."""

    newest: dict[str, CallState] = field(default_factory=dict)
    """By conversation."""
    _uses: dict[str, list[CallState]] = field(default_factory=dict)
    _followed: set[tuple[str | None, str]] = field(default_factory=set)
    _started: bool = False

    def describe(self, kin: Kin) -> Told:
        """Everything a call's row says about its place."""
        place = self._place(kin)
        newest = self.newest.get(place.conversation)
        extension = self._extension(kin, place.conversation)
        reason = kin.call.reason or _reason(kin, extension, place.role, newest)
        told = Told(
            role=place.role,
            role_source=place.source,
            agent_id=place.agent_id,
            parent_agent_id=place.parent_agent_id,
            conversation=place.conversation,
            extension=extension,
            reason=reason,
            continues_from=self._continues_from(kin, extension, reason, place, newest),
        )
        if newest is None or extension is Extension.BRIDGE:
            return told
        message, token, lost = _difference(kin, newest)
        return Told(
            **{name: getattr(told, name) for name in Told.__slots__ if name not in _DIFFERENCE},
            first_difference_message=message,
            first_difference_token=token,
            tokens_lost=lost,
        )

    def commit(self, state: CallState, told: Told) -> None:
        """The call is in the tree."""
        state.role, state.conversation, state.continues_from = told.role, told.conversation, told.continues_from
        state.agent_id, state.parent_agent_id = told.agent_id, told.parent_agent_id
        self.newest[state.conversation] = state
        self._followed.add((state.continues_from, state.conversation))
        if state.prompt is not None:
            self._uses.setdefault(state.prompt.node_id, []).append(state)
        self._started = self._started or (state.output is not None and state.role is not AgentRole.SIDE)

    def _place(self, kin: Kin) -> _Place:
        """Whose call it is: as the source says, or what it repeats and what came before."""
        call = kin.call
        if call.role is not None:
            return _Place(
                role=call.role,
                source=call.role_source,
                conversation=_conversation(call.agent_id, call.role),
                agent_id=call.agent_id,
                parent_agent_id=call.parent_agent_id,
            )
        uses = self._same_prompt(kin)
        held = uses[-1] if uses else kin.held
        if held is not None:
            role = _base(held.role or AgentRole.UNKNOWN)
            return _Place(
                role=role,
                source="inherited",
                conversation=held.conversation,
                agent_id=held.agent_id,
                parent_agent_id=held.parent_agent_id,
            )
        first = not self._started
        role = AgentRole.MAIN if first else AgentRole.UNKNOWN
        prompt = kin.state.prompt
        own = _conversation(call.agent_id, role) if first else f"new:{prompt.node_id if prompt else ''}"
        return _Place(
            role=role,
            source="first" if first else "none",
            conversation=own,
            agent_id=call.agent_id,
            parent_agent_id=None,
        )

    def _same_prompt(self, kin: Kin) -> Sequence[CallState]:
        return self._uses.get(kin.state.prompt.node_id, ()) if kin.state.prompt is not None else ()

    def _extension(self, kin: Kin, conversation: str) -> Extension:
        if uses := self._same_prompt(kin):
            return Extension.RETRY if any(use.conversation == conversation for use in uses) else Extension.FORK
        if kin.turn is not None:
            by = kin.turn.by
            own = by is not None and by.conversation == conversation
            followed = by is not None and (by.call_id, conversation) in self._followed
            return Extension.BRIDGE if kin.only_adds and own and not followed else Extension.FORK
        return Extension.FORK if kin.begun else Extension.ROOT

    def _continues_from(
        self, kin: Kin, extension: Extension, reason: BranchReason | None, place: _Place, newest: CallState | None
    ) -> str | None:
        if kin.call.continues is not None and (named := kin.by_key.get(kin.call.continues)) is not None:
            return named.call_id
        if extension is Extension.RETRY:
            uses = [use for use in self._same_prompt(kin) if use.conversation == place.conversation]
            return uses[-1].continues_from
        held = kin.held
        if place.role in SUMMARIES:
            if held is not None or newest is None:
                return held.call_id if held is not None else None
            return newest.continues_from if newest.role in SUMMARIES else newest.call_id
        if reason is BranchReason.COMPACTION and newest is not None and (newest.role in SUMMARIES or held is None):
            return newest.call_id
        return held.call_id if held is not None else None


_DIFFERENCE = ("first_difference_message", "first_difference_token", "tokens_lost")


def _base(role: AgentRole) -> AgentRole:
    return _BASE.get(role, role)


def _conversation(agent_id: str | None, role: AgentRole) -> str:
    return f"agent:{agent_id or ''}:{_base(role)}"


def _reason(kin: Kin, extension: Extension, role: AgentRole, newest: CallState | None) -> BranchReason | None:
    if extension is Extension.RETRY:
        return BranchReason.RETRY
    if extension is Extension.BRIDGE:
        return None
    if newest is None:
        if _base(role) is AgentRole.SUB_AGENT:
            return BranchReason.SUB_AGENT
        return BranchReason.CONTEXT_REWRITE if extension is Extension.FORK else None
    goes_back = kin.turn is not None and kin.only_adds
    if role in SUMMARIES or (newest.role in SUMMARIES and not goes_back):
        return BranchReason.COMPACTION
    return BranchReason.REWIND if goes_back else BranchReason.CONTEXT_REWRITE


def _difference(kin: Kin, newest: CallState) -> tuple[int, int, int]:
    """First message and token that differ from the newest call's path, and how many of its tokens are lost."""
    path = list(kin.up())
    here = {id(entry) for entry in path}
    at = newest.end
    end = at.end_pos if at is not None else 0
    while at is not None and id(at) not in here:
        at = at.parent
    shared = at.end_pos if at is not None else 0
    messages = sum(len(entry.blobs) for entry in path if entry.end_pos <= shared)
    return messages, shared, end - shared
