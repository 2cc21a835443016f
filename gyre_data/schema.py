"""The on-disk schema, declared once.

Everything else that lists columns is generated from `TABLES` or tested against it: the files in `schemas/`, the
row dataclasses in `types.py`, the tables in `docs/format.md`. Rules of change: a column is only ever added, always
nullable, and never changes type or meaning; a higher `MAJOR` is refused by older readers.

Token and log-prob columns are `large_list` (64-bit offsets), so that no concatenation can overflow.
A missing value is null, never a default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from .errors import SchemaError

__all__ = [
    "MAJOR",
    "MINOR",
    "RUN_TABLES",
    "TABLES",
    "AgentRole",
    "Author",
    "BranchReason",
    "CallStatus",
    "Column",
    "DeliveryState",
    "EndReason",
    "Extension",
    "NodeKind",
    "ScoreStatus",
    "Table",
    "arrow_schema",
    "table",
]

MAJOR = 1
MINOR = 2


class _OnDisk(StrEnum):
    """A string enum whose values are their on-disk spelling; an unknown spelling reads as `unknown_value`."""

    @classmethod
    def read(cls, value: str | None) -> _OnDisk | None:
        """Return the member spelled `value`; None stays None; a spelling of a newer writer becomes UNKNOWN_VALUE."""
        if value is None:
            return None
        try:
            return cls(value)
        except ValueError:
            return cls("unknown_value")


class NodeKind(_OnDisk):
    """What a run of tokens is."""

    PROMPT = "prompt"
    GENERATION_PROMPT = "generation_prompt"
    OUTPUT = "output"
    UNKNOWN_VALUE = "unknown_value"


class Author(_OnDisk):
    """Who wrote a node: `policy` tokens were sampled by our engines, `provider` text by a hosted API."""

    POLICY = "policy"
    PROVIDER = "provider"
    CLIENT = "client"
    TEMPLATE = "template"
    UNKNOWN_VALUE = "unknown_value"


class AgentRole(_OnDisk):
    """The part a call plays in its execution. `side` and `unknown` are never trained."""

    MAIN = "main"
    MAIN_SUMMARY = "main_summary"
    SUB_AGENT = "sub_agent"
    SUB_AGENT_SUMMARY = "sub_agent_summary"
    SIDE = "side"
    UNKNOWN = "unknown"
    UNKNOWN_VALUE = "unknown_value"


class Extension(_OnDisk):
    """How a call's prompt relates to what was recorded before."""

    ROOT = "root"  # nothing matched: the whole prompt is new
    BRIDGE = "bridge"  # continues a sampled turn that came back as it was sent
    REPAIR = "repair"  # continues a sampled turn whose echo was changed but is the same turn
    RETRY = "retry"  # the same request again: same prompt nodes, a sibling output
    FORK = "fork"  # leaves the recorded path before its end
    UNKNOWN_VALUE = "unknown_value"


class BranchReason(_OnDisk):
    """Why a call did not simply extend the newest call of its agent. Null when it did."""

    RETRY = "retry"
    REWIND = "rewind"
    COMPACTION = "compaction"
    SUB_AGENT = "sub_agent"
    CONTEXT_REWRITE = "context_rewrite"
    TEMPLATE = "template"
    UNKNOWN_VALUE = "unknown_value"


class CallStatus(_OnDisk):
    """What was known of a call when its row was committed."""

    OK = "ok"
    ABORTED = "aborted"
    FAILED = "failed"
    UNKNOWN_VALUE = "unknown_value"


class DeliveryState(_OnDisk):
    """Whether the reply reached the harness. No row means unknown."""

    DELIVERED = "delivered"
    UNDELIVERED = "undelivered"
    ABANDONED = "abandoned"
    UNKNOWN_VALUE = "unknown_value"


class EndReason(_OnDisk):
    """Why an execution ended. `infra_fault` is never trained and is refilled."""

    FINISHED = "finished"
    HARNESS_TIMEOUT = "harness_timeout"
    OVERALL_TIMEOUT = "overall_timeout"
    CRASHED = "crashed"
    INFRA_FAULT = "infra_fault"
    CANCELLED = "cancelled"
    UNKNOWN_VALUE = "unknown_value"


class ScoreStatus(_OnDisk):
    """Outcome of one evaluation. Only `scored` rows carry a value; a failed evaluator is never a zero."""

    SCORED = "scored"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNKNOWN_VALUE = "unknown_value"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column: its Arrow type, whether null is lawful, one line of meaning, and the MINOR that added it."""

    name: str
    type: pa.DataType
    doc: str
    nullable: bool = True
    since: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table: `key` identifies a row (None for event rows); `owner` is run, trainer or scheduler."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    key: str | None
    owner: str = "run"

    @property
    def column_names(self) -> tuple[str, ...]:
        """Column names in on-disk order."""
        return tuple(column.name for column in self.columns)


STRING = pa.string()
INT32, INT64 = pa.int32(), pa.int64()
FLOAT64 = pa.float64()
TIME = pa.timestamp("us", tz="UTC")
TOKENS = pa.large_list(pa.field("item", pa.int32(), nullable=False))
LOGPROBS = pa.large_list(pa.field("item", pa.float32(), nullable=False))
STRINGS = pa.list_(pa.field("item", STRING, nullable=False))
# A policy version is (policy_id, n); the engine's weight_version string is "policy_id:n".
VERSION_SPANS = pa.list_(
    pa.field(
        "item",
        pa.struct(
            [
                pa.field("policy_id", STRING, nullable=False),
                pa.field("n", INT64, nullable=False),
                pa.field("start", INT64, nullable=False),
                pa.field("end", INT64, nullable=False),
            ]
        ),
        nullable=False,
    )
)
ATTEMPTS = pa.list_(
    pa.field(
        "item",
        pa.struct(
            [
                pa.field("engine", STRING, nullable=False),
                pa.field("start", INT64, nullable=False),
                pa.field("end", INT64, nullable=False),
                pa.field("adapter_id", STRING),
                pa.field("rollout_precision", STRING),
                pa.field("error", STRING),
            ]
        ),
        nullable=False,
    )
)


def _req(name: str, type_: pa.DataType, doc: str) -> Column:
    return Column(name=name, type=type_, doc=doc, nullable=False)


def _opt(name: str, type_: pa.DataType, doc: str, since: int = 0) -> Column:
    return Column(name=name, type=type_, doc=doc, since=since)


_EXECUTION = _req("execution_id", STRING, "the harness run this row belongs to")

TABLES: dict[str, Table] = {
    t.name: t
    for t in (
        Table(
            name="nodes",
            key="node_id",
            doc="A run of tokens added to its parent; the ids along a path are a call's exact prompt and output.",
            columns=(
                _req("node_id", STRING, "unique in the run"),
                _EXECUTION,
                _req("root_id", STRING, "first node of this node's path; equals node_id for a root"),
                _opt("parent_id", STRING, "node whose tokens come just before; null for a root"),
                _req("call_id", STRING, "call that added this node"),
                _req("start_pos", INT64, "tokens before this node on its path"),
                _req("kind", STRING, "prompt | generation_prompt | output"),
                _opt(
                    "message_role",
                    STRING,
                    "role of the message rendered here: system, user, assistant, tool, ...",
                ),
                _req("author", STRING, "policy (sampled) | provider (hosted model) | client | template (added by us)"),
                _opt("copy_of", STRING, "sampled node of which this is a kept tail or re-rendered copy"),
                _req("token_ids", TOKENS, "int32 ids, exactly as sent to or sampled by the engine"),
                _opt("logprobs", LOGPROBS, "one per token of an output node, behaviour policy; null elsewhere"),
                _opt("policy_versions", VERSION_SPANS, "half-open spans over token_ids of an output node"),
                _opt("message_blobs", STRINGS, "canonical JSON of the message(s) rendered here, by blob id"),
                _opt("content_hash", STRING, "hash chain over canonical messages up to and including this node"),
                _opt("fingerprint", STRING, "tokenizer and template that made the ids, or what counted the tokens"),
                _opt(
                    "counted_tokens",
                    INT64,
                    "observe mode: local count, by what `fingerprint` names; token_ids is empty then",
                    since=1,
                ),
                _opt(
                    "redacted",
                    STRINGS,
                    "kinds of secrets that were taken out of its text; token_ids is empty, counted_tokens their number",
                    since=1,
                ),
            ),
        ),
        Table(
            name="calls",
            key="call_id",
            doc="One model request and its reply. A call exists once this row is committed; its nodes come first.",
            columns=(
                _req("call_id", STRING, "unique in the run"),
                _EXECUTION,
                _req(
                    "agent_role",
                    STRING,
                    "main | main_summary | sub_agent | sub_agent_summary | side | unknown",
                ),
                _req(
                    "role_source",
                    STRING,
                    "how the role was known: header, client, shape, spawn, inherited, first, none",
                ),
                _opt("agent_id", STRING, "the client's own name for the agent; null for the main one"),
                _opt("parent_agent_id", STRING, "agent that started this one"),
                _opt("spawned_by_node", STRING, "output node that holds the tool call that started this agent"),
                _opt("spawned_by_tool_call", STRING, "id of that tool call"),
                _opt("continues_from", STRING, "call whose conversation this one goes on with"),
                _req("wire", STRING, "anthropic | openai_chat | openai_responses"),
                _opt("client", STRING, "harness name and version as it named itself"),
                _opt(
                    "prompt_node",
                    STRING,
                    "last node of the prompt; null when the call failed before rendering",
                ),
                _opt("output_node", STRING, "sampled node; null when nothing was sampled"),
                _req("extension", STRING, "root | bridge | repair | retry | fork"),
                _opt(
                    "branch_reason",
                    STRING,
                    "retry | rewind | compaction | sub_agent | context_rewrite | template",
                ),
                _opt("fork_check", STRING, "which check made a fork, in words; null when none did"),
                _opt(
                    "first_difference_message",
                    INT32,
                    "index of the first message that differs from the record",
                ),
                _opt("first_difference_token", INT64, "position of the first token that differs"),
                _opt("tokens_lost", INT64, "recorded tokens of the old path that the new prompt does not reuse"),
                _opt("thinking_policy", STRING, "keep | fork, for templates that strip thinking"),
                _opt("tools_digest", STRING, "hash of the canonical tool list; null without tools"),
                _opt("tools_blob", STRING, "canonical JSON of the tool list, by blob id"),
                _opt("prompt_tokens", INT64, "tokens sent to the engine"),
                _opt("output_tokens", INT64, "tokens sampled"),
                _opt("cached_tokens", INT64, "prompt tokens the engine took from its prefix cache"),
                _opt("sampling_asked", STRING, "JSON of the client's sampling settings"),
                _opt("sampling_used", STRING, "JSON of the sampling settings sent to the engine"),
                _opt("temperature", FLOAT64, "temperature used"),
                _opt("top_p", FLOAT64, "top_p used"),
                _opt("top_k", INT64, "top_k used; -1 is off"),
                _opt("constrained", pa.bool_(), "true when a grammar or schema limited sampling"),
                _opt("max_tokens", INT64, "output limit used, after clamping to the context window"),
                _opt(
                    "logprob_convention",
                    STRING,
                    "after_temperature: log-softmax(logits / T), before top_p and top_k",
                ),
                _opt("seed", INT64, "sampling seed used"),
                _opt("finish_reason", STRING, "stop | length | abort, as the engine said"),
                _opt("stop_reason", STRING, "reason as told to the client, in its wire's words"),
                _req("status", STRING, "ok | aborted | failed, as known at commit"),
                _opt("error", STRING, "what went wrong, when something did"),
                _req("attempts", ATTEMPTS, "engines that produced the output, with half-open token spans"),
                _req("started_at", TIME, "request accepted"),
                _opt("first_token_at", TIME, "first sampled token seen"),
                _opt("ended_at", TIME, "reply complete or given up"),
                _opt("environment_state_id", STRING, "state captured last before this call"),
                _opt("request_blobs", STRINGS, "pieces whose concatenation is the exact request body"),
                _opt("request_path", STRING, "path and query as received, below the execution's base URL"),
                _opt("request_headers", STRING, "JSON of the allow-listed request headers"),
                _opt("provider_usage", STRING, "JSON of the hosted API's usage block; observe mode only"),
                _opt("upstream", STRING, "base URL of the hosted API; observe mode only, as the next four", since=1),
                _opt("http_status", INT32, "status of its answer; null when there was none", since=1),
                _opt("served_model", STRING, "model, as it named it", since=1),
                _opt("provider_request_id", STRING, "its id of the request", since=1),
                _opt("response_blobs", STRINGS, "body of a reply that could not be read as a message", since=1),
                _opt("note", STRING, "what of request or reply could not be read, in words", since=1),
                _opt(
                    "echo_difference",
                    STRING,
                    "of a fork at a sampled turn that came back changed: what of it differs, in words",
                    since=1,
                ),
            ),
        ),
        Table(
            name="deliveries",
            key=None,
            doc="Event rows: whether a reply reached the harness. The latest row counts; none means unknown.",
            columns=(
                _req("call_id", STRING, "the call"),
                _EXECUTION,
                _req("state", STRING, "delivered | undelivered | abandoned"),
                _req("at", TIME, "when it was known"),
            ),
        ),
        Table(
            name="executions",
            key=None,
            doc="Event rows: an execution started, or ended with a reason. Later rows add to earlier ones.",
            columns=(
                _EXECUTION,
                _req("event", STRING, "started | ended"),
                _req("at", TIME, "when"),
                _opt(
                    "end_reason",
                    STRING,
                    "finished | harness_timeout | overall_timeout | crashed | infra_fault | cancelled",
                ),
                _opt("group_id", STRING, "executions of one task that are compared with one another"),
                _opt("task_id", STRING, "task"),
                _opt("sample_index", INT32, "number of this execution in its group"),
                _opt("harness", STRING, "harness name"),
                _opt("harness_version", STRING, "harness version"),
                _opt("launcher", STRING, "JSON of what the launcher set: command, environment names, timeouts"),
                _opt("dispatch_policy_id", STRING, "policy whose weights were served at dispatch"),
                _opt("dispatch_version", INT64, "its version at dispatch"),
                _opt("attributes", STRING, "JSON object of free labels"),
            ),
        ),
        Table(
            name="groups",
            key=None,
            doc="Event rows: a group was created or changed. The latest row of a group counts.",
            columns=(
                _req("group_id", STRING, "executions of one task that are compared with one another"),
                _req("at", TIME, "when"),
                _opt("task_id", STRING, "task"),
                _opt("size", INT32, "executions it is meant to have"),
                _opt("attributes", STRING, "JSON of free labels"),
            ),
        ),
        Table(
            name="environments",
            key="state_id",
            doc="States of the workspace, captured at the start, every n calls, and at the end.",
            columns=(
                _req("state_id", STRING, "unique in the run"),
                _EXECUTION,
                _req("captured_at", TIME, "when"),
                _req("kind", STRING, "digest | git_tree | opaque"),
                _req("digest", STRING, "what identifies the state"),
                _opt("location", STRING, "where it can be found again"),
                _opt("parent_id", STRING, "state before it"),
            ),
        ),
        Table(
            name="scores",
            key="score_id",
            doc="Append-only verdicts. A re-score is a new row; the last scored row of an evaluator counts.",
            columns=(
                _req("score_id", STRING, "unique in the run"),
                _EXECUTION,
                _req("evaluator", STRING, "name"),
                _opt("evaluator_version", STRING, "version"),
                _opt("config_digest", STRING, "hash of the evaluator's command and settings"),
                _req("status", STRING, "scored | failed | skipped"),
                _opt("value", FLOAT64, "finite; null unless scored"),
                _opt("partial", pa.bool_(), "true when the score is for unfinished work"),
                _opt("state_id", STRING, "environment state that was judged"),
                _opt("detail", STRING, "JSON or text from the evaluator"),
                _req("at", TIME, "when"),
            ),
        ),
        Table(
            name="blobs",
            key="blob_id",
            doc="Content-addressed bytes: message and tool texts, pieces of request bodies.",
            columns=(
                _req("blob_id", STRING, "sha256 of the plain bytes, in hex"),
                _req("num_bytes", INT64, "length of the plain bytes"),
                _req("codec", STRING, "zstd | none"),
                _req("data", pa.large_binary(), "the bytes"),
            ),
        ),
        Table(
            name="routed_experts",
            key=None,
            doc="Side table: routed experts of a node's tokens, from the first call that computed them.",
            columns=(
                _req("node_id", STRING, "node"),
                _req("call_id", STRING, "call that computed them"),
                _req("num_layers", INT32, "layers"),
                _req("top_k", INT32, "experts per token"),
                _opt("start", INT64, "index in the node of the first token covered; null is 0", since=1),
                _req(
                    "experts",
                    pa.large_list(pa.field("item", pa.int16(), nullable=False)),
                    "row-major [token, layer, k]",
                ),
            ),
        ),
        Table(
            name="top_logprobs",
            key=None,
            doc="Side table: top-k alternatives of a sampled node.",
            columns=(
                _req("node_id", STRING, "output node"),
                _req("k", INT32, "alternatives per token"),
                _req("token_ids", TOKENS, "row-major [token, k]"),
                _req("logprobs", LOGPROBS, "row-major [token, k]"),
            ),
        ),
        Table(
            name="teacher_logprobs",
            key=None,
            doc="Side table: another model's log-probs of a node's tokens.",
            columns=(
                _req("node_id", STRING, "node"),
                _req("teacher", STRING, "policy id and version of the teacher"),
                _req("logprobs", LOGPROBS, "one per token"),
                _req("at", TIME, "when"),
            ),
        ),
        Table(
            name="ledger",
            key=None,
            owner="trainer",
            doc="What training consumed: one row per trained trajectory.",
            columns=(
                _req("step", INT64, "optimiser step that consumed it, from 1"),
                _req("policy_id", STRING, "lineage trained"),
                _req("data_run", STRING, "path of the run that holds the execution"),
                _req("manifest", INT64, "manifest number the data was read at"),
                _EXECUTION,
                _opt("group_id", STRING, "group"),
                _req("trajectory", INT32, "index among the execution's kept trajectories"),
                _req("leaf_node", STRING, "last node of the trajectory"),
                _req("owned_tokens", INT64, "sampled tokens trained through this trajectory"),
                _opt("reward", FLOAT64, "R of the execution; null for SFT"),
                _opt("advantage", FLOAT64, "A of the execution; null for SFT"),
                _req("score_ids", STRINGS, "score rows that R was made from"),
                _req("at", TIME, "when"),
            ),
        ),
        Table(
            name="steps",
            key=None,
            owner="trainer",
            doc="Optimiser steps: the version each made and what it was made from.",
            columns=(
                _req("step", INT64, "from 1"),
                _req("policy_id", STRING, "policy id of the version made"),
                _req("n", INT64, "version made"),
                _req("parent_policy_id", STRING, "version it was made from: policy id"),
                _req("parent_n", INT64, "version it was made from: number"),
                _req("num_executions", INT64, "E"),
                _req("trained_tokens", INT64, "loss edges"),
                _opt("loss", FLOAT64, "loss of the step"),
                _opt("metrics", STRING, "JSON of every metric of the step"),
                _opt("checkpoint", STRING, "where the weights of this version lie, when they were kept"),
                _req("at", TIME, "when"),
            ),
        ),
        Table(
            name="cells",
            key=None,
            owner="scheduler",
            doc="The controller's JSONL read as a table: spans of time a cell spent in one role.",
            columns=(
                _req("cell", STRING, "cell"),
                _req("role", STRING, "rollout | draining | to_train | train | to_rollout | down"),
                _req("started_at", TIME, "start"),
                _opt("ended_at", TIME, "end; null while it lasts"),
                _opt("queue_wait_s", FLOAT64, "seconds work waited for the cell"),
                _opt("occupancy", FLOAT64, "share of the span spent at work"),
            ),
        ),
    )
}

RUN_TABLES: tuple[str, ...] = tuple(t.name for t in TABLES.values() if t.owner == "run")


def table(name: str) -> Table:
    """Return the declaration of table `name`; raise SchemaError that names the known ones."""
    try:
        return TABLES[name]
    except KeyError:
        raise SchemaError(f"wanted a table of this format, got {name!r}; known: {', '.join(TABLES)}") from None


def arrow_schema(name: str) -> pa.Schema:
    """Arrow schema of table `name`, with format name and version as one JSON value under the key `gyre`."""
    declared = table(name)
    fields = [pa.field(c.name, c.type, nullable=c.nullable) for c in declared.columns]
    stamp = json.dumps({"table": name, "major": MAJOR, "minor": MINOR}, sort_keys=True)
    return pa.schema(fields, metadata={"gyre": stamp})
