"""`gyre stats` as text: a labelled line per question; false forks and failed evaluators stand out in red."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from gyre_data.breakdown import EvaluatorGroup, RoleCounts
from gyre_data.counts import TreeCounts
from gyre_data.hosted import Hosted
from gyre_data.run_stats import EvaluatorCounts, Stats

from .numbers import DASH, amount, count, dollars, duration, ratio, share

__all__ = ["breakdown_lines", "stats_lines"]

_WRONG = "bold red"
_LABEL = 12


def stats_lines(found: Stats, *, where: str) -> Iterator[Text]:
    """The lines of `gyre stats`; `where` names the run for the next command."""
    trees = found.trees
    yield _executions(found)
    if found.end_reasons:
        yield _line("ended", *_named(found.end_reasons, wrong=("crashed", "infra_fault")))
    on_paths = trees.trajectory_message_nodes
    yield _line(
        "nodes",
        f"{count(trees.message_nodes)} messages"
        + ("" if on_paths == trees.message_nodes else f"  on trajectories {count(on_paths)}"),
        f"{count(trees.occurrences)} if expanded ({count(trees.repeats)} repeats, {ratio(trees.sharing_nodes)})",
        f"{count(trees.trajectories)} trajectories, {count(trees.trajectories_kept)} kept ({_cap(found)})",
    )
    yield _tokens(trees)
    yield _roles(trees)
    yield _forks(trees)
    if trees.changed_echoes:
        changed = _named(dict(trees.changed_echoes.most_common()))
        yield _line("echoes", "turns that came back changed:", *changed)
    for evaluator in found.evaluators:
        yield _evaluator(evaluator)
    if found.hosted is not None:
        yield _hosted(found.hosted)
    if trees.version_tokens:
        yield _line("versions", *(f"{name} {amount(n)}" for name, n in sorted(trees.version_tokens.items())))
    if trees.not_trained:
        yield _line("not trained", *_named(dict(trees.not_trained.most_common())), "(calls)")
    yield Text(f"next: gyre tree {where}   gyre stats {where} --json", style="dim")


def _line(label: str, *parts: str | Text) -> Text:
    told = Text(f"{label:<{_LABEL}}")
    told.append_text(Text("  ").join(Text(part) if isinstance(part, str) else part for part in parts))
    return told


def _named(found: dict[str, int], wrong: tuple[str, ...] = ()) -> Iterator[Text]:
    for name, number in found.items():
        yield Text(f"{name.replace('_', ' ')} {count(number)}", style=_WRONG if name in wrong else "")


def _cap(found: Stats) -> str:
    return "no J_max" if found.j_max is None else f"J_max {found.j_max}"


def _executions(found: Stats) -> Text:
    told = Text(f"{'executions':<{_LABEL}}{count(found.executions)}")
    order = ("scored", "evaluator_failed", "unscored", "running")
    states = [name for name in order if found.by_state.get(name)]
    for place, name in enumerate(states):
        told.append(": " if place == 0 else ", ")
        told.append(
            f"{count(found.by_state[name])} {name.replace('_', ' ')}",
            style=_WRONG if name == "evaluator_failed" else "",
        )
    trees = found.trees
    told.append(f"  in {count(found.groups)} groups  calls {count(trees.calls)}")
    pairs = (
        (trees.calls_failed, "failed"),
        (trees.calls_aborted, "aborted"),
        (trees.calls_undelivered, "undelivered"),
        (trees.calls_delivery_unknown, "delivery unknown"),
    )
    wrong = ", ".join(f"{count(number)} {what}" for number, what in pairs if number)
    if wrong:
        told.append(" (").append(wrong, style=_WRONG).append(")")
    told.append(f"  p50 {duration(found.duration_p50_s)}")
    return told


def _tokens(trees: TreeCounts) -> Text:
    local = " (local count)" if trees.counted_tokens else ""
    parts: list[str | Text] = [f"distinct {amount(trees.distinct_tokens)}{local}"]
    if trees.trajectory_tokens != trees.distinct_tokens:
        parts.append(f"on trajectories {amount(trees.trajectory_tokens)}")
    parts += [
        f"expanded {amount(trees.expanded_tokens)}",
        f"sharing {ratio(trees.sharing)}",
        f"sampled {amount(trees.sampled_tokens)}",
        Text(f"trainable {amount(trees.trainable_tokens)}", style="" if trees.trainable_tokens else _WRONG),
        f"kept {amount(trees.kept_tokens)}",
    ]
    return _line("tokens", *parts)


def _roles(trees: TreeCounts) -> Text:
    found = trees.role_tokens
    whole = sum(found.values())
    parts = {
        "main": found["main"],
        "sub_agent": found["sub_agent"],
        "summaries": found["main_summary"] + found["sub_agent_summary"],
        "side": found["side"],
    }
    unknown = whole - sum(parts.values())
    told: list[str | Text] = [f"{name} {share(part, whole)}" for name, part in parts.items() if part]
    if unknown:
        told.append(Text(f"unknown {share(unknown, whole)}  <- never trained; look: --by role", style=_WRONG))
    return _line("roles", *(told or ["-"]))


def _forks(trees: TreeCounts) -> Text:
    real: list[str | Text] = [f"{name} {count(number)}" for name, number in trees.forks.most_common()]
    rate = f" ({share(trees.false_forks, trees.turns)})" if trees.turns else ""
    lost = f", {amount(trees.false_fork_tokens)} tok lost: " if trees.false_forks else ""
    checks = ", ".join(f"{name} {count(number)}" for name, number in trees.false_fork_checks.most_common())
    false = Text(f"FALSE {count(trees.false_forks)} of {count(trees.turns)} turns{rate}{lost}{checks}")
    false.stylize(_WRONG if trees.false_forks else "green")
    return _line("forks", *real, false)


def _hosted(found: Hosted) -> Text:
    used = found.usage
    parts: list[str | Text] = [f"in {amount(used.input)}", f"cache read {amount(used.cache_read)}"]
    parts += [f"write {amount(used.cache_write + used.cache_write_1h)}", f"out {amount(used.output)}"]
    if found.cost is not None:
        parts.append(f"~ {dollars(found.cost)} list price ({found.prices_day})")
    if found.unpriced:
        names = ", ".join(f"{name} {count(number)}" for name, number in found.unpriced.most_common(3))
        parts.append(Text(f"no price for {names} (calls): give --prices FILE", style=_WRONG))
    if found.unknown_usage:
        parts.append(f"usage unknown {count(found.unknown_usage)} of {count(found.calls)} calls")
    return _line("hosted", *parts)


def _evaluator(found: EvaluatorCounts) -> Text:
    parts: list[str | Text] = [found.evaluator, f"scored {count(found.scored)}"]
    if found.mean is not None and found.minimum is not None and found.maximum is not None:
        parts.append(f"mean {found.mean:.2f} ({found.minimum:.2f} to {found.maximum:.2f})")
    if found.partial:
        parts.append(f"partial {count(found.partial)}")
    if found.skipped:
        parts.append(f"skipped {count(found.skipped)}")
    if found.failed and found.first_failed_at is not None and found.last_failed_at is not None:
        first, last = (at.strftime("%H:%M") for at in (found.first_failed_at, found.last_failed_at))
        when = first if first == last else f"{first}-{last}"
        parts.append(Text(f"failed {count(found.failed)} at {when} UTC: not counted as zero", style=_WRONG))
    return _line("evaluator", *parts)


def breakdown_lines(rows: Sequence[RoleCounts] | Sequence[EvaluatorGroup]) -> Iterator[Text]:
    """The table of `gyre stats --by`; a group without signal, a failed evaluator and an unknown role are red."""
    table = [_role_row(row) if isinstance(row, RoleCounts) else _evaluator_row(row) for row in rows]
    if not table:
        yield Text("nothing recorded yet")
        return
    heads = _ROLE_HEADS if isinstance(rows[0], RoleCounts) else _EVALUATOR_HEADS
    sizes = [max(len(head), *(len(cells[k]) for cells, _ in table)) for k, head in enumerate(heads)]
    yield _cells(heads, sizes, "bold")
    for cells, style in table:
        yield _cells(cells, sizes, style)


_ROLE_HEADS = ("role", "calls", "distinct", "sampled", "trainable", "kept", "not trained (calls)")
_EVALUATOR_HEADS = ("evaluator", "group", "task", "scored", "failed", "mean", "std", "range", "")


def _cells(cells: Sequence[str], sizes: Sequence[int], style: str) -> Text:
    """First and last columns to the left, figures to the right."""
    padded = [
        f"{cell:<{size}}" if k == 0 or k == len(cells) - 1 else f"{cell:>{size}}"
        for k, (cell, size) in enumerate(zip(cells, sizes, strict=True))
    ]
    return Text("  ".join(padded).rstrip(), style=style)


def _role_row(row: RoleCounts) -> tuple[tuple[str, ...], str]:
    why = ", ".join(f"{reason.replace('_', ' ')} {number}" for reason, number in row.not_trained.items())
    tokens = (row.distinct_tokens, row.sampled_tokens, row.trainable_tokens, row.kept_tokens)
    wrong = row.role in ("unknown", "unknown_value")
    return (row.role, count(row.calls), *(amount(n) for n in tokens), why), _WRONG if wrong else ""


def _evaluator_row(row: EvaluatorGroup) -> tuple[tuple[str, ...], str]:
    note = f"{row.failed} failed, not counted as zero" if row.failed else ""
    if row.std == 0 and row.scored > 1:
        note = "equal scores, no signal" + (f"; {note}" if note else "")
    elif row.scored < 2:
        note = "fewer than 2 valid scores: dropped" + (f"; {note}" if note else "")
    spread = DASH if row.minimum is None or row.maximum is None else f"{row.minimum:.2f} to {row.maximum:.2f}"
    figures = (DASH if value is None else f"{value:.2f}" for value in (row.mean, row.std))
    scored = f"{row.scored} of {row.executions}"
    cells = (
        row.evaluator,
        row.group_id or DASH,
        row.task_id or DASH,
        scored,
        count(row.failed),
        *figures,
        spread,
        note,
    )
    return cells, _WRONG if note else ""
