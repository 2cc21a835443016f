"""Training on the page of `gyre view`, in a real browser: figures, waits, cells, and down from a step to any call."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gyre_data
from gyre_data.view.report import write_report
from gyre_data.view.server import ViewServer
from gyre_data.view.training import open_training
from tests.e2e.test_view_page import CUT_OFF, Opened, text
from tests.support.chromium import chromium
from tests.support.training_beside import TrainedFolder, write_cells
from tests.support.view_case import view_case

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[dev]' brings playwright")

SHORT, BUSY = "e_b02c00000001", "e_e7f300000002"
STEPS = 60


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(sync_api) as started:
        yield started


def leaf_of(run: gyre_data.Run, execution_id: str) -> str:
    found = [
        call.output_node for call in run[execution_id].tree.calls if call.output_node and call.agent_role == "main"
    ]
    return str(found[1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run and of training that came to its end."""
    folder = tmp_path_factory.mktemp("watch")
    run = view_case().write(folder / "run")
    trained = TrainedFolder(folder / "rl", [run.path])
    for n in range(STEPS):
        trained.step([(SHORT, leaf_of(run, SHORT))] + ([(BUSY, leaf_of(run, BUSY))] if n % 2 else []))
    trained.says("ended", waiting=False, total=STEPS)
    trained.close()
    write_cells(trained.path / "ledger.jsonl")
    shown, training = open_training(run, None)
    return write_report(shown, folder / "report.html", training=training)


def figures(page: Any) -> dict[str, str]:
    return {
        str(tile.get_attribute("aria-label")): " ".join(tile.locator(".values").inner_text().split())
        for tile in page.locator("#training .tile[role=slider]").all()
    }


def test_the_first_screen_shows_every_figure_of_training(browser: Any, finished: Path) -> None:
    opened = Opened(browser, f"file://{finished}")
    page = opened.page
    told = figures(page)
    assert list(told) == ["Reward", "Loss", "Mismatch", "Staleness", "Gradient tokens/s", "Seconds a step"]
    assert "held out" in told["Reward"]
    assert "max 3" in told["Staleness"]
    assert page.locator("#training path.series").count() == 9
    assert f"step {STEPS}" in text(page, "#training .training-head")
    assert "training ended" in text(page, "#training .training-head")
    cells = page.locator("#training .tile:has(.cells)")
    assert cells.get_attribute("aria-label") == "Cells by time: 3 trains, idle"
    assert cells.locator("rect.cell-busy").count() == 3 * 6  # close together: one stretch in each burst
    assert cells.locator("line.made").count() == 5
    assert page.locator("#training").bounding_box()["y"] + page.locator("#training").bounding_box()["height"] < 210
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "about:"))] == []
    opened.close()


def test_from_a_step_to_what_it_consumed_and_to_a_call(browser: Any, finished: Path) -> None:
    opened = Opened(browser, f"file://{finished}#e={BUSY}")
    page = opened.page
    assert f"in step {STEPS}" in text(page, "#head")
    plot = page.locator("#training .tile", has_text="Loss")
    at = {"x": plot.bounding_box()["width"] - 8, "y": 60}
    plot.hover(position=at)
    page.wait_for_selector(f"#tip:has-text('step {STEPS} 0.')")
    plot.click(position=at)
    page.wait_for_selector(f"#talk h2:text-is('Step {STEPS}')")
    rows = page.locator("#talk .consumed tbody tr")
    assert rows.count() == 2
    assert " ".join(rows.nth(1).inner_text().split()) == f"{BUSY} swe-412 #1 1 1 130 0: 130"
    assert "waited for rollouts 9.0 s" in text(page, "#talk .step-waits")
    assert page.locator("#talk h3", has_text="Held-out tasks after it").count() == 1
    rows.nth(0).get_by_role("button", name="0: 120").click()  # the trajectory, not only the execution
    page.wait_for_selector("#executions .exec.on:has-text('1.00')")
    page.wait_for_selector("#bar h2:text-is('c2')")
    page.locator("#tree .row.call:has(code:text-is('c1'))").click()
    page.wait_for_selector("#bar h2:text-is('c1')")
    page.wait_for_function(f"() => location.hash.includes('s={STEPS}')")
    opened.close()


def test_steps_without_a_mouse(browser: Any, finished: Path) -> None:
    opened = Opened(browser, f"file://{finished}#e={BUSY}", color_scheme="dark")
    page = opened.page
    page.locator("#training .tile", has_text="Reward").focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    tile = page.locator("#training .tile:focus")  # the focus stays, though the chart was drawn anew
    assert tile.get_attribute("aria-valuetext") == "step 5: 0.323, held out 0.3"
    assert page.locator("#training line.chosen").count() == 6
    page.keyboard.press("Enter")
    page.wait_for_selector("#talk h2:text-is('Step 5')")
    page.keyboard.press("]")
    page.wait_for_selector("#talk h2:text-is('Step 6')")
    page.keyboard.press("[")
    page.wait_for_selector("#talk h2:text-is('Step 5')")
    page.keyboard.press("p")
    page.wait_for_selector("#talk .card")
    page.keyboard.press("S")
    page.wait_for_selector("#talk h2:text-is('Step 5')")
    page.keyboard.press("s")
    assert page.locator("#training .tile").count() == 0
    page.keyboard.press("s")
    page.reload()
    page.wait_for_selector("#talk h2:text-is('Step 5')")
    opened.close()


@pytest.mark.parametrize(("width", "height"), [(800, 700), (390, 844)])
def test_training_fits_a_small_screen(browser: Any, finished: Path, width: int, height: int) -> None:
    opened = Opened(browser, f"file://{finished}#e={BUSY}", viewport={"width": width, "height": height})
    page = opened.page
    page.keyboard.press("S")
    page.wait_for_selector(f"#talk h2:text-is('Step {STEPS}')")
    page.wait_for_selector("#totals .bad:has-text('undelivered')")
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    opened.close()


def test_a_run_without_training_shows_none_of_it(browser: Any, tmp_path: Path) -> None:
    run = view_case().write(tmp_path / "run")
    opened = Opened(browser, f"file://{write_report(run, tmp_path / 'report.html')}")
    assert not opened.page.locator("#training").is_visible()
    assert opened.page.get_by_role("tab", name="Steps").count() == 0
    opened.page.keyboard.press("S")
    opened.page.wait_for_selector("#talk:has-text('No training lies beside this run')")
    opened.close()


def test_the_page_follows_training_and_tells_who_waits(browser: Any, tmp_path: Path) -> None:
    view_case().write(tmp_path / "run")
    with gyre_data.RunWriter(tmp_path / "run"):  # the run is being recorded
        run = gyre_data.open(tmp_path / "run")
        with ViewServer(run, look=lambda: open_training(run, None)[1]) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            opened = Opened(browser, f"{server.url}#e={BUSY}")
            page = opened.page
            page.wait_for_selector("#live .good")
            assert not page.locator("#training").is_visible()
            trained = TrainedFolder(tmp_path / "rl", [run.path])  # begins while the page is open
            trained.says("step 1: 4 of 16 executions; waiting for run", since=time.time() - 130)
            page.wait_for_selector("#training .warn:has-text('trainer: step 1: 4 of 16 executions; waiting for run')")
            assert re.fullmatch(r"for [2-9]m\d\ds?", text(page, "#training .since"))  # it goes on
            assert "no step has been taken yet" in text(page, "#training")
            page.wait_for_selector("#training .in-flight:has-text('1 in flight')")
            page.locator("#training .in-flight .jump", has_text="swe-412 #2").click()
            page.wait_for_selector("#executions .exec.on:has-text('#2')")
            trained.step([(SHORT, leaf_of(run, SHORT))])
            trained.says("computing step 2", waiting=False, since=time.time())
            page.wait_for_selector("#training .training-head > span:text-matches('^step 1( of 40)?$')")
            page.wait_for_selector("#training .good:has-text('trainer: computing step 2')")
            assert page.locator("#training path.series").count() == 8  # what is done is told after what was done
            trained.close()
            page.wait_for_selector("#training .bad:has-text('the trainer is gone; it said last: computing step 2')")
            opened.close()
            server.shutdown()
