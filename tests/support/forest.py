"""Small recorded runs, built by hand: executions, calls with roles, outputs with log-probs, scores, deliveries.

    run = Forest()
    e = run.execution(group="g1", score=1.0)
    a = e.call(new=[("system", 5), ("user", 3)], output=4)      # a root
    b = e.call(after=a, new=[("tool", 6)], output=2)            # extends a's output
    c = e.retry(b)                                              # same prompt, a sibling output
    run.table("nodes")                                          # what gyre_data reads; run.write(path) puts it on disk

Ids and tokens depend on nothing but the order of the calls made here. Every call adds a generation prompt of two
tokens before its output, as real templates do. Times are one second apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from gyre_data.arrays import to_batches
from gyre_data.schema import (
    AgentRole,
    Author,
    BranchReason,
    CallStatus,
    DeliveryState,
    EndReason,
    Extension,
    NodeKind,
    ScoreStatus,
    arrow_schema,
)
from gyre_data.types import ROW_TYPES, Attempt, Blob, Call, Delivery, ExecutionEvent, Node, Score, VersionSpan

__all__ = ["ExecutionBuilder", "Forest", "Made", "forests", "to_table"]

START = datetime(2026, 11, 29, 8, 0, tzinfo=UTC)
GENERATION_PROMPT = (151644, 77091)


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A call that was added: its row, and the ids of the nodes to go on from."""

    call: Call

    @property
    def id(self) -> str:
        return self.call.call_id

    @property
    def prompt(self) -> str:
        assert self.call.prompt_node is not None
        return self.call.prompt_node

    @property
    def output(self) -> str:
        assert self.call.output_node is not None
        return self.call.output_node


@dataclass
class Forest:
    """A run in memory with `table(name)`, as the readers of gyre_data want it."""

    rows: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in ROW_TYPES})
    path: Path = Path("runs/forest")
    _tables: dict[str, tuple[list[Any], pa.Table]] = field(default_factory=dict, repr=False, compare=False)
    _count: int = 0
    _seconds: float = 0.0

    def add(self, name: str, row: Any) -> None:
        self.rows[name].append(row)

    def next_id(self, prefix: str, width: int = 20) -> str:
        self._count += 1
        # Spread, so that prefixes differ: a fixed odd multiplier is a permutation of the hexadecimal numbers.
        return f"{prefix}_{(self._count * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 16**width:0{width}x}"

    def now(self, seconds: float = 1.0) -> datetime:
        self._seconds += seconds
        return START + timedelta(seconds=self._seconds)

    def table(self, name: str) -> pa.Table:
        rows = self.rows[name]
        if name not in self._tables or self._tables[name][0] != rows:
            self._tables[name] = (list(rows), to_table(name, rows))
        return self._tables[name][1]

    def shuffled(self, seed: int) -> Forest:
        """The same run with the rows of every table in another order."""
        rng = np.random.default_rng(seed)
        rows = {name: [rows[i] for i in rng.permutation(len(rows))] for name, rows in self.rows.items()}
        return Forest(rows=rows, path=self.path)

    def write(self, path: Path) -> Any:
        """Put the run on disk with the real writer; return it opened."""
        from gyre_data import store

        writer = store.RunWriter(path)
        for name in self.rows:
            writer.append(self.rows[name])
        writer.commit()
        writer.close()
        return store.open(path)

    def execution(
        self,
        execution_id: str | None = None,
        *,
        group: str | None = None,
        task: str | None = None,
        end: EndReason | str | None = EndReason.FINISHED,
        score: float | None = None,
        **event: Any,
    ) -> ExecutionBuilder:
        """Start an execution; `end=None` leaves it running, `score` adds a verdict of `check@1`."""
        execution_id = execution_id or self.next_id("e", 12)
        self.add(
            "executions",
            ExecutionEvent(
                execution_id=execution_id,
                event="started",
                at=self.now(),
                group_id=group,
                task_id=task or group,
                **event,
            ),
        )
        builder = ExecutionBuilder(run=self, execution_id=execution_id)
        if end is not None:
            builder.end(end)
        if score is not None:
            builder.score(score)
        return builder


@dataclass
class ExecutionBuilder:
    """Adds calls to one execution of a `Forest`."""

    run: Forest
    execution_id: str
    nodes: dict[str, Node] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)

    def end(self, reason: EndReason | str) -> None:
        at = self.run.now()
        self.run.add(
            "executions",
            ExecutionEvent(execution_id=self.execution_id, event="ended", at=at, end_reason=EndReason(reason)),
        )

    def score(self, value: float | None, *, evaluator: str = "check", status: str = "scored", **more: Any) -> Score:
        row = Score(
            score_id=self.run.next_id("s"),
            execution_id=self.execution_id,
            evaluator=evaluator,
            evaluator_version=more.pop("version", "1"),
            status=ScoreStatus(status),
            value=value,
            at=self.run.now(),
            **more,
        )
        self.run.add("scores", row)
        return row

    def deliver(self, made: Made, state: str) -> None:
        row = Delivery(
            call_id=made.id, execution_id=self.execution_id, state=DeliveryState(state), at=self.run.now(0.1)
        )
        self.run.add("deliveries", row)

    def call(
        self,
        *,
        after: Made | str | None = None,
        new: Sequence[tuple[str, int] | tuple[str, int, dict[str, Any]]] = (("user", 3),),
        output: int | None = 4,
        role: AgentRole | str = AgentRole.MAIN,
        delivery: str | None = "delivered",
        logprobs: bool = True,
        version: tuple[str, int] | None = ("base", 0),
        prompt_node: str | None = None,
        seconds: float = 1.0,
        **more: Any,
    ) -> Made:
        """Add a call after a call's output or any node, with new messages of so many tokens.

        `output=None` samples nothing; `prompt_node` reuses a whole prompt (a retry); `more` sets columns of the row.
        """
        call_id = self.run.next_id("c")
        started = self.run.now(seconds)
        at = after.output if isinstance(after, Made) else after
        if prompt_node is None:
            for message_role, num_tokens, *rest in new:
                at = self.node(at, call_id, num_tokens, message_role=message_role, **(rest[0] if rest else {})).node_id
            ids = np.array(GENERATION_PROMPT, np.int32)
            at = self.node(at, call_id, 2, kind=NodeKind.GENERATION_PROMPT, author=Author.TEMPLATE, ids=ids).node_id
        else:
            at = prompt_node
        out = None
        if output is not None:
            span = None if version is None else (VersionSpan(policy_id=version[0], n=version[1], start=0, end=output),)
            out = self.node(
                at, call_id, output, kind=NodeKind.OUTPUT, author=Author.POLICY, message_role="assistant",
                logprobs=logprobs, policy_versions=span,
            )  # fmt: skip
        row = Call(
            **{
                "call_id": call_id,
                "execution_id": self.execution_id,
                "agent_role": AgentRole(role),
                "role_source": "client",
                "wire": "anthropic",
                "prompt_node": at,
                "output_node": out and out.node_id,
                "extension": Extension.ROOT if after is None else Extension.BRIDGE,
                "prompt_tokens": self.nodes[at].start_pos + len(self.nodes[at].token_ids),
                "output_tokens": output,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "constrained": False,
                "finish_reason": "stop",
                "status": CallStatus.OK,
                "attempts": (Attempt(engine="engine-0", start=0, end=output or 0),),
                "started_at": started,
                "ended_at": started + timedelta(seconds=0.5),
            }
            | more
        )
        self.calls[call_id] = row
        self.run.add("calls", row)
        made = Made(call=row)
        if delivery is not None:
            self.deliver(made, delivery)
        return made

    def retry(self, first: Made, *, output: int | None = 4, **more: Any) -> Made:
        """The same request again: same prompt nodes, a sibling output."""
        more = {"extension": Extension.RETRY, "branch_reason": BranchReason.RETRY, "role": first.call.agent_role} | more
        return self.call(prompt_node=first.prompt, output=output, **more)

    def say(self, node_id: str, *messages: dict[str, Any]) -> None:
        """Give a node its text: the canonical messages that it renders."""
        blobs = [json.dumps(message).encode() for message in messages]
        names = tuple(hashlib.sha256(data).hexdigest() for data in blobs)
        known = {row.blob_id for row in self.run.rows["blobs"]}
        for name, data in zip(names, blobs, strict=True):
            if name not in known:
                self.run.add("blobs", Blob(blob_id=name, num_bytes=len(data), codec="none", data=data))
        row = replace(self.nodes[node_id], message_blobs=names)
        self.run.rows["nodes"][:] = [row if old.node_id == node_id else old for old in self.run.rows["nodes"]]
        self.nodes[node_id] = row

    def node(
        self,
        parent: str | None,
        call_id: str,
        num_tokens: int,
        *,
        kind: NodeKind = NodeKind.PROMPT,
        author: Author = Author.CLIENT,
        ids: np.ndarray | None = None,
        logprobs: bool = False,
        **more: Any,
    ) -> Node:
        node_id = self.run.next_id("n")
        rng = np.random.default_rng(self.run._count)
        above = self.nodes[parent] if parent is not None else None
        row = Node(
            node_id=node_id,
            execution_id=self.execution_id,
            root_id=above.root_id if above else node_id,
            parent_id=parent,
            call_id=call_id,
            start_pos=above.start_pos + len(above.token_ids) if above else 0,
            kind=kind,
            author=author,
            token_ids=rng.integers(0, 1000, num_tokens, dtype=np.int32) if ids is None else ids,
            logprobs=-rng.exponential(1.0, num_tokens).astype(np.float32) if logprobs else None,
            **more,
        )
        self.nodes[node_id] = row
        self.run.add("nodes", row)
        return row


def to_table(name: str, rows: Sequence[Any]) -> pa.Table:
    """Rows as an Arrow table of the declared schema, in two chunks where there are rows enough for two."""
    half = len(rows) // 2
    batches = to_batches(name, rows[:half]) + to_batches(name, rows[half:])
    return pa.Table.from_batches(batches, arrow_schema(name))


@st.composite
def forests(draw: st.DrawFn, *, max_executions: int = 4, max_calls: int = 10) -> Forest:
    """A random run: several executions in one or two groups, random trees, roles, deliveries, ends and scores."""
    run = Forest()
    roles = st.sampled_from(list(AgentRole)[:6])
    deliveries = st.sampled_from(["delivered", "delivered", "delivered", "undelivered", "abandoned", None])
    for _ in range(draw(st.integers(1, max_executions))):
        end = draw(
            st.sampled_from(
                [EndReason.FINISHED, EndReason.FINISHED, EndReason.HARNESS_TIMEOUT, EndReason.INFRA_FAULT, None]
            )
        )
        score = draw(st.sampled_from([None, 0.0, 0.5, 1.0, 1.0]))
        e = run.execution(group=draw(st.sampled_from(["g1", "g1", "g2"])), end=end, score=score)
        made: list[Made] = []
        for _ in range(draw(st.integers(0, max_calls))):
            _random_call(draw, e, made, draw(roles), draw(deliveries))
    return run


def _random_call(draw: st.DrawFn, e: ExecutionBuilder, made: list[Made], role: AgentRole, delivery: str | None) -> None:
    more: dict[str, Any] = draw(
        st.sampled_from(
            [{}] * 5 + [{"temperature": 0.0}, {"top_p": 0.9}, {"status": CallStatus.ABORTED}, {"logprobs": False}]
        )
    )
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    new = [("user", n) for n in sizes]
    with_output = [m for m in made if m.call.output_node is not None]
    action = draw(st.sampled_from(["extend", "extend", "extend", "retry", "fork", "root", "failed"]))
    output = draw(st.integers(1, 5))
    if action == "retry" and made:
        made.append(e.retry(draw(st.sampled_from(made)), output=output, delivery=delivery, **more))
    elif action == "failed":
        after = draw(st.sampled_from(with_output)) if with_output else None
        made.append(e.call(after=after, new=new, output=None, role=role, delivery=None, status=CallStatus.FAILED))
    elif action == "fork" and made:
        node = draw(st.sampled_from(list(e.nodes)))
        fork = {"extension": Extension.FORK, "branch_reason": BranchReason.CONTEXT_REWRITE}
        made.append(e.call(after=node, new=new, output=output, role=role, delivery=delivery, **(fork | more)))
    elif action == "extend" and with_output:
        newest = with_output[-1]
        made.append(
            e.call(after=newest, new=new, output=output, role=newest.call.agent_role, delivery=delivery, **more)
        )
    else:
        made.append(e.call(new=new, output=output, role=role, delivery=delivery, **more))


def replace_call(run: Forest, made: Made, **columns: Any) -> None:
    """Change columns of a call's row."""
    rows = run.rows["calls"]
    for number, row in enumerate(rows):
        if row.call_id == made.id:
            rows[number] = replace(row, **columns)
