"""`gyre tree` as text: header, totals, lanes with folded runs of calls, and what to type next. Red is what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from gyre_data.counts import TreeCounts, count_tree
from gyre_data.eligible import Reason
from gyre_data.scores import latest_scored
from gyre_data.types import PolicyVersion, Score

from .numbers import DASH, amount, count, duration, ratio
from .outline import Lane, Outline, Segment

__all__ = ["score_text", "tree_lines"]

_WRONG = "bold red"
_QUIET = "dim"
_FOLDED = ("side", "unknown")
"""Lanes of which only the header and false forks are shown: their calls have nothing to do with one another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One line of the tree before alignment: guides, label, and up to three columns of figures."""

    depth: tuple[bool, ...]
    """Per level whether that level's item is the last of its siblings."""
    label: Text
    figures: tuple[str, str, str] | None = None


def tree_lines(shown: Outline, *, short: str, where: str) -> list[Text]:
    """The lines of `gyre tree`; `short` is the shortest unique id, `where` the run's path for the next command."""
    counts = count_tree(shown.tree, j_max=shown.j_max)
    rows = [row for lane in shown.lanes for row in _lane(shown, lane, ())]
    return [
        _header(shown, counts, short),
        _totals(counts),
        *_aligned(rows),
        *_ending(shown, counts, short, where),
    ]


def score_text(scores: tuple[Score, ...] | list[Score]) -> Text:
    """Latest verdict of every evaluator: `0.50 partial (pytest@3)`; `-` when nothing was judged."""
    told = Text()
    for name in sorted({row.evaluator for row in scores}):
        row = latest_scored(scores, name)
        if row is None:
            last = [s for s in scores if s.evaluator == name][-1]
            told.append(f"  {name} {last.status}", style=_WRONG if last.status == "failed" else "")
            continue
        version = f"@{row.evaluator_version}" if row.evaluator_version else ""
        told.append(f"  {row.value:.2f}{' partial' if row.partial else ''} ({name}{version})", style="bold")
    return told or Text(f"  score {DASH}")


def _header(shown: Outline, counts: TreeCounts, short: str) -> Text:
    info = shown.execution.info
    told = Text()
    told.append(short, style="bold cyan")
    told.append(f" {info.task_id or DASH}")
    told.append(f" #{info.sample_index}" if info.sample_index is not None else "")
    harness = " ".join(part for part in (info.harness, info.harness_version) if part)
    told.append(f"  {harness or DASH}")
    models = sorted({call.served_model for call in shown.tree.calls if call.served_model})
    told.append(f"  model {', '.join(models)}" if models else f"  policy {_versions(counts)}")
    if info.running:
        told.append("  running", style="bold yellow")
    else:
        bad = info.end_reason in ("crashed", "infra_fault", "unknown_value", None)
        told.append(f"  {str(info.end_reason or DASH).replace('_', ' ')}", style=_WRONG if bad else "")
    if info.started_at and info.ended_at:
        told.append(f"  {duration((info.ended_at - info.started_at).total_seconds())}", style=_QUIET)
    return told + score_text(shown.execution.scores)


def _versions(counts: TreeCounts) -> str:
    """`run:4>5` for one lineage, `a:0, b:3` for several; `-` when none was recorded."""
    numbers: dict[str, list[int]] = {}
    for text in counts.version_tokens:
        if text != "unknown":
            version = PolicyVersion.parse(text)
            numbers.setdefault(version.policy_id, []).append(version.n)
    parts = [f"{name}:{'>'.join(str(n) for n in sorted({min(ns), max(ns)}))}" for name, ns in sorted(numbers.items())]
    return ", ".join(parts) or DASH


def _totals(counts: TreeCounts) -> Text:
    told = Text(f"{count(counts.calls)} {'call' if counts.calls == 1 else 'calls'}")
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
        told.append(" (").append(", ".join(wrong), style=_WRONG).append(")")
    told.append(f"  {count(counts.message_nodes)} message nodes")
    if counts.trajectory_message_nodes not in (0, counts.message_nodes):
        told.append(f", {count(counts.trajectory_message_nodes)} on trajectories")
    if counts.trajectories:
        told.append(f", {count(counts.occurrences)} if expanded ({ratio(counts.sharing_nodes)})")
    told.append(f"  {amount(counts.distinct_tokens)} tok")
    told.append(f", {amount(counts.kept_tokens)} trained", style="" if counts.kept_tokens else _WRONG)
    return told


def _lane(shown: Outline, lane: Lane, depth: tuple[bool, ...]) -> Iterator[_Row]:
    label = Text(_lane_name(lane), style=_WRONG if lane.kind == "unknown" else "bold")
    if lane.title:
        label.append(f' "{lane.title}"', style=_QUIET)
    if lane.spawned_at is not None:
        label.append(f" from c{lane.spawned_at}", style="not bold")
    elif lane.kind == "sub_agent":
        label.append(" from an unknown call", style="not bold")
    children = list(_children(shown, lane))
    one_run = lane.kind == "sub_agent" and len(children) == 1 and not children[0].below
    if one_run or lane.kind in _FOLDED:
        label.append(f"  {_span(lane.calls)}", style="not bold")
        children = [] if one_run else children
    yield _Row(depth=depth, label=label, figures=_figures(shown, lane.calls))
    for place, child in enumerate(children):
        yield from _indented(child, (*depth, place == len(children) - 1))


def _lane_name(lane: Lane) -> str:
    names = {"side": "side calls, never trained", "unknown": "unknown role, never trained"}
    name = names.get(lane.kind, lane.kind)
    return f"{name} {lane.agent_id}" if lane.agent_id and lane.kind == "sub_agent" else name


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """A line with the lines below it."""

    label: Text
    figures: tuple[str, str, str] | None = None
    below: tuple[Any, ...] = ()
    lane: Lane | None = None
    shown: Outline | None = None


def _indented(item: _Item, depth: tuple[bool, ...]) -> Iterator[_Row]:
    if item.lane is not None and item.shown is not None:
        yield from _lane(item.shown, item.lane, depth)
        return
    yield _Row(depth=depth, label=item.label, figures=item.figures)
    for place, child in enumerate(item.below):
        yield from _indented(child, (*depth, place == len(item.below) - 1))


def _children(shown: Outline, lane: Lane) -> Iterator[_Item]:
    """Openings and runs of a lane in order; a fork holds its own run, since it leads away from the line."""
    for segment in lane.segments:
        if lane.kind in _FOLDED and not (segment.opening or {}).get("false"):
            continue
        run = _Item(
            label=Text(_span(segment.calls)),
            figures=_figures(shown, segment.calls),
            below=(*_events(shown, segment), *(_Item(label=Text(), lane=a, shown=shown) for a in segment.agents)),
        )
        if segment.opening is None:
            yield run
        elif segment.opening["kind"] == "compaction":
            yield _Item(label=_compaction(segment.opening))
            yield run
        else:
            yield _Item(label=_fork(segment.opening), below=(run,))


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
    told = Text("compaction", style="bold magenta")
    told.append(f" {_at(opening)}  {amount(opening['tokens_before'])} > {amount(opening['tokens_after'])}", style="")
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
        told = Text("FALSE fork", style=_WRONG)
        told.append(
            f" {_at(opening)}  check: {opening['check']}; {amount(opening['tokens_lost'])} tok lost", style=_WRONG
        )
        return told
    told = Text("fork", style="bold yellow")
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


def _figures(shown: Outline, numbers: list[int]) -> tuple[str, str, str]:
    tokens, trained = shown.total(numbers)
    calls = "1 call" if len(numbers) == 1 else f"{len(numbers)} calls"
    return calls, f"{amount(tokens)} tok", f"{amount(trained)} trained" if trained else ""


def _aligned(rows: list[_Row]) -> Iterator[Text]:
    guides = [_guide(row.depth) for row in rows]
    figured = [len(g) + len(row.label) for g, row in zip(guides, rows, strict=True) if row.figures]
    width = min(max(figured, default=0), 64)
    sizes = [max((len(row.figures[k]) for row in rows if row.figures), default=0) for k in range(3)]
    for guide, row in zip(guides, rows, strict=True):
        line = Text(guide, style=_QUIET)
        line.append_text(row.label)
        if row.figures:
            line.append(" " * (width - len(line)))
            for figure, size in zip(row.figures, sizes, strict=True):
                line.append(f"  {figure:>{size}}", style=_QUIET if figure.endswith("trained") else "")
        line.rstrip()
        yield line


def _guide(depth: tuple[bool, ...]) -> str:
    if not depth:
        return ""
    return "".join("   " if last else "|  " for last in depth[:-1]) + ("`- " if depth[-1] else "|- ")


def _ending(shown: Outline, counts: TreeCounts, short: str, where: str) -> Iterator[Text]:
    cap = "no J_max" if shown.j_max is None else f"J_max {shown.j_max}"
    yield Text(f"{len(shown.kept)} of {shown.num_candidates} trajectories kept ({cap})")
    beyond = [x for x in shown.excluded if x.node_id is not None]
    left = Counter(x.reason for x in shown.excluded if x.call_id is not None) + Counter(x.reason for x in beyond)
    if left:
        told = Text("not trained: ", style="")
        told.append(", ".join(f"{number} {_reason(reason)}" for reason, number in left.most_common()))
        yield told
    if not counts.kept_tokens and left[Reason.NO_LOGPROBS]:
        yield Text("recorded without log-probs: RL cannot train on it, SFT can", style=_WRONG)
    if left[Reason.HOSTED]:
        yield Text("recorded from a hosted API: tokens are local counts, only the text can be used", style=_QUIET)
    yield Text(f"next: gyre tree {where} {short} --json   gyre stats {where}", style=_QUIET)


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
