"""The calls of one execution: conversations, copies of sampled turns, and which tool call started which agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre_data.schema import AgentRole
from gyre_data.types import Call

from .forest import Entry
from .matching import Turn, Walk
from .message import Message, ToolCall
from .plan import PromptPlan
from .roles import SUMMARIES, base_role
from .same_turn import canonical_hash, same_turn

__all__ = ["CallState", "Lineage", "PromptUse", "Spawn", "labelled_conversation", "new_conversation"]

_LEAST_CONTAINED = 16  # a shorter argument inside a longer message proves nothing

Spawn = tuple[str | None, str | None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CallState:
    """A committed call."""

    call_id: str
    conversation: str
    role: AgentRole
    agent_id: str | None
    parent_agent_id: str | None
    wire: str | None
    continues_from: str | None
    prompt: Entry
    output: Turn | None

    @property
    def end(self) -> Entry:
        """Last node of its path."""
        return self.output.entry if self.output else self.prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptUse:
    """A call, committed or under way, that has a prompt ending in a certain node."""

    conversation: str
    role: AgentRole
    continues_from: str | None


def labelled_conversation(agent_id: str | None, role: AgentRole) -> str:
    """Name of the conversation of a labelled agent; side calls never mix with the agent's own."""
    return f"agent:{agent_id or ''}:{base_role(role)}"


class Lineage:
    """What earlier calls say about a new one."""

    def __init__(self) -> None:
        self.newest: dict[str, CallState] = {}
        """By conversation."""
        self._calls: dict[str, CallState] = {}
        self._by_output: dict[str, CallState] = {}
        self._by_prompt: dict[str, CallState] = {}
        self._turns: dict[str, Turn] = {}
        self._same_text: dict[str, list[Turn]] = {}
        self._uses: dict[str, list[PromptUse]] = {}
        self._spawns: dict[str, Spawn] = {}
        self._active: dict[int, PromptPlan] = {}
        self._followed: set[tuple[str | None, str]] = set()
        self._started = False

    @property
    def untouched(self) -> bool:
        """Whether nothing was sampled yet and no call is under way. Calls beside the task do not count."""
        going = any(plan.agent_role is not AgentRole.SIDE for plan in self._active.values())
        return not (self._started or going)

    def followed(self, turn: Turn, conversation: str) -> bool:
        """Whether the conversation went on from that turn before."""
        return (turn.call_id, conversation) in self._followed

    def summary_in(self, messages: Sequence[Message]) -> CallState | None:
        """The summary call that ended a conversation and whose words are in one of the messages."""
        texts = [message.content for message in messages if message.role == "user"]
        for state in reversed(self.newest.values()):
            if state.role in SUMMARIES and state.output is not None:
                words = state.output.reply.content.strip()
                if len(words) >= _LEAST_CONTAINED and any(words in text for text in texts):
                    return state
        return None

    def call_of(self, turn: Turn) -> CallState:
        """The call that sampled `turn`."""
        return self._by_output[turn.entry.node_id]

    def call_with(self, prompt: Entry) -> CallState | None:
        """The newest committed call whose prompt ends in that node."""
        return self._by_prompt.get(prompt.node_id)

    def uses(self, prompt_node: str) -> Sequence[PromptUse]:
        """Calls whose prompt ends in that node, oldest first."""
        return self._uses.get(prompt_node, ())

    def named(self, message: Message) -> Turn | None:
        """The turn whose id the client echoed with this message, wherever it stands."""
        return self._turns.get(message.node_hint or "")

    def copies(self, messages: Sequence[Message], walk: Walk, client: str | None) -> list[Turn | None]:
        """For each assistant message that is no sampled turn in its place: the turn that it repeats, if any."""
        return [
            self._copied(message, client) if turn is None and message.role == "assistant" else None
            for message, turn in zip(messages, walk.turns, strict=True)
        ]

    def _copied(self, message: Message, client: str | None) -> Turn | None:
        named = self.named(message)
        if named is not None and same_turn(named.reply, message, client):
            return named
        if not message.content.strip() and not message.tool_calls:
            return None
        same = self._same_text.get(_without_reasoning(message), ())
        return next((turn for turn in reversed(same) if same_turn(turn.reply, message, client)), None)

    def sampled(self, turn: Turn) -> None:
        """A new output."""
        self._turns[turn.entry.node_id] = turn
        self._same_text.setdefault(_without_reasoning(turn.reply), []).append(turn)

    # ------------------------------------------------------------------ the life of a call

    def reserve(self, plan: PromptPlan) -> None:
        """A call is under way."""
        self._active[id(plan)] = plan
        self._uses.setdefault(plan.node_ids[-1], []).append(_use(plan))
        self._followed.add((plan.continues_from, plan.conversation))

    def commit(self, plan: PromptPlan, call_id: str, prompt: Entry, output: Turn | None) -> None:
        """A call is done."""
        del self._active[id(plan)]
        self._add(
            CallState(
                call_id=call_id,
                conversation=plan.conversation,
                role=plan.agent_role,
                agent_id=plan.agent_id,
                parent_agent_id=plan.parent_agent_id,
                wire=plan.wire,
                continues_from=plan.continues_from,
                prompt=prompt,
                output=output,
            ),
            (plan.spawned_by_node, plan.spawned_by_tool_call),
        )

    def restore(self, call: Call, prompt: Entry, output: Turn | None) -> None:
        """A call that was recorded before this process."""
        conversation = self._conversation_of(call, prompt)
        role = call.agent_role
        use = PromptUse(conversation=conversation, role=base_role(role), continues_from=call.continues_from)
        self._uses.setdefault(prompt.node_id, []).append(use)
        state = CallState(
            call_id=call.call_id,
            conversation=conversation,
            role=role,
            agent_id=call.agent_id,
            parent_agent_id=call.parent_agent_id,
            wire=call.wire,
            continues_from=call.continues_from,
            prompt=prompt,
            output=output,
        )
        self._add(state, (call.spawned_by_node, call.spawned_by_tool_call))

    def _conversation_of(self, call: Call, prompt: Entry) -> str:
        """What the plan had said: only unlabelled calls have a conversation that is not in their row."""
        if call.role_source == "none":
            return new_conversation(prompt.node_id)
        if call.role_source == "inherited" or (call.role_source == "shape" and call.agent_role in SUMMARIES):
            if (uses := self.uses(prompt.node_id)) and call.extension == "retry":
                return uses[-1].conversation
            if call.continues_from in self._calls:
                return self._calls[call.continues_from].conversation
        return labelled_conversation(call.agent_id, call.agent_role)

    def _add(self, state: CallState, spawn: Spawn) -> None:
        self.newest.pop(state.conversation, None)  # so that the newest of all comes last
        self._calls[state.call_id] = self.newest[state.conversation] = state
        self._followed.add((state.continues_from, state.conversation))
        self._by_prompt[state.prompt.node_id] = state
        if state.output is not None:
            self._started = self._started or state.role is not AgentRole.SIDE
            self._by_output[state.output.entry.node_id] = state
        if state.agent_id is not None and spawn[0] is not None:
            self._spawns.setdefault(state.agent_id, spawn)

    # ------------------------------------------------------------------ who started an agent

    def spawned_by(self, agent_id: str | None, parent_id: str | None, messages: Sequence[Message]) -> Spawn:
        """Output node and tool call that started an agent: a user message that it got holds an argument of that call.

        Newest first; a call that started another agent comes last, since one call may start several.
        """
        if agent_id is not None and agent_id in self._spawns:
            return self._spawns[agent_id]
        prompts = [text for message in messages if message.role == "user" and (text := message.content.strip())]
        taken = {spawn for agent, spawn in self._spawns.items() if agent != agent_id}
        taken |= {
            (plan.spawned_by_node, plan.spawned_by_tool_call)
            for plan in self._active.values()
            if plan.agent_id != agent_id
        }
        found = list(self._spawning(parent_id, prompts)) if prompts else []
        return next((spawn for spawn in found if spawn not in taken), found[0] if found else (None, None))

    def started_by(self, tool: str, messages: Sequence[Message]) -> tuple[CallState, Spawn] | None:
        """The call of `tool`, none of whose agents is known yet, whose `prompt` is one of the user messages."""
        prompts = {message.content.strip() for message in messages if message.role == "user"} - {""}
        taken = {*self._spawns.values()} | {(p.spawned_by_node, p.spawned_by_tool_call) for p in self._active.values()}
        for state in reversed(self._calls.values()):
            for spawn, call in _tool_calls(state):
                prompt = call.arguments.get("prompt") if isinstance(call.arguments, Mapping) else None
                if call.name == tool and str(prompt).strip() in prompts and spawn not in taken:
                    return state, spawn
        return None

    def _spawning(self, parent_id: str | None, prompts: Sequence[str]) -> Iterator[Spawn]:
        for state in reversed(self._calls.values()):
            if state.agent_id != parent_id:
                continue
            for spawn, call in _tool_calls(state):
                texts = [text.strip() for text in _texts_in(call.arguments)]
                if any(_holds(prompt, text) for prompt in prompts for text in texts):
                    yield spawn


def _tool_calls(state: CallState) -> Iterator[tuple[Spawn, ToolCall]]:
    """The tool calls that a call sampled, each with its node and the id that its client got."""
    if state.output is None:
        return
    node_id, prefix = state.output.entry.node_id, "toolu" if state.wire == "anthropic" else "call"
    for index, call in enumerate(state.output.reply.tool_calls):
        yield (node_id, call.id or f"{prefix}_{node_id}_{index}"), call


def _without_reasoning(message: Message) -> str:
    """Hash of what a copy must have in common with its turn: clients leave reasoning out of what they repeat."""
    return canonical_hash(replace(message, reasoning=None))


def new_conversation(prompt_node: str) -> str:
    """Name of a conversation that nobody labelled and that extends nothing."""
    return f"new:{prompt_node}"


def _use(plan: PromptPlan) -> PromptUse:
    return PromptUse(
        conversation=plan.conversation, role=base_role(plan.agent_role), continues_from=plan.continues_from
    )


def _holds(prompt: str, text: str) -> bool:
    """Whether a user message is `text`, alone or after a reminder block, or has it in its midst."""
    if not text:
        return False
    return prompt == text or prompt.endswith("\n" + text) or (len(text) >= _LEAST_CONTAINED and text in prompt)


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [text for item in items for text in _texts_in(item)]
