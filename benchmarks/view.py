"""Size and speed of the page: a report of one long execution (636 calls or so, a million tokens), and a live page.

Run: python benchmarks/view.py [--json]. Needs Chromium (`chromium` on the path, or GYRE_TEST_CHROMIUM) and playwright.
Times are from the start of navigation until the thing is on the screen. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import _frame
import numpy as np
from _made import TOKENS, link_run, write_part
from _source import read_source
from data import rows_of_call
from playwright.sync_api import sync_playwright

import gyre_data
from gyre_data.arrays import from_table
from gyre_data.view.report import write_report
from gyre_data.view.server import ViewServer

BOUNDS = {"report_mb": (None, 15.0), "open_s": (None, 5.0), "live_lag_p95_ms": (None, 1000.0)}
"""Figure: (least, most)."""
LIVE_CALLS = 12


def measure(folder: Path, quick: bool) -> dict[str, float]:
    """Every figure, with the largest run there is either way: one execution."""
    source = read_source(TOKENS)
    path = link_run(folder / "run", [write_part(folder / "part", source, range(1), recorded=True)])
    (path / "run.json").write_text(json.dumps({"format": "gyre", "mode": "policy", "tokenizer": source.tokenizer}))
    started = time.perf_counter()
    report = write_report(gyre_data.open(path), folder / "report.html")
    figures = {"write_s": time.perf_counter() - started, "report_mb": report.stat().st_size / 1e6}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=["--no-sandbox"])
        figures |= _report(browser.new_page(viewport={"width": 1280, "height": 800}), report)
        figures |= _live(browser.new_page(viewport={"width": 1280, "height": 800}), path)
        browser.close()
    return figures


def _chromium() -> str:
    found = os.environ.get("GYRE_TEST_CHROMIUM") or shutil.which("chromium")
    if found is None:
        sys.exit("wanted Chromium, found none; apt-get install chromium, or name one in GYRE_TEST_CHROMIUM")
    return found


def _report(page: Any, report: Path) -> dict[str, float]:
    figures = {}
    started = time.perf_counter()
    page.goto(f"file://{report}")
    page.wait_for_selector("#talk .card.open .card-body")
    page.wait_for_function("() => !document.querySelector('#totals').textContent.includes('…')")
    figures["open_s"] = time.perf_counter() - started
    started = time.perf_counter()
    page.keyboard.press("/")
    page.locator("#search").fill("return self")
    page.wait_for_selector("#found .hit")
    figures["search_every_text_s"] = time.perf_counter() - started
    page.keyboard.press("Escape")
    started = time.perf_counter()
    page.keyboard.press("t")
    page.wait_for_selector("#talk .tok")
    figures["first_tokens_s"] = time.perf_counter() - started
    started = time.perf_counter()
    page.keyboard.press("w")
    page.wait_for_function("() => document.querySelectorAll('#talk .card').length > 60")
    figures["whole_path_s"] = time.perf_counter() - started
    return figures


def _live(page: Any, path: Path) -> dict[str, float]:
    """From a durable commit to the new call's number on the screen, in a page that shows the long execution."""
    run = gyre_data.open(path)
    calls, nodes = run.table("calls"), from_table("nodes", run.table("nodes"))
    parent = max((n for n in nodes if n.kind == "output"), key=lambda n: n.start_pos)
    rng, lags = np.random.default_rng(0), []
    with ViewServer(run) as server, gyre_data.RunWriter(path) as writer:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(server.url)
        page.wait_for_selector("#live .good")
        page.wait_for_function("() => !document.querySelector('#totals').textContent.includes('…')")
        for number in range(LIVE_CALLS):
            made = rows_of_call(1000 + number, parent, 60, rng)
            prompt, parent, call = (replace(row, execution_id=parent.execution_id) for row in made)
            writer.append([prompt, parent, call])
            writer.commit()
            started = time.perf_counter()
            page.wait_for_selector(f"#head:has-text('{calls.num_rows + number + 1} calls')")
            lags.append(1000 * (time.perf_counter() - started))
            time.sleep(0.2)
        server.shutdown()
    return {"live_lag_p50_ms": float(np.median(lags)), "live_lag_p95_ms": float(np.percentile(lags, 95))}


if __name__ == "__main__":
    raise SystemExit(_frame.run("view", __doc__ or "", BOUNDS, measure))
