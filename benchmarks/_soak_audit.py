"""What a soak must show, from what it left: the harnesses' own journals against the record, and both ledgers.

`audit` is a pure function of an `Evidence`; `gather` reads one from a soak's folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_data import ledger as trained
from gyre_data import open as open_run
from gyre_data.arrays import from_table
from gyre_data.execution import executions
from gyre_data.verify import verify
from gyre_sched.actions import CellFailed, Dispatch, StepApplied
from gyre_sched.cells.settings import load
from gyre_sched.ledger import read, replay
from gyre_sched.state import State

__all__ = ["KINDS", "Evidence", "Recorded", "Reply", "audit", "gather"]

KINDS = {
    "lost": "acknowledged replies that are not in the record",
    "differ": "acknowledged replies that the record has otherwise",
    "doubled": "replies or tokens that are recorded twice",
    "consumed": "executions or sampled tokens that were trained on twice",
    "versions": "versions that were made twice or left out",
    "groups": "groups that are neither whole, nor made smaller or dropped by rule",
    "verify": "problems that `gyre verify` names",
    "ends": "processes that ended although nobody killed them",
}
_LOST_ENDS = ("infra_fault", "cancelled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A line of a harness's journal: a reply that came to its end there."""

    reply: str
    execution: str
    text: str
    tokens: int | None
    """As the reply counted them itself."""

    @property
    def call_id(self) -> str:
        """Of the record: every wire's name of a reply ends with it."""
        return self.reply.partition("_" if self.reply.startswith(("msg_", "resp_")) else "-")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A call of the record, with what its output node holds."""

    call_id: str
    execution: str
    output_node: str | None
    text: str | None
    tokens: int
    """As the call's row counts them."""
    num_ids: int
    num_logprobs: int
    spans: tuple[tuple[int, int], ...]
    """Of policy versions."""
    attempts: tuple[tuple[int, int], ...]
    """Of engines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All that the audit looks at."""

    replies: Sequence[Reply]
    calls: Sequence[Recorded]
    trained: Sequence[tuple[int, str, str]] = ()
    """Step, execution and leaf of every trajectory that was trained."""
    made: Sequence[int] = ()
    """Numbers of the versions that the trainer has made, in order."""
    applied: Sequence[int] = ()
    """The same as the controller's ledger has them."""
    groups: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    """How the executions of each dispatched group ended; None: they run."""
    open_groups: frozenset[str] = frozenset()
    """Those that were not ready at the end of the soak."""
    dropped: int = 0
    group_size: int = 1
    problems: Sequence[str] = ()
    ends: Sequence[str] = ()


def audit(evidence: Evidence) -> dict[str, list[str]]:
    """Everything that is wrong, in words, by the names of KINDS."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    _audit_replies(evidence, found)
    _audit_record(evidence, found)
    steps: dict[str, set[int]] = {}
    for step, execution, _ in evidence.trained:
        steps.setdefault(execution, set()).add(step)
    found["consumed"] += [f"{name} in steps {sorted(some)}" for name, some in sorted(steps.items()) if len(some) > 1]
    leaves = Counter((execution, leaf) for _, execution, leaf in evidence.trained)
    found["consumed"] += [f"leaf {leaf} of {name} {n} times" for (name, leaf), n in sorted(leaves.items()) if n > 1]
    for who, numbers in (("trainer", evidence.made), ("controller", evidence.applied)):
        if list(numbers) != list(range(1, len(numbers) + 1)):
            found["versions"].append(f"{who}: {list(numbers)}")
    if not len(evidence.applied) <= len(evidence.made) <= len(evidence.applied) + 1:  # one may not be told yet
        found["versions"].append(f"trainer made {len(evidence.made)}, controller knows {len(evidence.applied)}")
    short = []
    for group, ends in sorted(evidence.groups.items()):
        whole = sum(end is not None and end not in _LOST_ENDS for end in ends) >= evidence.group_size
        if not whole and group not in evidence.open_groups:
            short.append(f"{group} ended as {list(ends)}")
    found["groups"] += short[evidence.dropped :]
    found["verify"] += evidence.problems
    found["ends"] += evidence.ends
    return found


def _audit_replies(evidence: Evidence, found: dict[str, list[str]]) -> None:
    known = {call.call_id: call for call in evidence.calls}
    for reply in evidence.replies:
        call = known.get(reply.call_id)
        if call is None:
            found["lost"].append(f"{reply.reply} of {reply.execution}")
            continue
        for what, told, recorded in (
            ("execution", reply.execution, call.execution),
            ("text", reply.text, call.text or ""),
            ("tokens", reply.tokens, call.tokens),
        ):
            if told is not None and told != recorded:
                found["differ"].append(f"{reply.reply}: {what} {told!r:.60}, recorded {recorded!r:.60}")


def _audit_record(evidence: Evidence, found: dict[str, list[str]]) -> None:
    for what, names in (
        ("call", [call.call_id for call in evidence.calls]),
        ("output node", [call.output_node for call in evidence.calls if call.output_node is not None]),
    ):
        found["doubled"] += [f"{what} {name} {n} times" for name, n in sorted(Counter(names).items()) if n > 1]
    for call in evidence.calls:
        if call.output_node is None:
            continue
        if not call.num_ids == call.num_logprobs == call.tokens:
            found["doubled"].append(f"{call.call_id}: {call.num_ids} ids, {call.num_logprobs} log-probs, {call.tokens}")
        for what, spans in (("versions", call.spans), ("attempts", call.attempts)):
            if not _contiguous(spans, call.num_ids):
                found["doubled"].append(f"{call.call_id}: {what} {list(spans)} over {call.num_ids} ids")


def _contiguous(spans: Sequence[tuple[int, int]], end: int) -> bool:
    at = 0
    for start, stop in spans:
        if start != at or stop < start:
            return False
        at = stop
    return at == end


def gather(folder: Path) -> Evidence:
    """Read what a soak left in its folder."""
    settings = load(folder / "fleet.toml")
    state = State(settings.params, settings.fresh_cells())
    replay(settings.folder / "ledger.jsonl", state)
    records = [record for _, record in read(settings.folder / "ledger.jsonl")]
    run, out = folder / "run", folder / "out"
    infos = executions(open_run(run)).values()
    dispatched = {query for record in records if isinstance(record, Dispatch) for query in record.queries}
    steps = trained.steps(out)
    ends = folder / "ends.jsonl"
    return Evidence(
        replies=replies(folder / "journal"),
        calls=recorded(run),
        trained=[(row.step, row.execution_id, row.leaf_node) for row in trained.ledger(out)],
        made=[step.n for step in steps],
        applied=[record.version for record in records if isinstance(record, StepApplied)],
        groups={
            group: [None if one.ended_at is None else str(one.end_reason) for one in infos if one.group_id == group]
            for group in dispatched
        },
        open_groups=frozenset(name for name, group in state.groups.outstanding.items() if not group.ready),
        dropped=state.groups.dropped,
        group_size=settings.group_size,
        problems=[str(one) for path in (run, out) if (path / "manifest").exists() for one in verify(path).problems],
        ends=ends.read_text().splitlines() if ends.exists() else [],
    )


def replies(folder: Path) -> list[Reply]:
    """All journals; a last line that a kill cut off was not acknowledged."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().split("\n")[:-1]:
            told: dict[str, Any] = json.loads(line)
            found.append(Reply(**{name: told[name] for name in ("reply", "execution", "text", "tokens")}))
    return found


def recorded(run: Path) -> list[Recorded]:
    """All calls of a run."""
    opened = open_run(run)
    outputs = {n.node_id: n for n in from_table("nodes", opened.table("nodes")) if n.logprobs is not None}
    found = []
    for call in from_table("calls", opened.table("calls")):
        node = outputs.get(call.output_node or "")
        found.append(
            Recorded(
                call_id=call.call_id,
                execution=call.execution_id,
                output_node=call.output_node,
                text=None if node is None else _text([opened.blob(one) for one in node.message_blobs or ()]),
                tokens=call.output_tokens or 0,
                num_ids=0 if node is None else len(node.token_ids),
                num_logprobs=0 if node is None else len(node.logprobs),
                spans=() if node is None else tuple((one.start, one.end) for one in node.policy_versions or ()),
                attempts=tuple((one.start, one.end) for one in call.attempts if one.end > one.start),
            )
        )
    return found


def _text(messages: Sequence[bytes]) -> str:
    """What a recorded reply says, beside its thoughts and calls."""
    contents = [json.loads(message).get("content") or "" for message in messages]
    return "".join(
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        for content in contents
    )


def failures(folder: Path) -> int:
    """Cells that the controller took for lost."""
    records = read(load(folder / "fleet.toml").folder / "ledger.jsonl")
    return sum(isinstance(record, CellFailed) for _, record in records)
