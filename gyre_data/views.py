"""The tables that SQL sees: ready views over one or more runs, each made only when a query names it.

A view is either SQL over the stored tables, which DuckDB reads where they lie, or a small table made here from what the
library knows (which paths are kept, what is not trained and why). `raw.NAME` is a table as it is stored. Every view
has a column `run`, the folder it came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .admission import Admission, admit
from .arrays import from_table
from .eligible import Eligibility, candidates, eligibility
from .errors import ConfigError, DataError
from .execution import executions
from .listing import list_executions
from .ownership import AdmittedTrajectory, keep
from .path import stored_message
from .reader import Run
from .reasons import REASONS
from .schema import TABLES, Author, ScoreStatus
from .tree import Forest, Tables, Tree
from .types import Score

__all__ = ["VIEWS", "Sources", "View"]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One view: its meaning, and either how it is made or its SQL with the names that it reads."""

    doc: str
    make: Callable[[Sources], pa.Table] | None = None
    sql: str | None = None
    reads: tuple[str, ...] = ()


class Sources:
    """The runs behind a query, with what several views need worked out once."""

    def __init__(self, runs: Sequence[Tables], *, j_max: int | None, evaluators: Mapping[str, float] | None) -> None:
        self.runs, self.j_max, self.evaluators = runs, j_max, evaluators
        self.names = [str(getattr(run, "path", number)) for number, run in enumerate(runs)]
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"wanted each run once, got {', '.join(self.names)}; its rows would count twice")

    def stored(self, name: str) -> pa.Table:
        """A table as it is stored, of all runs, with the run's name; nothing is copied."""
        return self.joined([run.table(name) for run in self.runs])

    def joined(self, tables: Sequence[pa.Table]) -> pa.Table:
        """One table a run as one table with a column `run`."""
        names = pa.array(self.names)
        told = []
        for number, table in enumerate(tables):
            of_R = pa.DictionaryArray.from_arrays(pa.array(np.full(table.num_rows, number, np.int32)), names)
            told.append(table.append_column("run", of_R))
        return pa.concat_tables(told)

    @cached_property
    def admissions(self) -> list[Admission]:
        """The admission of every run."""
        return [admit(run, j_max=self.j_max, evaluators=self.evaluators) for run in self.runs]

    @cached_property
    def judged(self) -> list[list[_Judged]]:
        """Every execution that has a tree, by run; one whose rows contradict each other is in `excluded` only."""
        return [list(_judge(run, self.j_max)) for run in self.runs]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    tree: Tree
    eligible: Eligibility
    kept: tuple[AdmittedTrajectory, ...]
    why: dict[str, tuple[str, str]]
    """Leaf node -> reason and detail of a candidate that is not kept."""


def _judge(run: Tables, j_max: int | None) -> Iterable[_Judged]:
    forest = Forest(run)
    for execution_id in forest.execution_ids:
        try:
            tree = forest.tree(execution_id)
            eligible = eligibility(tree)
        except DataError:
            continue
        kept, out = keep(tree, eligible, j_max=j_max)
        why = {x.node_id: (str(x.reason), x.detail) for x in out if x.node_id is not None}
        yield _Judged(tree=tree, eligible=eligible, kept=kept, why=why)


def _executions(sources: Sources) -> pa.Table:
    tables = []
    for run in sources.runs:
        listed = list_executions(cast(Run, run)).arrow()
        known = executions(run)
        infos = [known[name] for name in listed.column("execution_id").to_pylist()]
        for name in ("harness_version", "launcher", "dispatch_policy_id", "attributes"):
            listed = listed.append_column(name, pa.array([getattr(info, name) for info in infos], pa.string()))
        versions = pa.array([info.dispatch_version for info in infos], pa.int64())
        took = pc.divide(pc.microseconds_between(listed["started_at"], listed["ended_at"]).cast(pa.float64()), 1e6)
        tables.append(listed.append_column("dispatch_version", versions).append_column("duration_s", took))
    return sources.joined(tables)


def _nodes(sources: Sources) -> pa.Table:
    stored = sources.stored("nodes")
    ids = pc.list_value_length(stored.column("token_ids"))
    return stored.append_column("num_tokens", pc.coalesce(stored.column("counted_tokens"), ids))


def _scores(sources: Sources) -> pa.Table:
    tables = []
    for run in sources.runs:
        rows: list[Score] = from_table("scores", run.table("scores"))
        newest = {
            (row.execution_id, row.evaluator): n for n, row in enumerate(rows) if row.status == ScoreStatus.SCORED
        }
        counts = np.zeros(len(rows), np.bool_)
        counts[list(newest.values())] = True
        tables.append(run.table("scores").append_column("counts", pa.array(counts)))
    return sources.joined(tables)


_PATHS = pa.schema(
    [
        ("execution_id", pa.string()),
        ("path", pa.int64()),
        ("role", pa.string()),
        ("leaf_call", pa.string()),
        ("leaf_node", pa.string()),
        ("num_nodes", pa.int64()),
        ("num_tokens", pa.int64()),
        ("sampled_tokens", pa.int64()),
        ("trainable_tokens", pa.int64()),
        ("trajectory", pa.int64()),
        ("owned_tokens", pa.int64()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("node_ids", pa.list_(pa.string())),
    ]
)


def _paths(sources: Sources) -> pa.Table:
    return sources.joined(
        [
            pa.Table.from_pylist([row for one in judged for row in _paths_of(one)], schema=_PATHS)
            for judged in sources.judged
        ]
    )


def _paths_of(one: _Judged) -> Iterable[dict[str, Any]]:
    tree = one.tree
    tokens_N = tree.num_tokens_N
    sampled_N = (tree.author_N == Author.POLICY) | (tree.author_N == Author.PROVIDER)
    kept = {t.leaf: t for t in one.kept}
    for number, found in enumerate(candidates(tree, one.eligible)):
        own, leaf = kept.get(found.leaf), tree.node_id[found.leaf]
        reason, detail = one.why.get(leaf, (None, None))
        yield {
            "execution_id": tree.execution_id,
            "path": number,
            "role": str(found.role),
            "leaf_call": found.call.call_id,
            "leaf_node": leaf,
            "num_nodes": len(found.path),
            "num_tokens": int(tokens_N[found.path].sum()),
            "sampled_tokens": int((tokens_N * sampled_N)[found.path].sum()),
            "trainable_tokens": int((tokens_N * one.eligible.trainable_N)[found.path].sum()),
            "trajectory": None if own is None else own.index,
            "owned_tokens": 0 if own is None else own.num_owned,
            "reason": reason,
            "detail": detail,
            "node_ids": [tree.node_id[i] for i in found.path.tolist()],
        }


def _trainable_nodes(sources: Sources) -> pa.Table:
    tables = []
    for judged in sources.judged:
        names, roles, owners = list[str](), list[str](), list[int | None]()
        for one in judged:
            owner = {i: t.index for t in one.kept for i in t.owned}
            for i in np.flatnonzero(one.eligible.trainable_N).tolist():
                names.append(one.tree.node_id[i])
                roles.append(str(one.eligible.call_of[i].agent_role))
                owners.append(owner.get(i))
        columns = (pa.array(names, pa.string()), pa.array(roles, pa.string()), pa.array(owners, pa.int64()))
        tables.append(pa.table(columns, names=["node_id", "role", "trajectory"]))
    return sources.joined(tables)


def _admission(sources: Sources) -> pa.Table:
    tables = []
    for run, found in zip(sources.runs, sources.admissions, strict=True):
        groups = {group.group_id: group for group in found.groups}
        rows: dict[str, dict[str, Any]] = {}
        for e in found.executions:
            group = groups.get(e.group_id or "")
            rows[e.execution_id] = {
                "admitted": True,
                "reward": e.reward,
                "advantage": e.advantage,
                "owned_tokens": e.num_owned,
                "trajectories": len(e.trajectories),
                "partial": e.partial,
                "score_ids": list(e.score_ids),
                "group_mean": group and group.mean,
                "group_std": group and group.std,
            }
        for x in found.excluded:
            if x.call_id is None and x.node_id is None:
                rows[x.execution_id] = {"admitted": False, "reason": str(x.reason), "detail": x.detail}
        told = [
            {"execution_id": name, "task_id": info.task_id, "group_id": info.group_id, **rows[name]}
            for name, info in executions(run).items()
        ]
        tables.append(pa.Table.from_pylist(told, schema=_ADMISSION))
    return sources.joined(tables)


_ADMISSION = pa.schema(
    [
        ("execution_id", pa.string()),
        ("task_id", pa.string()),
        ("group_id", pa.string()),
        ("admitted", pa.bool_()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("group_mean", pa.float64()),
        ("group_std", pa.float64()),
        ("owned_tokens", pa.int64()),
        ("trajectories", pa.int64()),
        ("partial", pa.bool_()),
        ("score_ids", pa.list_(pa.string())),
    ]
)


def _excluded(sources: Sources) -> pa.Table:
    tables = []
    for found in sources.admissions:
        told = found.excluded.arrow()
        meanings = [REASONS[x.reason] for x in found.excluded]
        told = told.append_column("level", pa.array([m.level for m in meanings], pa.string()))
        tables.append(told.append_column("rule", pa.array([m.rule for m in meanings], pa.string())))
    return sources.joined(tables)


_ROWS = 4096
_Rows = Callable[[Mapping[str, Any], int], Iterable[dict[str, Any]]]


def _texts(sources: Sources, schema: pa.Schema, rows: _Rows) -> pa.Table:
    """Rows made of the stored messages, each with the node that renders it; a few thousand are Python's at a time."""
    return sources.joined([pa.Table.from_batches(_text_batches(run, schema, rows), schema) for run in sources.runs])


def _text_batches(run: Tables, schema: pa.Schema, rows: _Rows) -> Iterator[pa.RecordBatch]:
    if not hasattr(run, "blob"):
        return
    read = lru_cache(maxsize=256)(partial(stored_message, run.blob))  # system prompts, which come again and again
    nodes = run.table("nodes").select([*_OF_NODE, "message_blobs"])
    found: list[dict[str, Any]] = []
    for batch in nodes.to_batches(max_chunksize=_ROWS):
        for *values, names in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            of_node = dict(zip(_OF_NODE, values, strict=True))
            for number, name in enumerate(names or ()):
                message = read(name)
                value = message if isinstance(message, dict) else {}  # a text that is lost leaves its row
                found += ({**of_node, **row} for row in rows(value, number))
        if len(found) >= _ROWS:
            yield pa.RecordBatch.from_pylist(found, schema)
            found.clear()
    yield pa.RecordBatch.from_pylist(found, schema)


_OF_NODE = ("execution_id", "call_id", "node_id", "kind", "author")
_MESSAGES = pa.schema(
    [(name, pa.string()) for name in _OF_NODE]
    + [("number", pa.int64())]
    + [(name, pa.string()) for name in ("role", "content", "reasoning", "tool_calls", "tool_call_id")]
)
_TOOL_CALLS = pa.schema(
    [(name, pa.string()) for name in _OF_NODE]
    + [("number", pa.int64())]
    + [(name, pa.string()) for name in ("name", "arguments", "id")]
)


def _message(value: Mapping[str, Any], number: int) -> Iterable[dict[str, Any]]:
    told = {name: value.get(name) for name in ("role", "content", "reasoning", "tool_calls", "tool_call_id")}
    yield {"number": number, **{name: _plain(item) for name, item in told.items()}}


def _tool_call(value: Mapping[str, Any], _number: int) -> Iterable[dict[str, Any]]:
    for number, call in enumerate(value.get("tool_calls") or ()):
        yield {"number": number, **{name: _plain(call.get(name)) for name in ("name", "arguments", "id")}}


def _plain(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_COMMITTED = "call_id in (select call_id from raw.calls)"  # rows of a call that was never acknowledged are left out

VIEWS: dict[str, View] = {
    "executions": View(doc="One row an execution: task, group, harness, end, counts, newest score.", make=_executions),
    "calls": View(
        doc="One row a call: roles, forks, token counts, sampling, times; its number, delivery and duration.",
        reads=("raw.calls", "raw.deliveries"),
        sql="""
            select c.* exclude (run) rename (agent_role as role),
                row_number() over (partition by c.run, c.execution_id order by c.started_at, c.call_id) as number,
                d.state as delivery,
                date_diff('microsecond', c.started_at, c.ended_at) / 1e6 as duration_s,
                date_diff('microsecond', c.started_at, c.first_token_at) / 1e6 as first_token_s,
                c.run
            from raw.calls c left join (
                select run, call_id, arg_max(state, row("at", state = 'delivered', state)) as state
                from raw.deliveries group by run, call_id
            ) d on d.run = c.run and d.call_id = c.call_id""",
    ),
    "nodes": View(
        doc="One row a node of a committed call: parent, kind, author, token ids and log-probs as lists, num_tokens.",
        reads=("_nodes", "raw.calls"),
        sql=f"""
            select n.* exclude (run), n.author in ('policy', 'provider') as sampled, n.run
            from _nodes n where {_COMMITTED}""",
    ),
    "_nodes": View(doc="", make=_nodes),
    "messages": View(
        doc="One row a message, in the node that renders it: role, content, reasoning, tool calls as JSON.",
        reads=("_messages", "raw.calls"),
        sql=f"select * from _messages where {_COMMITTED}",
    ),
    "_messages": View(doc="", make=lambda sources: _texts(sources, _MESSAGES, _message)),
    "tool_calls": View(
        doc="One row a tool call of a message: name, arguments as JSON; `author` tells who made it.",
        reads=("_tool_calls", "raw.calls"),
        sql=f"select * from _tool_calls where {_COMMITTED}",
    ),
    "_tool_calls": View(doc="", make=lambda sources: _texts(sources, _TOOL_CALLS, _tool_call)),
    "paths": View(
        doc="One row a candidate trajectory: its leaf, tokens, which it trains, or the reason why it is not kept.",
        make=_paths,
    ),
    "trainable_tokens": View(
        doc="One row a token that RL may train: id, log-prob, version, position, the kept trajectory that owns it.",
        reads=("_trainable", "raw.nodes"),
        sql="""
            select execution_id, call_id, node_id, role, trajectory, "index", start_pos + "index" as "position",
                token_id, logprob, span.policy_id as policy_id, span.n as "version", run
            from (
                select * exclude (policy_versions),
                    case when len(policy_versions) = 1 then policy_versions[1]
                        else list_filter(policy_versions, lambda s: s."start" <= "index" and "index" < s."end")[1]
                    end as span
                from (
                    select n.execution_id, n.call_id, n.node_id, t.role, t.trajectory, n.start_pos,
                        unnest(range(len(n.token_ids))) as "index", unnest(n.token_ids) as token_id,
                        unnest(n.logprobs) as logprob, n.policy_versions, n.run
                    from _trainable t join raw.nodes n on n.run = t.run and n.node_id = t.node_id
                )
            )""",
    ),
    "_trainable": View(doc="", make=_trainable_nodes),
    "scores": View(doc="One row a verdict; `counts` marks the one that counts for its evaluator.", make=_scores),
    "admission": View(
        doc="One row an execution: admitted with reward and advantage, or the reason why not.", make=_admission
    ),
    "excluded": View(doc="One row for everything left out: execution, call or trajectory, reason.", make=_excluded),
    **{
        name: View(doc=table.doc, reads=(f"raw.{name}",), sql=f"select * from raw.{name}")
        for name, table in TABLES.items()
        if name not in ("executions", "calls", "nodes", "scores")
    },
}
