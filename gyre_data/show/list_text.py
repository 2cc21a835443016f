"""`gyre ls` as text: a line per execution or run; on a narrow terminal the last columns are left out, never an id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from gyre_data.listing import ExecutionState, ExecutionSummary, RunSummary

from .layout import flow, hints
from .numbers import DASH, amount, dollars

__all__ = ["execution_line", "execution_list", "run_list"]

_WRONG, _QUIET = "bold red", "dim"
_BAD_ENDS = ("crashed", "infra_fault")


def execution_list(found: Sequence[ExecutionSummary], *, where: str, width: int = 80) -> Iterator[Text]:
    """One line an execution: id, task and number, end or state, score, calls, tokens, price, group, harness."""
    if not found:
        yield Text(f"{where} holds no execution yet")
        return
    names = {e.evaluator for e in found if e.evaluator is not None}
    one = next(iter(names)) if len(names) == 1 else None
    columns = [
        ("execution", [Text(e.execution_id) for e in found]),
        ("task", [_task(e) for e in found]),
        ("state", [_state(e) for e in found]),
        ("score" if one is None else f"score ({one})", [_score(e, named=one is None) for e in found]),
        ("calls", [_calls(e) for e in found]),
        ("tokens", [Text(amount(e.num_tokens)) for e in found]),
        ("sampled", [Text(amount(e.num_sampled_tokens)) for e in found]),
        ("list price", [Text(DASH if e.cost is None else dollars(e.cost)) for e in found]),
        ("group", [Text(e.group_id or DASH) for e in found]),
        ("harness", [Text(e.harness or DASH) for e in found]),
    ]
    told = [column for column in columns if any(cell.plain != DASH for cell in column[1])]
    yield from _table(told, width)
    next_ = [f"what would be trained: gyre explain {where}", f"look at one: gyre tree {where} EXECUTION"]
    yield from hints(next_, width)


def execution_line(e: ExecutionSummary) -> Text:
    """An execution by itself, as `gyre ls --follow` tells of it in a pipe: id, task, state, calls, tokens, score."""
    line = Text("  ").join([Text(e.execution_id), _task(e), _state(e), _calls(e).append(" calls")])
    line.append(f"  {amount(e.num_tokens)} tok")
    if e.score_status is not None:
        line.append("  score ").append_text(_score(e, named=True))
    return line


def _task(e: ExecutionSummary) -> Text:
    if e.task_id is None:
        return Text(DASH)
    return Text(e.task_id if e.sample_index is None else f"{e.task_id} #{e.sample_index}")


def _state(e: ExecutionSummary) -> Text:
    told = str(e.end_reason or e.state)
    bad = told in _BAD_ENDS or e.state is ExecutionState.INTERRUPTED
    return Text(told.replace("_", " "), style=_WRONG if bad else "")


def _score(e: ExecutionSummary, *, named: bool) -> Text:
    if e.score is None:
        return Text(DASH if e.score_status is None else str(e.score_status), style=_WRONG if e.score_status else "")
    told = f"{e.score:.2f}{' partial' if e.partial else ''}"
    return Text(f"{told} ({e.evaluator})" if named else told)


def _calls(e: ExecutionSummary) -> Text:
    told = Text(str(e.num_calls))
    if e.num_bad_calls:
        told.append(f" ({e.num_bad_calls} bad)", style=_WRONG)
    return told


def _table(columns: Sequence[tuple[str, Sequence[Text]]], width: int) -> Iterator[Text]:
    """Left-aligned columns, two blanks between them; the first is always there, later ones as far as they fit."""
    sizes = [max(len(head), *(len(cell) for cell in cells)) for head, cells in columns]
    shown, used = 1, sizes[0]
    while shown < len(columns) and used + 2 + sizes[shown] <= width:
        used += 2 + sizes[shown]
        shown += 1
    rows = [[Text(head, style="bold") for head, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]
    for row in rows:
        line = Text()
        for cell, size in zip(row[:shown], sizes, strict=False):
            line.append_text(cell)
            line.append(" " * (size - len(cell) + 2))
        line.rstrip()
        yield line
    if shown < len(columns):
        left_out = ", ".join(head for head, _ in columns[shown:])
        yield Text(f"not shown for want of room: {left_out}", style=_QUIET)


def run_list(found: Sequence[RunSummary], *, width: int = 80) -> Iterator[Text]:
    """One line a run, oldest first; what is wrong with one stands below it."""
    if not found:
        yield Text("no run here or in ./runs; record one: gyre demo, or look at: gyre tree sample")
        return
    columns = [
        ("run", [Text(r.path) for r in found]),
        ("made", [Text((r.created_at or DASH)[:19].replace("T", " ")) for r in found]),
        ("executions", [Text(str(r.num_executions)) for r in found]),
        ("calls", [Text(str(r.num_calls)) for r in found]),
        ("tokens", [Text(amount(r.num_tokens)) for r in found]),
        ("", [Text("being written" if r.writing else "damaged" if r.problem else "") for r in found]),
    ]
    yield from _table(columns, width)
    for r in found:
        if r.problem is not None:
            yield from flow([Text(r.problem, style=_WRONG)], width, indent=2)
    yield Text(f"look into one: gyre ls {found[-1].path}", style=_QUIET)
