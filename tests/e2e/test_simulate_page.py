"""The page of `gyre simulate -o` in a real browser: the cells are drawn in both schemes, and it asks for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre_sched.durations import TwoLevel
from gyre_sched.experiment import Rung, compare
from gyre_sched.page import page
from gyre_sched.scenario import Scenario
from tests.support.chromium import chromium

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[dev]' brings playwright")

SCENARIO = Scenario(
    durations=TwoLevel(mean_s=3600.0, cv_query=0.2, cv_execution=0.3),
    steps=4,
    cells=3,
    batch_groups=2,
    group_size=2,
    train_cell_h=1.0,
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(sync_api) as started:
        yield started


# The colour in the middle of a cell's row at an hour, as the page draws it.
PIXEL = """([row, hour]) => {
  const canvas = document.querySelector('#r0'), x = 44 + hour / rungs[0].longest * (canvas.clientWidth - 52);
  const [r, g, b] = canvas.getContext('2d').getImageData(x, 16 * row + 8, 1, 1).data;
  return '#' + [r, g, b].map(one => one.toString(16).padStart(2, '0')).join('')}"""


@pytest.mark.parametrize(("scheme", "serves"), [("light", "#7aa6cf"), ("dark", "#4f7fae")])
def test_the_cells_are_drawn_in_both_schemes_and_nothing_is_asked_for(
    browser: Any, tmp_path: Path, scheme: str, serves: str
) -> None:
    rung = Rung(name="E<0>", about="elastic", scenario=SCENARIO, policy="waterlevel", settings={})
    out = tmp_path / "cells.html"
    out.write_text(page(compare([rung], seeds=[0], title="small")))
    context = browser.new_context(viewport={"width": 800, "height": 600}, color_scheme=scheme)
    window, told = context.new_page(), []
    window.on("pageerror", lambda error: told.append(str(error)))
    window.on("request", lambda asked: told.append(asked.url))
    window.goto(f"file://{out}")
    window.wait_for_selector("html[data-ready=yes]", state="attached")
    assert told == [f"file://{out}"]
    assert window.evaluate("document.documentElement.scrollWidth") == 800
    assert window.locator("h2").inner_text().startswith("E<0> elastic (")
    assert window.locator("canvas").bounding_box()["height"] == 3 * 16 + 20
    assert [window.evaluate(PIXEL, [row, 0.1]) for row in range(3)] == [serves] * 3
    background = window.evaluate("getComputedStyle(document.body).color")
    assert (background == "rgb(0, 0, 0)") == (scheme == "light")
    core = [span for span in window.evaluate("rungs[0].spans") if span[0] == 0 and span[1] == "busy"]
    at = (core[0][2] + core[0][3]) / 2
    box = window.locator("canvas").bounding_box()
    longest = window.evaluate("rungs[0].longest")
    window.mouse.move(box["x"] + 44 + at / longest * (box["width"] - 52), box["y"] + 8)
    window.wait_for_selector(f"output:text-is('c0 at {at:.2f} h: micro-steps')")
    window.set_viewport_size({"width": 500, "height": 600})
    window.wait_for_function("document.querySelector('canvas').width < 500")
    context.close()
