"""The texts of `gyre tree` and `gyre stats`, letter by letter."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from gyre_data.execution import Execution, executions, short_id
from gyre_data.run_stats import stats
from gyre_data.show.outline import outline
from gyre_data.show.stats_text import stats_lines
from gyre_data.show.tree_text import tree_lines
from tests.support.busy_case import busy_case
from tests.support.forest import Forest
from tests.support.golden import check
from tests.support.published_case import published_case


def plain(lines: object) -> str:
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True, highlight=False)
    for line in lines:  # type: ignore[attr-defined]
        console.print(line)
    return out.getvalue()


def tree_text(run: Forest, prefix: str, j_max: int | None = 5) -> str:
    execution = Execution.load(run, prefix)
    short = short_id(executions(run), execution.execution_id)
    return plain(tree_lines(outline(execution, j_max=j_max), short=short, where="runs/a"))


@pytest.mark.parametrize(("name", "made"), [("busy", busy_case), ("published", published_case)])
def test_stats(name: str, made: object) -> None:
    check(f"stats-{name}.txt", plain(stats_lines(stats(made()), where="runs/a")))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "made", "prefix"),
    [("busy", busy_case, "0bbb"), ("observed", busy_case, "0ccc"), ("published", published_case, "e7f3")],
)
def test_tree(name: str, made: object, prefix: str) -> None:
    check(f"tree-{name}.txt", tree_text(made(), prefix))  # type: ignore[operator]


def test_a_local_count_of_a_part_is_told_as_one() -> None:
    found = stats(published_case())
    for counted, told in ((1_100, "(1.1k by local count)"), (found.trees.distinct_tokens, "(local count)"), (0, None)):
        text = plain(stats_lines(replace(found, trees=replace(found.trees, counted_tokens=counted)), where="runs/a"))
        assert told in text if told else "local count" not in text


def test_published_case_prints_exactly_its_figures() -> None:
    text = plain(stats_lines(stats(published_case()), where="runs/a"))
    for figure in ("calls 636 ", "1,347 messages", "1,716 if expanded (369 repeats, 1.27x)", "10 trajectories, 5 kept"):
        assert figure in text


def test_forecast() -> None:
    lines = stats_lines(stats(published_case(), model="Qwen/Qwen3-8B"), where="runs/a")
    text = plain(lines)
    check("stats-forecast.txt", text[text.index("forecast") :])


@pytest.mark.parametrize("width", [60, 80, 200])
def test_stats_fit_the_terminal(width: int) -> None:
    found = stats([busy_case(), published_case()], model="Qwen/Qwen3-8B")
    lines = list(stats_lines(found, where="runs/a", width=width))
    assert max(len(line) for line in lines) <= max(width, 80)
