"""`gyre eval`: a few lines over `gyre_data.evaluation`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_data.errors import ConfigError
from gyre_data.evaluation import Comparison, Estimate, Evaluation, compare, evaluate, pass_at, pass_at_k
from gyre_data.scores import parse_weights
from gyre_data.show.layout import print_json
from gyre_data.show.numbers import plural
from gyre_data.store import find_run
from gyre_data.store import open as open_run

__all__ = ["eval_"]

_FAILURES = 3
"""Shown of a new evaluator's failures: where it fails on all, it says the same of each."""


def eval_(
    run: Annotated[Path | None, typer.Argument(help="Run folder; without it, the run made last.")] = None,
    other: Annotated[Path | None, typer.Argument(help="A second run, compared with the first task by task.")] = None,
    k: Annotated[str, typer.Option("-k", help="Numbers of attempts, for example 1,4.")] = "1",
    by: Annotated[
        str | None,
        typer.Option(metavar="task|version", help="A line for each task, or for each version of the weights."),
    ] = None,
    evaluator: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=WEIGHT]", help="Evaluator whose scores count, with a weight; may repeat."),
    ] = None,
    threshold: Annotated[float, typer.Option("--pass", help="A score of at least this much is a pass.")] = 1.0,
    rescore: Annotated[
        str | None, typer.Option(help="First judge the kept workspaces again with this command, as in tasks.toml.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.1, help="With --rescore: of one verdict.")] = 600.0,
    jobs: Annotated[int, typer.Option("-j", min=1, help="With --rescore: verdicts at a time.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Tell how often attempts pass (pass@k, unbiased) and how sure that is (95 % over tasks); compare two runs.

    Executions that no evaluator scored are counted, never taken as zero. --rescore judges copies of the workspaces that
    `gyre run` kept, appends the verdicts under the evaluator's own name, and tells how often they pass.

    A run that was recorded while weights changed has executions of many versions. --by version tells them apart by the
    version that was served when an execution began, whatever weights its later calls met.
    """
    if by not in (None, "task", "version"):
        raise ConfigError(f"--by: wanted task or version, got {by!r}; leave it out for the run's own figures")
    counts, weights = _numbers(k), parse_weights(evaluator)
    if rescore is not None:
        again = import_module("gyre_proxy.launch.rescore").rescore
        for path in (run,) if other is None else (run, other):
            done = again(find_run(path), rescore, timeout_s=timeout_s, jobs=jobs)
            weights = weights or {done.evaluator: 1.0}
            typer.echo("\n".join(_rescored(done)), err=as_json)
    found = [
        evaluate(open_run(find_run(path)), k=counts, evaluators=weights, threshold=threshold)
        for path in ((run,) if other is None else (run, other))
    ]
    compared = compare(*found) if other is not None else None
    if as_json:
        print_json(found[0] if compared is None else compared)
        return
    for one in found:
        typer.echo("\n".join(_lines(one, by)))
    typer.echo("\n".join(_next(found[0]) if compared is None else _compared(compared)))


def _rescored(done: Any) -> Iterator[str]:
    yield f"judged again by {done.evaluator}: {done.scored} scored, {len(done.failed)} failed"
    for execution_id, why in islice(done.failed.items(), _FAILURES):
        yield typer.style(f"  {execution_id} failed, not counted as zero: {why}", fg="red")
    if (more := len(done.failed) - _FAILURES) > 0:
        yield typer.style(f"  and {more} more failed", fg="red")
    if done.scored:
        yield f"  they count in the place of what {done.evaluator} said of the same executions before, if anything"
    for reason, number in done.skipped.items():
        yield typer.style(f"  not judged: {reason} {number}", fg="red")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"-k: wanted numbers of attempts, got {text!r}; write for example -k 1,4") from None


def _lines(one: Evaluation, by: str | None) -> Iterator[str]:
    scored = sum(t.attempts for t in one.tasks)
    names = ", ".join(name if weight == 1 else f"{name}={weight:g}" for name, weight in one.evaluators.items())
    yield f"{one.run}: {scored} of {one.executions} executions scored by {names}; {plural(len(one.tasks), 'task')}"
    if one.unscored:
        told = ", ".join(f"{reason} {number}" for reason, number in sorted(one.unscored.items()))
        yield typer.style(f"  left out, not counted as zero: {told}", fg="red")
    if by == "task":
        yield from _task_lines(one)
    if by == "version":
        yield from _version_lines(one)
    yield from _estimates(one.pass_at, one.mean, percent=True)
    for number, tasks in one.too_few.items():
        if tasks:
            yield typer.style(
                f"  pass@{number}: left out {plural(tasks, 'task')} with fewer than {number} scored", fg="red"
            )


def _task_lines(one: Evaluation) -> Iterator[str]:
    ks = list(one.pass_at)
    width = max(4, *(len(t.task) for t in one.tasks))
    yield f"  {'task':<{width}}  passed  mean   " + "  ".join(f"pass@{n:<3}" for n in ks)
    for t in one.tasks:
        at = (pass_at_k(t.attempts, t.passes, n) for n in ks)
        cells = "  ".join(f"{'-' if v is None else f'{v:.1%}':<8}" for v in at)
        yield f"  {t.task:<{width}}  {f'{t.passes}/{t.attempts}':<6}  {t.mean:<5.3g}  {cells}".rstrip()


def _version_lines(one: Evaluation) -> Iterator[str]:
    width = max(7, *(len(v.version or "") for v in one.versions))
    yield f"  {'version':<{width}}  scored  tasks  mean   " + "  ".join(f"pass@{n:<15}" for n in one.pass_at).rstrip()
    for v in one.versions:
        scored, mean = sum(t.attempts for t in v.tasks), sum(t.mean for t in v.tasks) / len(v.tasks)
        cells = "  ".join(f"{_cell(pass_at(v.tasks, n)):<20}" for n in one.pass_at)
        yield f"  {v.version or 'unknown':<{width}}  {scored:<6}  {len(v.tasks):<5}  {mean:<5.3g}  {cells}".rstrip()


def _cell(at: Estimate) -> str:
    if at.value is None:
        return "-"
    return f"{at.value:.1%}" + ("" if at.low is None else f" [{at.low:.0%}, {at.high:.0%}]")


def _estimates(at_k: Mapping[int, Estimate], mean: Estimate, *, percent: bool) -> Iterator[str]:
    sign = "" if percent else "+"
    for number, at in at_k.items():
        yield f"  pass@{number:<3} {_interval(at, f'{sign}.1%')}"
    yield f"  mean     {_interval(mean, f'{sign}.3f')}"


def _interval(at: Estimate, form: str) -> str:
    if at.value is None:
        return "-  no task has as many scored attempts"
    if at.low is None or at.high is None:
        return f"{at.value:{form}}  no interval over {at.tasks} task"
    return f"{at.value:{form}}  [{at.low:{form}}, {at.high:{form}}]  95 % {at.method} over {at.tasks} tasks"


def _compared(one: Comparison) -> Iterator[str]:
    alone = one.only_first + one.only_second
    left = f"; {alone} in one run only are left out" if alone else ""
    yield f"{one.second.run} minus {one.first.run}, paired by task: {one.tasks} tasks{left}"
    yield from _estimates(one.pass_at, one.mean, percent=False)
    equal = one.tasks - one.better - one.worse
    yield f"  mean score better in {one.better} tasks, worse in {one.worse}, equal in {equal}"


def _next(one: Evaluation) -> Iterator[str]:
    by = "version" if len(one.versions) > 1 else "task"
    yield f"next: gyre eval {one.run} OTHER_RUN | gyre eval {one.run} --by {by}"
