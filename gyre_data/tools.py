"""Which tools the tokens go to: results in prompts, arguments in sampled turns, both again in every later prompt.

Names come from the recorded messages: a result names the call it answers by an id, and the assistant turn that holds
this id names the tool. Each distinct message is read and parsed once, so this costs time in the number of messages; no
token is touched. A node's tokens are those of its message. Where a node holds more than one thing (an assistant's
text, reasoning and tool calls; several messages that were rendered together) they are split in proportion to the bytes
of the JSON or text of each, so argument tokens are an estimate and are named so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .json_values import parsed
from .lean import lean
from .node_rows import NodeRows, flat_lists, node_rows
from .path import MINTED_CALL, minted_number
from .reader import unpack_blob
from .schema import Author, NodeKind
from .texts import arguments_text, content_text, tools_of
from .tree import Tables

__all__ = ["UNKNOWN_TOOL", "ToolCounts", "ToolShares", "by_tool", "num_messages"]

UNKNOWN_TOOL = "(unknown)"
"""Results whose call is not recorded, or whose id names several tools of one execution."""

_SAMPLED = (Author.POLICY, Author.PROVIDER)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCounts:
    """One tool."""

    tool: str
    calls: int
    """Calls of it in sampled turns."""
    results: int
    """Result messages in prompts, each once however often it was sent."""
    result_tokens: int
    """Distinct prompt tokens of its results."""
    argument_tokens: int
    """Sampled tokens of its calls, name included; an estimate by bytes."""
    sent_tokens: int
    """Tokens of its results and arguments summed over the calls in whose prompt they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolShares:
    """Tokens by tool, largest first, beside the wholes that they are a share of."""

    tools: tuple[ToolCounts, ...]
    prompt_tokens: int
    """Distinct tokens that were not sampled."""
    sampled_tokens: int
    sent_tokens: int
    """Prompt tokens summed over calls."""
    text_tokens: int
    """Sampled tokens of text; an estimate by bytes, as the next."""
    reasoning_tokens: int
    messages_missing: int
    """Messages that the run does not hold (purged or redacted away): in no tool's figures."""
    left_out: tuple[str, ...] = ()
    """Executions whose nodes name one another in a circle: in no figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """What one message says about tools; sizes are bytes."""

    size: int
    answers: str | None
    """The id of the tool call that it answers; "" when it is a result without one."""
    name: str | None
    calls: tuple[tuple[str, str | None, int], ...]
    """Tool, id and size of each call."""
    text: int
    reasoning: int


@dataclass(kw_only=True, slots=True)
class _Sums:
    calls: int = 0
    results: int = 0
    result_tokens: float = 0.0
    argument_tokens: float = 0.0
    sent_tokens: float = 0.0


@dataclass(kw_only=True, slots=True)
class _Totals:
    tools: dict[str, _Sums] = field(default_factory=lambda: defaultdict(_Sums))
    prompt: int = 0
    sampled: int = 0
    sent: int = 0
    text: float = 0.0
    reasoning: float = 0.0
    missing: int = 0
    left_out: tuple[str, ...] = ()


def num_messages(runs: Sequence[Tables]) -> int:
    """Messages that `by_tool` would read at most: what to ask before asking for it."""
    return sum(len(pc.unique(_blob_ids(node_rows(run))[1])) for run in runs)


def by_tool(runs: Tables | Sequence[Tables]) -> ToolShares:
    """Token shares by tool over runs together."""
    totals = _Totals()
    for run in lean(runs):
        _add_run(run, totals)
    tools = [
        ToolCounts(
            tool=name,
            calls=sums.calls,
            results=sums.results,
            result_tokens=round(sums.result_tokens),
            argument_tokens=round(sums.argument_tokens),
            sent_tokens=round(sums.sent_tokens),
        )
        for name, sums in totals.tools.items()
    ]
    return ToolShares(
        tools=tuple(sorted(tools, key=lambda one: (-one.result_tokens - one.argument_tokens, one.tool))),
        prompt_tokens=totals.prompt,
        sampled_tokens=totals.sampled,
        sent_tokens=totals.sent,
        text_tokens=round(totals.text),
        reasoning_tokens=round(totals.reasoning),
        messages_missing=totals.missing,
        left_out=totals.left_out,
    )


def _add_run(run: Tables, totals: _Totals) -> None:
    nodes = node_rows(run)
    totals.left_out += nodes.left_out
    if not len(nodes):
        return
    sampled_N = pc.is_in(nodes.column("author"), value_set=pa.array([str(one) for one in _SAMPLED])).to_numpy()
    ends = nodes.place(nodes.calls.column("prompt_node"))
    sent_N = nodes.below(np.bincount(ends[ends >= 0], minlength=len(nodes)))
    tokens_N = nodes.num_tokens_N
    totals.prompt += int(tokens_N[~sampled_N].sum())
    totals.sampled += int(tokens_N[sampled_N].sum())
    totals.sent += int((tokens_N * sent_N).sum())
    node_M, ids = _blob_ids(nodes)
    known = {blob_id: _read(data) for blob_id, data in _blobs(run, pc.unique(ids))}
    messages = [known.get(blob_id) for blob_id in ids.to_pylist()]
    totals.missing += sum(message is None for message in messages)
    size_N = np.bincount(node_M, weights=[m.size if m else 0 for m in messages], minlength=len(nodes))
    execution_M = nodes.column("execution_id").take(pa.array(node_M)).to_pylist()
    names = _Names(nodes, node_M, execution_M, messages)
    for node, execution_id, message in zip(node_M.tolist(), execution_M, messages, strict=True):
        if message is not None and message.size:
            tokens = float(tokens_N[node]) * message.size / size_N[node]
            answered = names.of(execution_id, message)
            _add(totals, message, answered, tokens, int(sent_N[node]), bool(sampled_N[node]))


def _add(totals: _Totals, message: _Message, answered: str | None, tokens: float, sent: int, sampled: bool) -> None:
    if answered is not None:
        sums = totals.tools[answered]
        sums.results += 1
        sums.result_tokens += tokens
        sums.sent_tokens += tokens * sent
    parts = message.text + message.reasoning + sum(size for _, _, size in message.calls)
    each = tokens / parts if parts else 0.0
    for tool, _, size in message.calls:
        sums = totals.tools[tool]
        sums.sent_tokens += each * size * sent
        if sampled:
            sums.calls += 1
            sums.argument_tokens += each * size
    if sampled:
        totals.text += each * message.text
        totals.reasoning += each * message.reasoning


class _Names:
    """Which tool a result is of: by the id that its call was recorded with, else by the node that an id of ours names.

    An id that names several tools of one execution names none.
    """

    def __init__(
        self,
        nodes: NodeRows,
        node_M: npt.NDArray[np.int64],
        execution_M: Sequence[str],
        messages: Sequence[_Message | None],
    ) -> None:
        self._by_id: dict[tuple[str, str], str] = {}
        self._made: dict[str, tuple[str, _Message, bool]] = {}
        node_ids = nodes.column("node_id").take(pa.array(node_M)).to_pylist()
        copies = nodes.column("copy_of").take(pa.array(node_M)).to_pylist()
        calls = nodes.calls
        wires = dict(zip(calls.column("output_node").to_pylist(), calls.column("wire").to_pylist(), strict=True))
        for node_id, copy_of, execution_id, message in zip(node_ids, copies, execution_M, messages, strict=True):
            for tool, call_id, _ in message.calls if message else ():
                key = (execution_id, call_id or "")
                if call_id is not None and self._by_id.setdefault(key, tool) != tool:
                    self._by_id[key] = UNKNOWN_TOOL
            if message is not None and message.calls:
                source = copy_of or node_id
                self._made.setdefault(source, (execution_id, message, wires.get(source) == "anthropic"))

    def of(self, execution_id: str, message: _Message) -> str | None:
        """The tool of a result; None for a message that is none."""
        if message.answers is None:
            return None
        if name := self._by_id.get((execution_id, message.answers)):
            return name
        if minted := MINTED_CALL.fullmatch(message.answers):
            made = self._made.get(minted[1])
            if made is not None and made[0] == execution_id:
                reply = {"tool_calls": made[1].calls, "reasoning": made[1].reasoning, "content": made[1].text}
                number = minted_number(reply, int(minted[2]), anthropic=made[2])
                return UNKNOWN_TOOL if number is None else made[1].calls[number][0]
        return message.name or UNKNOWN_TOOL


def _blob_ids(nodes: NodeRows) -> tuple[npt.NDArray[np.int64], pa.ChunkedArray]:
    """Messages that may tell of tools: the node and the blob of each."""
    told = nodes.column("message_blobs")
    several = pc.greater(pc.fill_null(pc.list_value_length(told), 0), 1)
    role = pc.is_in(nodes.column("message_role"), value_set=pa.array(["tool", "assistant"]))
    wanted = pc.or_(pc.or_(role, several), pc.equal(nodes.column("kind"), str(NodeKind.OUTPUT)))
    here = np.flatnonzero(wanted.to_numpy())
    row_M, ids = flat_lists(told.take(pa.array(here)))
    return here[row_M], ids


def _blobs(run: Tables, wanted: pa.Array) -> Iterator[tuple[str, bytes]]:
    """Plain bytes of the wanted blobs, in the order of the file."""
    blobs = run.table("blobs")
    rows = np.flatnonzero(pc.is_in(blobs.column("blob_id"), value_set=wanted).to_numpy())
    batches = blobs.to_batches()
    starts = np.cumsum([0, *(len(batch) for batch in batches)])
    cuts = np.searchsorted(rows, starts)
    for batch, start, first, end in zip(batches, starts[:-1], cuts[:-1], cuts[1:], strict=True):
        for one in batch.take(pa.array(rows[first:end] - start)).to_pylist():
            data = pa.py_buffer(one["data"])
            yield one["blob_id"], unpack_blob(one["blob_id"], one["codec"], one["num_bytes"], data)


def _read(data: bytes) -> _Message:
    """Bytes that are no message (of another maker) tell nothing of tools."""
    found = parsed(data)
    value: dict[str, Any] = found if isinstance(found, dict) else {"content": data.decode("utf-8", "replace")}
    ids = [call.get("id") for call in value.get("tool_calls") or () if isinstance(call, dict)]
    is_result = value.get("role") == "tool"
    return _Message(
        size=len(data),
        answers=str(value.get("tool_call_id") or "") if is_result else None,
        name=value.get("name") if is_result else None,
        calls=tuple(
            (name, call_id, _size(name) + _size(arguments_text(arguments)))
            for call_id, (name, arguments) in zip(ids, tools_of(value), strict=True)
        ),
        text=_size(content_text(value)),
        reasoning=_size(str(value.get("reasoning") or "")),
    )


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
