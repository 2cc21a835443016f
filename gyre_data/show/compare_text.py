"""`gyre diff` and `gyre search` as text."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import shorten

from rich.text import Text

from gyre_data.diff import Diff, Differs, DiffSide, DiffStep, argument_changes
from gyre_data.path import PathMessage
from gyre_data.search import Hit
from gyre_data.texts import parts_of, said

from .layout import flow, hints, wrapped
from .numbers import DASH, amount, count, counted, duration

__all__ = ["diff_lines", "hit_lines"]

_QUIET = "dim"
_A, _B = "red", "green"
_SHOWN_LINES = 12
_LABEL = 9


def diff_lines(
    found: Diff, *, names: tuple[str, str], where: str, width: int = 80, full: bool = False
) -> Iterator[Text]:
    """Both outcomes in columns, then the conversation: what is the same in a line, what differs opened."""
    column = max((width - _LABEL) // 2 - 2, 12)
    rows = [(names[0], names[1], "bold"), *_outcomes(found.a, found.b)]
    labels = ("", "task", "end", "score", "calls", "messages", "tokens", "sampled", "time", "tools")
    for label, (one, two, style) in zip(labels, rows, strict=True):
        left, right = shorten(one, column, placeholder="..."), shorten(two, column, placeholder="...")
        line = Text.assemble((f"{label:<{_LABEL}}", "bold"), (f"{left:<{column}}  ", style and f"{style} {_A}"))
        line.append(right, style=style and f"{style} {_B}")
        line.rstrip()
        yield line
    if found.shared.nodes:
        told = f"the first {counted(found.shared.nodes, 'node')} ({amount(found.shared.tokens)} tok) shared on the tree"
        yield Text(told, style=_QUIET)
    for step in found.steps:
        yield from _step(step, width, full)
    if all(step.kind is Differs.SAME for step in found.steps):
        yield Text("both say the same", style="bold green")
    next_ = [f"read: gyre tree {where} {names[0]}", f"gyre tree {where} {names[1]}"]
    yield from hints(next_, width)


def _outcomes(a: DiffSide, b: DiffSide) -> Iterator[tuple[str, str, str]]:
    """A row per figure; where the sides differ it is bold."""

    def scores(side: DiffSide) -> str:
        told = (f"{DASH if value is None else f'{value:.2f}'} ({name})" for name, value in side.scores.items())
        return ", ".join(told) or DASH

    def task(side: DiffSide) -> str:
        return f"{side.task_id or DASH}" + (f" #{side.sample_index}" if side.sample_index is not None else "")

    def tools(side: DiffSide) -> str:
        return ", ".join(f"{name} {number}" for name, number in side.tools.items()) or DASH

    for one, two in (
        (task(a), task(b)),
        (str(a.end_reason or "running"), str(b.end_reason or "running")),
        (scores(a), scores(b)),
        (count(a.num_calls), count(b.num_calls)),
        (count(a.num_messages), count(b.num_messages)),
        (amount(a.num_tokens), amount(b.num_tokens)),
        (amount(a.num_sampled), amount(b.num_sampled)),
        (duration(a.seconds), duration(b.seconds)),
        (tools(a), tools(b)),
    ):
        yield one, two, "bold" if one != two else ""


def _step(step: DiffStep, width: int, full: bool) -> Iterator[Text]:
    if step.kind is Differs.SAME:
        roles = ", ".join(f"{role} {number}" for role, number in Counter(m.role for m in step.a).items())
        told = f"  {counted(len(step.a), 'message')} the same ({roles}, {amount(sum_tokens(step.a))} tok)"
        yield Text(told, style=_QUIET)
        return
    if step.kind is Differs.CHANGED:
        yield from _changed(step.a[0], step.b[0], width, full)
        return
    sign, style, message = ("-", _A, step.a[0]) if step.a else ("+", _B, step.b[0])
    yield Text.assemble((f"{sign} ", style), (f"message {message.index} {message.role}", f"bold {style}"))
    lines = [line for _, text in parts_of(message.value) for line in text.splitlines()]
    yield from _cut([(f"{sign} {line}", style) for line in lines], width, full)


def sum_tokens(messages: Sequence[PathMessage]) -> int:
    """Tokens of these messages; those rendered together are counted once."""
    return sum(end - start for start, end in {(m.start, m.end) for m in messages})


def _changed(a: PathMessage, b: PathMessage, width: int, full: bool) -> Iterator[Text]:
    yield Text(f"~ message {a.index}" + ("" if a.index == b.index else f" and {b.index}") + f" {a.role}", style="bold")
    changes = argument_changes(a.value, b.value)
    if changes is not None and said(a.value)[1:3] == said(b.value)[1:3]:
        lines = []
        for name, one, two in changes:
            lines += [] if one is None else [(f"- {name}: {one}", _A)]
            lines += [] if two is None else [(f"+ {name}: {two}", _B)]
    else:
        old, new = ([line for _, text in parts_of(m.value) for line in text.splitlines()] for m in (a, b))
        told = [line for line in list(difflib.unified_diff(old, new, lineterm="", n=1))[2:] if line[:2] != "@@"]
        lines = [(f"{line[:1]} {line[1:]}", {"-": _A, "+": _B}.get(line[:1], _QUIET)) for line in told]
    yield from _cut(lines, width, full)


def _cut(lines: Sequence[tuple[str, str]], width: int, full: bool) -> Iterator[Text]:
    shown = lines if full else lines[:_SHOWN_LINES]
    for line, style in shown:
        flat = line.replace("\n", "\\n")
        if full:
            yield from wrapped(Text(f"  {flat}", style=style), width, indent=4)
        else:
            yield Text(f"  {flat if len(flat) <= width - 2 else flat[: width - 6] + ' ...'}", style=style)
    if len(shown) < len(lines):
        yield Text(f"  ... {count(len(lines) - len(shown))} lines more: --full", style=_QUIET)


def hit_lines(
    hits: Sequence[Hit], *, text: str, shorts: dict[str, str], where: str, width: int = 80, cut: bool = False
) -> Iterator[Text]:
    """Two lines a hit: where it is and who says it, and the text around the first match."""
    for hit in hits:
        head = Text.assemble((f"{shorts[hit.execution_id]}:c{hit.number}", "bold cyan"), f"  {hit.role} {hit.part}")
        if hit.num_matches > 1:
            head.append(f", {count(hit.num_matches)} matches")
        yield from flow([head, Text(hit.node_id, style=_QUIET)], width)
        before, match, after = (part.replace("\n", "\\n") for part in (hit.before, hit.match, hit.after))
        room = max(width - 4 - len(match), 10)
        before = before if len(before) <= room // 2 else "..." + before[-(room // 2 - 3) :]
        after = after if len(after) <= room - len(before) else after[: max(room - len(before) - 4, 0)] + " ..."
        yield Text.assemble("    ", (before, _QUIET), (match, "bold reverse"), (after, _QUIET))
    if not hits:
        yield Text(f"no message holds {text!r}")
        return
    of = len({hit.execution_id for hit in hits})
    told = f"{counted(len(hits), 'hit')} in {counted(of, 'execution')}"
    yield Text(told + (", more may follow: --limit 0 shows all" if cut else ""))
    first = f"{shorts[hits[0].execution_id]}:c{hits[0].number}"
    yield Text(f"read: gyre tree {where} {first}", style=_QUIET)
