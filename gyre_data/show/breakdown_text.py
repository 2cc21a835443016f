"""The tables of `gyre stats --by`: what is never trained, has no signal or failed is red."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from gyre_data.breakdown import CallCounts, EvaluatorGroup, TaskCounts
from gyre_data.outages import Outage
from gyre_data.tools import ToolCounts, ToolShares

from .layout import wrapped
from .numbers import DASH, amount, count, duration, plural, ratio, share
from .stats_text import outage_text

__all__ = ["call_lines", "evaluator_lines", "task_lines", "tool_lines"]

_WRONG = "bold red"

Row = tuple[tuple[str, ...], str]
"""Cells and style."""


def call_lines(rows: Sequence[CallCounts], cut: str, *, width: int = 80) -> Iterator[Text]:
    """By role or client."""
    heads = (cut, "execs", "calls", "distinct", "sampled", "trainable", "kept", "not trained")
    return _table(heads, [_call_row(row) for row in rows], width)


def _call_row(row: CallCounts) -> Row:
    why = ", ".join(f"{reason.replace('_', ' ')} {number}" for reason, number in row.not_trained.items())
    tokens = (row.distinct_tokens, row.sampled_tokens, row.trainable_tokens, row.kept_tokens)
    wrong = row.name in ("unknown", "unknown_value")
    cells = (row.name, count(row.executions), count(row.calls), *(amount(n) for n in tokens), why)
    return cells, _WRONG if wrong else ""


def task_lines(rows: Sequence[TaskCounts], *, width: int = 80) -> Iterator[Text]:
    """By task."""
    heads = ("task", "executions", "calls", "distinct", "sharing", "trainable", "p50", "mean score")
    return _table(heads, [_task_row(row) for row in rows], width)


def _task_row(row: TaskCounts) -> Row:
    failed = row.by_state.get("evaluator_failed", 0)
    scores = ", ".join(f"{name} {value:.2f}" for name, value in row.scores.items()) or DASH
    note = f"; evaluator failed {failed}, not counted as zero" if failed else ""
    cells = (
        row.task,
        f"{row.by_state.get('scored', 0)} of {row.executions} scored",
        count(row.calls),
        amount(row.distinct_tokens),
        ratio(row.sharing),
        amount(row.trainable_tokens),
        duration(row.duration_p50_s),
        scores + note,
    )
    return cells, _WRONG if failed else ""


def tool_lines(found: ToolShares, *, width: int = 80) -> Iterator[Text]:
    """By tool, with what was neither a result nor a call."""
    if found.tools:
        heads = ("tool", "calls", "results", "in prompts", "sampled", "as sent", "")
        yield from _table(heads, [_tool_row(tool, found) for tool in found.tools], width)
    else:
        yield Text("no tool call and no result in the messages that were recorded")
    if found.sampled_tokens:
        text, reasoning = (share(n, found.sampled_tokens) for n in (found.text_tokens, found.reasoning_tokens))
        yield Text(f"text ~{text}  reasoning ~{reasoning} of sampled tokens, which are split by bytes", style="dim")
    if found.messages_missing:
        yield Text(f"{count(found.messages_missing)} messages are not in the run: in no figure", style=_WRONG)
    for execution_id in found.left_out:
        yield Text(f"{execution_id} is inconsistent and in no figure: gyre verify says why", style=_WRONG)


def _tool_row(tool: ToolCounts, found: ToolShares) -> Row:
    prompt = f"{amount(tool.result_tokens)} {share(tool.result_tokens, found.prompt_tokens)}"
    sampled = f"~{amount(tool.argument_tokens)} {share(tool.argument_tokens, found.sampled_tokens)}"
    sent = f"~{amount(tool.sent_tokens)} {share(tool.sent_tokens, found.sent_tokens)}"
    cells = (tool.tool, count(tool.calls), count(tool.results), prompt, sampled, sent, "")
    return cells, ""


def evaluator_lines(rows: Sequence[EvaluatorGroup], outages: Sequence[Outage], *, width: int = 80) -> Iterator[Text]:
    """By evaluator and group, then every outage."""
    heads = ("evaluator", "group", "task", "scored", "failed", "mean", "std", "range", "")
    yield from _table(heads, [_evaluator_row(row) for row in rows], width)
    for outage in outages:
        hit = ", ".join(outage.executions)
        line = Text(f"outage  {outage.evaluator}  {plural(outage.failures, 'failure')}  ").append_text(
            outage_text(outage)
        )
        yield from wrapped(line.append(f"  hit {hit}"), width, indent=8)


def _evaluator_row(row: EvaluatorGroup) -> Row:
    note = f"{row.failed} failed, not counted as zero" if row.failed else ""
    if row.std == 0 and row.scored > 1:
        note = "equal scores, no signal" + (f"; {note}" if note else "")
    elif row.scored < 2:
        note = "fewer than 2 valid scores: dropped" + (f"; {note}" if note else "")
    spread = DASH if row.minimum is None or row.maximum is None else f"{row.minimum:.2f} to {row.maximum:.2f}"
    figures = (DASH if value is None else f"{value:.2f}" for value in (row.mean, row.std))
    scored = f"{row.scored} of {row.executions}"
    names = (row.evaluator, row.group_id or DASH, row.task_id or DASH)
    return (*names, scored, count(row.failed), *figures, spread, note), _WRONG if note else ""


def _table(heads: Sequence[str], rows: Sequence[Row], width: int) -> Iterator[Text]:
    """First and last columns to the left, figures to the right; a last column that is too long wraps below itself."""
    if not rows:
        yield Text("nothing recorded yet")
        return
    sizes = [max(len(head), *(len(cells[k]) for cells, _ in rows)) for k, head in enumerate(heads)]
    before = sum(size + 2 for size in sizes[:-1])
    indent = before if width - before >= 20 else 4
    sizes[0] -= min(max(0, before + len(heads[-1]) - width), sizes[0] - len(heads[0]))  # the heads stand on one line
    for cells, style in [(tuple(heads), "bold"), *rows]:
        padded = [
            f"{cell:<{size}}" if k in (0, len(cells) - 1) else f"{cell:>{size}}"
            for k, (cell, size) in enumerate(zip(cells, sizes, strict=True))
        ]
        yield from wrapped(Text("  ".join(padded).rstrip(), style=style), width, indent=indent)
