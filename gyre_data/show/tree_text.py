"""`gyre tree` as text: header, totals, lanes with folded runs of calls, and what to type next. Red is what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from rich.text import Text

from gyre_data.counts import TreeCounts, count_tree
from gyre_data.eligible import Reason
from gyre_data.schema import CallStatus, ScoreStatus
from gyre_data.scores import latest_scored
from gyre_data.texts import node_messages, tools_of
from gyre_data.types import PolicyVersion, Score

from .layout import flow, hints, wrapped
from .numbers import DASH, amount, count, duration, ratio
from .outline import Lane, Outline, Segment

__all__ = ["MOST_LINES", "score_parts", "tree_lines"]

MOST_LINES = 60
"""A tree of more lines is folded until it fits, unless a depth was asked for."""
_WRONG = "bold red"
_QUIET = "dim"
_FIGURES = 4
_LEAST_LABEL, _LEAST_TITLE = 34, 16
_FOLDED = ("side", "unknown")
"""Lanes of which only the header and false forks are shown: their calls have nothing to do with one another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One line of the tree before alignment: guides, label, and up to four columns of figures."""

    depth: tuple[bool, ...]
    """Per level whether that level's item is the last of its siblings."""
    label: Text
    figures: tuple[str, ...] | None = None
    title: str | None = None
    """What may be shortened to make room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """A line with the lines below it; `folded` are its figures when those lines are not shown."""

    label: Text
    figures: tuple[str, ...] | None = None
    title: str | None = None
    below: tuple[_Item, ...] = ()
    folded: tuple[str, ...] | None = None


def tree_lines(
    shown: Outline,
    *,
    short: str,
    where: str,
    width: int = 80,
    depth: int | None = None,
    every: bool = False,
    others: int = 0,
) -> list[Text]:
    """The lines of `gyre tree`: `short` is the shortest unique id, `where` the run's path for the next command.

    `depth` folds what lies deeper (None: as deep as fits on `MOST_LINES`), `every` gives each call a line, `others` is
    the number of the run's other executions.
    """
    counts = count_tree(shown.tree, j_max=shown.j_max)
    items = [_lane(shown, lane, every) for lane in shown.lanes]
    deepest = max((_height(item) for item in items), default=0)
    fitting = deepest if depth is None else min(depth, deepest)
    rows = [row for item in items for row in _rows(item, (), fitting)]
    while depth is None and not every and len(rows) > MOST_LINES and fitting > 1:
        fitting -= 1
        rows = [row for item in items for row in _rows(item, (), fitting)]
    return [
        *flow(_header(shown, counts, short), width),
        *flow(_totals(counts), width),
        *_aligned(rows, width),
        *_ending(shown, counts, width, fitting if fitting < deepest else None),
        *hints(_next(shown, short, where, others), width),
    ]


def score_parts(scores: tuple[Score, ...] | list[Score]) -> list[Text]:
    """Latest verdict of every evaluator: `0.50 partial (pytest@3)`; `score -` when nothing was judged."""
    told = []
    for name in sorted({row.evaluator for row in scores}):
        row = latest_scored(scores, name)
        if row is None:
            last = [s for s in scores if s.evaluator == name][-1]
            told.append(Text(f"{name} {last.status}", style=_WRONG if last.status == "failed" else ""))
            continue
        version = f"@{row.evaluator_version}" if row.evaluator_version else ""
        told.append(Text(f"{row.value:.2f}{' partial' if row.partial else ''} ({name}{version})", style="bold"))
    return told or [Text(f"score {DASH}")]


def _header(shown: Outline, counts: TreeCounts, short: str) -> list[Text]:
    info = shown.execution.info
    name = Text.assemble((short, "bold cyan"), f" {info.task_id or DASH}")
    name.append(f" #{info.sample_index}" if info.sample_index is not None else "")
    harness = " ".join(part for part in (info.harness, info.harness_version) if part)
    models = sorted({call.served_model for call in shown.tree.calls if call.served_model})
    told = [
        name,
        Text(harness or DASH),
        Text(f"model {', '.join(models)}" if models else f"policy {_versions(counts)}"),
    ]
    if info.running:
        told.append(Text("running", style="bold yellow"))
    else:
        bad = info.end_reason in ("crashed", "infra_fault", "unknown_value", None)
        told.append(Text(str(info.end_reason or DASH).replace("_", " "), style=_WRONG if bad else ""))
    if info.started_at and info.ended_at:
        told.append(Text(duration((info.ended_at - info.started_at).total_seconds()), style=_QUIET))
    return told + score_parts(shown.execution.scores)


def _versions(counts: TreeCounts) -> str:
    """`run:4>5` for one lineage, `a:0, b:3` for several; `-` when none was recorded."""
    numbers: dict[str, list[int]] = {}
    for text in counts.version_tokens:
        if text != "unknown":
            version = PolicyVersion.parse(text)
            numbers.setdefault(version.policy_id, []).append(version.n)
    parts = [f"{name}:{'>'.join(str(n) for n in sorted({min(ns), max(ns)}))}" for name, ns in sorted(numbers.items())]
    return ", ".join(parts) or DASH


def _totals(counts: TreeCounts) -> list[Text]:
    calls = Text(f"{count(counts.calls)} {'call' if counts.calls == 1 else 'calls'}")
    wrong = [
        f"{number} {what}"
        for number, what in (
            (counts.calls_failed, "failed"),
            (counts.calls_aborted, "aborted"),
            (counts.calls_undelivered, "undelivered"),
        )
        if number
    ]
    if wrong:
        calls.append(" (").append(", ".join(wrong), style=_WRONG).append(")")
    nodes = f"{count(counts.message_nodes)} message nodes"
    if counts.trajectory_message_nodes not in (0, counts.message_nodes):
        nodes += f", {count(counts.trajectory_message_nodes)} on trajectories"
    if counts.trajectories:
        nodes += f", {count(counts.occurrences)} if expanded ({ratio(counts.sharing_messages)})"
    tokens = Text(f"{amount(counts.distinct_tokens)} tok")
    tokens.append(f", {amount(counts.kept_tokens)} would be trained", style="" if counts.kept_tokens else _WRONG)
    return [calls, Text(nodes), tokens]


def _rows(item: _Item, depth: tuple[bool, ...], deepest: int) -> Iterator[_Row]:
    if item.below and len(depth) >= deepest:
        label = item.label.copy()
        label.append(" [folded]", style=_QUIET)
        yield _Row(depth=depth, label=label, figures=item.folded or item.figures, title=item.title)
        return
    yield _Row(depth=depth, label=item.label, figures=item.figures, title=item.title)
    for place, child in enumerate(item.below):
        yield from _rows(child, (*depth, place == len(item.below) - 1), deepest)


def _height(item: _Item) -> int:
    return 1 + max((_height(child) for child in item.below), default=-1)


def _lane(shown: Outline, lane: Lane, every: bool) -> _Item:
    """An agent: its figures are those of all lines below it, the sub-agents that it started too."""
    label = Text.assemble((_lane_name(lane), _WRONG if lane.kind == "unknown" else "bold"))
    if lane.spawned_at is not None:
        label.append(f" from c{lane.spawned_at}")
    elif lane.kind == "sub_agent":
        label.append(" from an unknown call")
    below = tuple(_children(shown, lane, every))
    one_run = lane.kind == "sub_agent" and len(below) == 1 and not below[0].below
    if one_run or lane.kind in _FOLDED:
        label.append(f"  {_span(lane.calls)}")
        below = () if one_run else below
    return _Item(label=label, figures=_figures(shown, lane.subtree), title=lane.title, below=below)


def _lane_name(lane: Lane) -> str:
    names = {"side": "side calls, never trained", "unknown": "unknown role, never trained"}
    name = names.get(lane.kind, lane.kind)
    return f"{name} {lane.agent_id}" if lane.agent_id and lane.kind == "sub_agent" else name


def _children(shown: Outline, lane: Lane, every: bool) -> Iterator[_Item]:
    """Openings and runs of a lane in order; a fork holds its own run, since it leads away from the line."""
    for segment in lane.segments:
        if lane.kind in _FOLDED and not every and not (segment.opening or {}).get("false"):
            continue
        run = _run(shown, segment, every)
        if segment.opening is None:
            yield run
        elif segment.opening["kind"] == "compaction":
            yield _Item(label=_compaction(segment.opening))
            yield run
        else:
            yield _Item(label=_fork(segment.opening), below=(run,), folded=run.folded or run.figures)


def _run(shown: Outline, segment: Segment, every: bool) -> _Item:
    """Calls that go on from one another: their own figures; folded, those of the sub-agents below them too."""
    calls = tuple(_one_call(shown, n) for n in segment.calls) if every else ()
    agents = tuple(_lane(shown, agent, every) for agent in segment.agents)
    whole = sorted({*segment.calls, *(n for agent in segment.agents for n in agent.subtree)})
    return _Item(
        label=Text(_span(segment.calls)),
        figures=_figures(shown, segment.calls),
        below=(*calls, *_events(shown, segment), *agents),
        folded=_figures(shown, whole),
    )


def _one_call(shown: Outline, number: int) -> _Item:
    call = shown.call(number)
    label = Text(f"c{number}")
    label.append(f" {call.call_id}", style=_QUIET)
    output = shown.tree.output(call)
    said = [] if output is None else node_messages(shown.execution.run, shown.tree, output)
    if tools := [name for message in said for name, _ in tools_of(message)]:
        label.append(f"  {', '.join(tools)}")
    elif call.status != CallStatus.OK:
        label.append(f"  {call.status}", style=_WRONG)
    return _Item(label=label, figures=_figures(shown, [number]))


def _events(shown: Outline, segment: Segment) -> Iterator[_Item]:
    """Retries by themselves when there are few, else one line that counts them."""
    events = sorted(segment.events, key=lambda event: event["call"])
    if len(events) > 5:
        kinds = Counter("retried" if e["taken_over_by"] else _status(shown, e) for e in events)
        totals = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        calls = " ".join(f"c{e['call']}" for e in events[:5])
        yield _Item(label=Text(f"{totals}: {calls} ..."))
        return
    for event in events:
        what = event["error"] or _status(shown, event)
        told = Text(f"retry @c{event['call']}  " if event["taken_over_by"] else f"c{event['call']}  ")
        told.append(what, style="" if what == "delivered" else _WRONG)
        if event["taken_over_by"]:
            told.append(f"; c{event['taken_over_by']} {'was sampled anew' if what == 'delivered' else 'took over'}")
        told.append(f"; {amount(shown.trained[event['call'] - 1])} tok trained", style=_QUIET)
        yield _Item(label=told)


def _status(shown: Outline, event: dict[str, Any]) -> str:
    call = shown.call(event["call"])
    if event["status"] != "ok":
        return str(event["status"])
    return str(shown.tree.delivery.get(call.call_id) or "delivery unknown")


def _compaction(opening: dict[str, Any]) -> Text:
    told = Text.assemble(("compaction", "bold magenta"))
    told.append(f" {_at(opening)}  {amount(opening['tokens_before'])} > {amount(opening['tokens_after'])}")
    parts = [f"summary {amount(opening['summary_tokens'])}"]
    if opening["copied_tokens"]:
        parts.append(f"copied turns {amount(opening['copied_tokens'])} = context only")
    told.append(f"  ({', '.join(parts)})", style=_QUIET)
    return told


def _fork(opening: dict[str, Any]) -> Text:
    if opening["kind"] == "conversation":
        return Text("new conversation")
    if opening["kind"] == "summary":
        return Text(f"summary of what came before, forks {_at(opening)}")
    if opening["false"]:
        told = Text.assemble(("FALSE fork", _WRONG))
        told.append(
            f" {_at(opening)}  check: {opening['check']}; {amount(opening['tokens_lost'])} tok lost", style=_WRONG
        )
        return told
    told = Text.assemble(("fork", "bold yellow"))
    told.append(f" {_at(opening)}  {opening['reason'] or 'no reason recorded'}, real")
    if opening["first_difference_message"] is not None:
        told.append(f"; first diff message {opening['first_difference_message']}")
    if opening["echo_difference"]:
        told.append(f"; a turn came back with another {opening['echo_difference']}")
    if opening["tokens_lost"]:
        told.append(f"; {amount(opening['tokens_lost'])} tok not reused", style=_QUIET)
    return told


def _at(opening: dict[str, Any]) -> str:
    return f"@c{opening['at']}" if opening["at"] is not None else "@start"


def _span(numbers: list[int]) -> str:
    return f"c{numbers[0]}" if len(numbers) == 1 else f"c{numbers[0]}-c{numbers[-1]}"


def _figures(shown: Outline, numbers: list[int]) -> tuple[str, ...]:
    tokens, trained = shown.total(numbers)
    calls = "1 call" if len(numbers) == 1 else f"{len(numbers)} calls"
    took = duration(shown.seconds(numbers))
    return calls, f"{amount(tokens)} tok", f"{amount(trained)} trained" if trained else "", took


def _aligned(rows: list[_Row], width: int) -> Iterator[Text]:
    """Labels to the left and figures in columns to the right; a narrow terminal has the first columns only."""
    sizes = [max((len(row.figures[k]) for row in rows if row.figures), default=0) for k in range(_FIGURES)]
    shown = _FIGURES
    while shown > 1 and width - sum(2 + size for size in sizes[:shown]) < _LEAST_LABEL:
        shown -= 1
    sizes = sizes[:shown]
    room = width - sum(2 + size for size in sizes)
    figured = [len(_guide(r.depth)) + len(r.label) + (len(r.title) + 3 if r.title else 0) for r in rows if r.figures]
    left = min(max(figured, default=0), room)
    for row in rows:
        line = Text.assemble((_guide(row.depth), _QUIET))
        line.append_text(row.label)
        if not row.figures:
            yield from wrapped(line, width, guide=Text.assemble((_below(row.depth), _QUIET)))
            continue
        if row.title and left - len(line) >= _LEAST_TITLE:
            line.append(f' "{shorten(row.title, left - len(line) - 3, placeholder=" ...")}"', style=_QUIET)
        if len(line) > left:
            yield line
            line = Text.assemble((_below(row.depth), _QUIET))
        line.append(" " * (left - len(line)))
        for figure, size in zip(row.figures, sizes, strict=False):
            line.append(f"  {figure:>{size}}", style=_QUIET if figure.endswith("trained") else "")
        line.rstrip()
        yield line


def _below(depth: tuple[bool, ...]) -> str:
    """Guides of a line that goes on from the one above."""
    return "".join("   " if last else "|  " for last in depth) + "  "


def _guide(depth: tuple[bool, ...]) -> str:
    if not depth:
        return ""
    return "".join("   " if last else "|  " for last in depth[:-1]) + ("`- " if depth[-1] else "|- ")


def _ending(shown: Outline, counts: TreeCounts, width: int, folded: int | None) -> Iterator[Text]:
    cap = "no J_max" if shown.j_max is None else f"J_max {shown.j_max}"
    yield Text(f"{len(shown.kept)} of {shown.num_candidates} trajectories kept ({cap})")
    beyond = [x for x in shown.excluded if x.node_id is not None]
    left = Counter(x.reason for x in shown.excluded if x.call_id is not None) + Counter(x.reason for x in beyond)
    if left:
        told = "not trained: " + ", ".join(f"{number} {_reason(reason)}" for reason, number in left.most_common())
        yield from wrapped(Text(told), width, indent=2)
    if counts.kept_tokens and not any(row.status == ScoreStatus.SCORED for row in shown.execution.scores):
        yield Text("not scored: RL leaves it out until it is; trained is what it would give", style=_QUIET)
    if not counts.kept_tokens and left[Reason.NO_LOGPROBS]:
        yield Text("recorded without log-probs: RL cannot train on it, SFT can", style=_WRONG)
    if left[Reason.TEXT_ONLY]:
        yield Text("imported as text: tokens are local counts, for SFT and inspection", style=_QUIET)
    if left[Reason.HOSTED]:
        told = "recorded from a hosted API: tokens are local counts, only the text can be used"
        yield from wrapped(Text(told, style=_QUIET), width, indent=2)
    if folded is not None:
        yield Text(f"folded at depth {folded}; more: --depth {folded + 1}, every call: --all", style=_QUIET)


def _next(shown: Outline, short: str, where: str, others: int) -> list[str]:
    more = [f"why: gyre explain {where} {short}", f"read: gyre tree {where} {short}:{_last(shown)}"]
    segments = [segment for lane in shown.walk() for segment in lane.segments]
    if any(segment.events for segment in segments):
        more.append(f"lost calls: gyre tree {where} {short} --retries")
    if any((segment.opening or {}).get("kind") == "fork" for segment in segments):
        more.append(f"why it forked: gyre tree {where} {short} --breaks")
    if others:
        more.append(f"{others} other execution{'s' if others > 1 else ''}: gyre ls {where}")
    return more


def _last(shown: Outline) -> str:
    """The call whose path is the natural one to read: the last of the first lane."""
    numbers = [n for lane in shown.lanes[:1] for segment in lane.segments for n in segment.calls]
    return f"c{max(numbers, default=1)}"


def _reason(reason: Reason) -> str:
    names = {
        Reason.BEYOND_J_MAX: "trajectories beyond J_max",
        Reason.NOTHING_NEW: "trajectories with nothing to train",
        Reason.CALL_FAILED: "failed",
        Reason.CALL_ABORTED: "aborted",
        Reason.ROLE_SIDE: "side calls",
        Reason.ROLE_UNKNOWN: "of unknown role",
        Reason.NO_LOGPROBS: "without log-probs",
        Reason.HOSTED: "sampled by a hosted API",
        Reason.GREEDY: "sampled at T = 0",
    }
    return names.get(reason, reason.value.replace("_", " "))
