"""Drives a history the way the server does, and keeps what was written."""

import hashlib
import itertools
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from gyre_data.schema import CallStatus, NodeKind
from gyre_data.types import Call, Ints, Node
from gyre_proxy.history import History, PromptPlan
from gyre_proxy.locality import Locality
from gyre_proxy.message import Message, Reasoning, Reply, Request, Text, ToolCall
from gyre_proxy.roles import AgentLabel
from gyre_proxy.template import Template


def request(messages, tools=(), **changes) -> Request:
    return replace(Request(wire="openai_chat", model="toy", messages=tuple(messages), tools=tuple(tools)), **changes)


def said(text: str = "", *calls: ToolCall, reasoning: str | None = None, finish: str = "stop") -> Reply:
    thought = (Reasoning(text=reasoning),) if reasoning else ()
    words = (Text(text=text),) if text else ()
    return Reply(events=(*thought, *words, *calls), finish=finish)


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, *calls: ToolCall, reasoning: str | None = None, hint: str | None = None) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls, reasoning=reasoning, node_hint=hint)


def result(text: str, call_id: str = "call_0") -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


@dataclass
class Driver:
    template: Template
    thinking: str = "keep"
    locality: Locality | None = None
    label: AgentLabel = field(default_factory=AgentLabel)
    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    plans: list[PromptPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = self.fresh()
        self._number = itertools.count()

    def fresh(self) -> History:
        return History(self.template, execution_id="e_1", thinking=self.thinking, locality=self.locality)

    def restored(self) -> History:
        history = self.fresh()
        history.restore(self.nodes, self.calls, self.blobs.__getitem__)
        return history

    def plan(self, messages, label: AgentLabel | None = None, **kwargs) -> PromptPlan:
        return self.history.plan(request(messages, **kwargs), label or self.label)

    def call(self, messages, output, reply: Reply, label: AgentLabel | None = None, **kwargs) -> PromptPlan:
        plan = self.plan(messages, label, **kwargs)
        self.history.reserve(plan)
        self.commit(plan, output, reply)
        return plan

    def commit(self, plan: PromptPlan, output, reply: Reply) -> str:
        number = next(self._number)
        call_id = f"c_{number}"
        output_node = "n_" + hashlib.sha256(str(number).encode()).hexdigest()[:20]
        ids = np.array(output, dtype=np.int32)
        written = self.history.commit(
            plan,
            call_id=call_id,
            output_node_id=output_node,
            output_ids=ids,
            logprobs=np.full(len(ids), -0.5, dtype=np.float32),
            versions=(),
            reply=reply,
        )
        self.nodes += written.nodes
        self.blobs |= written.blobs
        self.plans.append(plan)
        self.calls.append(
            Call(
                call_id=call_id,
                execution_id="e_1",
                agent_role=plan.agent_role,
                role_source=plan.role_source,
                agent_id=plan.agent_id,
                parent_agent_id=plan.parent_agent_id,
                spawned_by_node=plan.spawned_by_node,
                spawned_by_tool_call=plan.spawned_by_tool_call,
                continues_from=plan.continues_from,
                wire=plan.wire,
                prompt_node=plan.node_ids[-1],
                output_node=output_node if len(ids) else None,
                extension=plan.extension,
                branch_reason=plan.branch_reason,
                tools_digest=plan.tools_digest,
                status=CallStatus.OK,
                attempts=(),
                started_at=datetime(2026, 1, 1, tzinfo=UTC),
            )
        )
        return call_id

    @property
    def output_node(self) -> str:
        """Node that the newest call sampled."""
        node = self.calls[-1].output_node
        assert node is not None
        return node

    def rows(self) -> dict[str, Node]:
        return {node.node_id: node for node in self.nodes}

    def path_ids(self, leaf: str) -> Ints:
        """Ids along the recorded path, from rows alone."""
        rows, parts, at = self.rows(), [], leaf
        while at is not None:
            parts.append(rows[at].token_ids)
            at = rows[at].parent_id
        return np.concatenate(parts[::-1])

    def check(self) -> None:
        """What must always hold of the record."""
        rows = self.rows()
        assert len(rows) == len(self.nodes), "no node is written twice"
        position_of = {node.node_id: position for position, node in enumerate(self.nodes)}
        for position, node in enumerate(self.nodes):
            if node.parent_id is None:
                assert (node.start_pos, node.root_id) == (0, node.node_id)
            else:
                parent = rows[node.parent_id]
                assert position_of[node.parent_id] < position, "parents come first"
                assert node.start_pos == parent.start_pos + len(parent.token_ids)
                assert node.root_id == parent.root_id
            assert len(node.token_ids)
            assert (node.kind is NodeKind.OUTPUT) == (node.author == "policy") == (node.logprobs is not None)
        for plan, call in zip(self.plans, self.calls, strict=True):
            assert np.array_equal(self.path_ids(call.prompt_node), plan.prompt_ids), "prompt ids are the path's ids"
            if call.output_node is not None:
                assert rows[call.output_node].parent_id == call.prompt_node
