"""The page of `gyre view` in a real browser: what it shows, that every key works, that a report asks for nothing."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gyre_data
from gyre_data.view.report import write_report
from gyre_data.view.server import ViewServer
from tests.support.chromium import chromium
from tests.support.forest import ExecutionBuilder, Forest
from tests.support.view_case import HOSTILE, TOKENIZER, Talk, large_case, says, tool, view_case

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[dev]' brings playwright")

BUSY = "e_e7f300000002"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(sync_api) as started:
        yield started


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> gyre_data.Run:
    path = tmp_path_factory.mktemp("view") / "run"
    made = view_case()
    made.write(path)
    with gyre_data.RunWriter(path) as writer:
        writer.update_info({"mode": "policy", "policy": "run:5", "tokenizer": str(TOKENIZER)})
    return gyre_data.open(path)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Forest, Path]:
    """1,347 messages and a million tokens, in memory and on disk."""
    made = large_case()
    return made, made.write(tmp_path_factory.mktemp("large") / "run").path


@pytest.fixture(scope="module")
def report(run: gyre_data.Run) -> Path:
    return write_report(run, run.path.with_suffix(".html"))


@pytest.fixture(scope="module")
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    """The report in one window for many tests; an error in its script fails the last one."""
    window = Opened(browser, f"file://{report}#e={BUSY}")
    yield window
    window.close()


@pytest.fixture
def page(opened: Opened, report: Path) -> Any:
    """The report, open anew at the busy execution."""
    opened.go(f"file://{report}#e={BUSY}")
    return opened.page


class Opened:
    """A page in a context of its own that notes every request and every error."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 800}, "color_scheme": "light", **context}
        )
        self.page, self.errors, self.requests = self.context.new_page(), [], []
        self.page.set_default_timeout(10_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda told: self.errors.append(told.text) if told.type == "error" else None)
        self.page.on("request", lambda asked: self.requests.append(asked.url))
        self.go(url)

    def go(self, url: str) -> None:
        self.page.goto("about:blank")  # else only the fragment changes, and nothing is loaded
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready=yes]", state="attached")

    def close(self) -> None:
        self.context.close()
        assert self.errors == []


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text())


def go_to(page: Any, call: int) -> None:
    page.locator("#tree").focus()
    page.evaluate("() => document.querySelector('#tree').scrollTop = 0")
    page.locator(f"#tree .row.call:has(code:text-is('c{call}'))").click()
    page.wait_for_selector(f"#bar h2:text-is('c{call}')")
    page.wait_for_selector(f"#talk .new-from:has-text('new in c{call}:')")


def test_the_first_screen_tells_what_is_there_and_what_is_wrong(page: Any) -> None:
    page.wait_for_selector("#totals .bad:has-text('undelivered')")  # counted after the rest
    totals = " ".join(text(page, "#totals").split())
    assert "executions 3" in totals
    assert "calls 23" in totals
    wrong = {one.strip() for one in page.locator("#totals .bad").all_inner_texts()}
    assert wrong == {"2 failed", "1 undelivered", "1 unknown role", "1 interrupted"}
    assert page.locator("#executions .exec").count() == 3
    assert "0.50 partial" in text(page, "#executions .exec.on")
    lanes = page.locator("#lanes svg .lane-name").all_text_contents()
    assert [name.partition(":")[0] for name in lanes] == [
        "mainmain",
        "sub-agent a91sub-agent a91",
        "side callsside calls",
        "unknown roleunknown role",
    ]
    assert page.locator("#lanes svg .cut.compaction").count() == 1
    assert "→" in page.locator("#lanes svg .cut-text").text_content()
    page.wait_for_selector("#talk .card.open")


def test_a_report_asks_for_nothing_and_runs_nothing_that_was_recorded(browser: Any, report: Path) -> None:
    opened = Opened(browser, f"file://{report}#e={BUSY}")
    page = opened.page
    go_to(page, 3)
    page.wait_for_selector("#talk .by-tool.open")
    assert HOSTILE in text(page, "#talk")
    for key, drawn in (("t", ".tok"), ("i", ".tok"), ("o", ".overview"), ("x", ".plot"), ("pt", ".card.open .content")):
        for one in key:
            page.keyboard.press(one)
        page.wait_for_selector(f"#talk {drawn}")
    page.wait_for_selector("#side:has-text('Provenance of c3')")
    assert page.title() == "run - gyre view"
    assert {url.partition(":")[0] for url in opened.requests} <= {"file", "data", "about"}
    assert [url.partition("#")[0] for url in opened.requests if url.startswith("file:")] == [f"file://{report}"]
    opened.close()


def test_rows_fold_by_mouse_and_by_keys(page: Any) -> None:
    rows = page.locator("#tree .row")
    before = rows.count()
    lane = page.locator("#tree .row.lane", has_text="main").first
    page.evaluate("() => document.querySelector('#tree').scrollTop = 0")
    lane.locator(".fold").click()
    assert lane.get_attribute("aria-expanded") == "false"
    assert rows.count() < before
    assert lane.inner_text().split()[1:4] == ["main", "16", "calls"]  # what is folded stays in the total
    lane.click()
    page.locator("#tree").focus()
    page.keyboard.press("ArrowRight")
    assert lane.get_attribute("aria-expanded") == "true"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#tree .row.on code:text-is('c2')")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#bar h2:text-is('c3')")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#tree .row.node.on")
    page.keyboard.press("ArrowLeft")
    assert "c3" in text(page, "#tree .row.on")
    page.keyboard.press("End")
    page.wait_for_selector("#tree .row.on code:text-is('c18')")
    focus = page.evaluate("() => document.activeElement.getAttribute('aria-activedescendant')")
    assert page.locator(f"#{focus}").get_attribute("aria-selected") == "true"


def test_only_the_new_part_of_a_call_is_open(page: Any) -> None:
    go_to(page, 11)
    assert page.locator("#talk .card.shared.open").count() == 0
    assert page.locator("#talk .card.open:not(.shared)").count() == 2
    assert "earlier messages" in text(page, "#talk .earlier")
    shown = page.locator("#talk .card.shared").count()
    page.keyboard.press("w")
    page.wait_for_function(f"() => document.querySelectorAll('#talk .card.shared').length > {shown}")
    page.locator("#talk .card.shared .card-head").first.click()
    page.wait_for_selector("#talk .card.shared.open .card-head:focus")  # drawn anew, and the keyboard stays there
    output = page.locator("#talk .by-tool.open .content")
    assert "order 59" not in output.inner_text()
    output.locator(".more").click()
    assert "order 59" in output.inner_text()


def test_sub_agents_are_reached_from_their_task_call_and_back(page: Any) -> None:
    go_to(page, 4)
    page.locator("#talk .toolcall .jump").click()
    page.wait_for_selector("#bar h2:text-is('c5')")
    page.get_by_role("button", name="← started by c4").click()
    page.wait_for_selector("#bar h2:text-is('c4')")


def test_a_compaction_shows_its_note_and_what_it_dropped(page: Any) -> None:
    go_to(page, 14)
    card = page.locator("#talk .boundary", has_text="compaction").first
    assert re.search(r"[\d.]+k → \d+ tokens\s+summary \d+, copied turns \d+", card.inner_text())
    card.locator("summary", has_text="the full note").click()
    page.wait_for_selector("#talk .note .content")
    assert "move the upper end by one day" in card.inner_text()
    dropped = card.locator("summary", has_text="dropped")
    assert "dropped: 13 messages" in dropped.inner_text()
    assert "carried over: 2 messages" in card.inner_text()
    dropped.click()
    card.locator("button.brief").first.click()
    page.wait_for_selector("#talk .card.target")


def test_search_finds_texts_and_tools_without_a_mouse(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("OWNED")
    page.wait_for_selector("#found .hit mark:text-is('owned')")  # what was typed first is found first
    page.keyboard.press("Enter")
    page.wait_for_selector("#bar h2:text-is('c3')")
    page.wait_for_selector("#talk .card.target.open")
    page.keyboard.press("/")
    page.keyboard.type("Glob")
    page.locator("#search-role").select_option("tool name")
    page.wait_for_function("() => [...document.querySelectorAll('#found .hit code')].map(el => el.textContent) == 'c5'")
    page.locator("#found button", has_text="every execution").click()
    page.locator("#search").fill("grep")
    page.wait_for_function("() => document.querySelectorAll('#found .hit').length === 2")
    page.locator("#found .hit", has_text="b02c00").click()
    page.wait_for_selector("#executions .exec.on:has-text('1.00')")
    page.locator("#search-role").select_option("user")
    page.wait_for_function("() => document.querySelectorAll('#found .hit').length === 0")
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.id") == "tree"


def test_tokens_are_coloured_by_owner_logprob_version_role_and_gap(page: Any) -> None:
    go_to(page, 3)
    page.keyboard.press("t")
    page.wait_for_selector("#talk .by-assistant.open .tok.own-0")
    told = page.locator("#talk .by-assistant.open .tokens").inner_text().replace("↵", "")
    assert '"name": "Read"' in told
    assert page.locator("#talk .by-tool.open .tok").first.get_attribute("class").strip() == "tok"
    seen = {}
    for colour, legend in (("logprob", "not sampled"), ("version", "run:4"), ("role", "system"), ("gap", "< 0.002")):
        page.locator("#colour").select_option(colour)
        page.wait_for_function(f"() => location.hash.endsWith('t={colour}')")
        page.wait_for_selector(f"#talk .legend:has-text('{legend}')")
        seen[colour] = set(
            page.evaluate(
                "() => [...document.querySelectorAll('#talk .by-assistant.open .tok')].flatMap((t) => [...t.classList])"
            )
        )
    assert seen["logprob"] & {"heat-0", "heat-1"}
    assert seen["logprob"] & {"heat-4", "heat-5", "heat-3"}
    assert "ver-0" in seen["version"]
    assert "is-assistant" in seen["role"]
    assert any(name.startswith("heat-") for name in seen["gap"])
    page.locator("#talk .by-assistant.open .tok").nth(2).hover()
    page.wait_for_selector("#tip:has-text('trained in trajectory 0')")
    tip = text(page, "#tip")
    for name in ("id", "text", "log-prob", "version", "run:4", "run:5", "trained in trajectory 0"):
        assert name in tip
    page.mouse.move(0, 0)  # else what scrolls under it is told of
    page.wait_for_selector("#tip", state="hidden")
    page.locator("#talk .by-assistant.open .tokens").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#tip tr:has-text('token') td:text-matches('^1 of ')")


def test_two_branches_of_an_execution_are_compared(page: Any) -> None:
    go_to(page, 11)
    page.keyboard.press("d")
    go_to(page, 12)
    page.keyboard.press("d")
    page.wait_for_selector("#talk .heads .card")
    assert "15 messages in both" not in text(page, "#talk")
    assert "messages in both, 0 only on the left, 2 only on the right" in " ".join(text(page, "#talk").split())
    page.locator("#talk .same summary").click()
    page.wait_for_selector("#talk .same .brief")
    assert page.locator("#talk .same .brief").count() > 10


def test_two_rollouts_of_a_task_are_compared(page: Any) -> None:
    page.keyboard.press("d")
    page.wait_for_selector("#live:has-text('is marked')")
    page.locator("#executions .exec").first.click()
    page.wait_for_selector("#executions .exec.on:has-text('1.00')")
    page.keyboard.press("d")
    page.wait_for_selector("#talk .two .card ins")
    heads = page.locator("#talk .heads .card").all_inner_texts()
    assert "0.50 pytest partial" in heads[0]
    assert "1.00 pytest" in heads[1]
    assert page.locator("#talk .same").count() >= 1
    assert page.locator("#talk del").count() >= 1


def test_provenance_shows_asked_and_used_and_the_raw_request(page: Any) -> None:
    go_to(page, 11)
    page.keyboard.press("i")
    panel = page.locator("#side")
    assert "claude-code 2.1.220" in panel.inner_text()
    assert panel.locator(".differs", has_text="temperature").inner_text().split() == ["temperature", "0.6", "1"]
    panel.locator("summary", has_text="Raw request").click()
    page.wait_for_selector("#side details pre:has-text('\"stream\": true')")
    assert "pytest@3" in panel.inner_text()


def test_overview_and_plots(page: Any) -> None:
    page.keyboard.press("o")
    # Two evaluators, and nobody said which is the reward.
    page.wait_for_selector("#talk .overview:has-text('pytest'):has-text('not judged')")
    page.keyboard.press("x")
    page.wait_for_selector("#talk .plot rect.bar")
    assert page.locator("#talk .plot").count() >= 8


def test_light_and_dark_follow_the_system_until_one_chooses(browser: Any, report: Path) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        opened = Opened(browser, f"file://{report}", color_scheme=scheme)
        background = "() => getComputedStyle(document.body).backgroundColor"
        seen[scheme] = opened.page.evaluate(background)
        opened.page.keyboard.press("b")
        seen[f"{scheme} switched"] = opened.page.evaluate(background)
        opened.close()
    assert seen["light"] != seen["dark"]
    assert seen["light switched"] == seen["dark"]
    assert seen["dark switched"] == seen["light"]


CUT_OFF = """() => [...document.querySelectorAll("button, select, input, td, dd, .card, .plot, #head > *, #bar *")]
  .filter((el) => el.checkVisibility() && el.getBoundingClientRect().width)
  .filter((el) => el.getBoundingClientRect().right > innerWidth + 1 || el.getBoundingClientRect().left < -1)
  .map((el) => el.id || el.textContent.slice(0, 40))"""


@pytest.mark.parametrize(("width", "height"), [(800, 700), (390, 844)])
def test_nothing_is_cut_off_on_a_small_screen(browser: Any, report: Path, width: int, height: int) -> None:
    opened = Opened(browser, f"file://{report}#e={BUSY}", viewport={"width": width, "height": height})
    page = opened.page
    page.wait_for_selector("#totals .bad:has-text('undelivered')")
    for keys, drawn in (
        ("", "#talk .card.open .content"), ("t", "#talk .tok"),
        ("tw", "#talk .earlier[aria-expanded=true] ~ .card .content"),
        ("o", "#talk .overview:has-text('not judged')"), ("x", "#talk .plot rect.bar"),
        ("pi", "body:has(#side:has-text('Provenance')) #talk .card.open .content"),
    ):  # fmt: skip
        for key in keys:
            page.keyboard.press(key)
        page.wait_for_selector(drawn)
        assert page.evaluate(CUT_OFF) == [], keys
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.keyboard.press("i")
    page.keyboard.press("e")
    page.wait_for_selector("#executions .exec >> visible=true")
    page.locator("#executions .exec", has_text="1.00").click()
    page.wait_for_selector("#bar h2:text-is('c4')")
    page.locator("#tree .row.call:has(code:text-is('c2'))").click()
    page.wait_for_selector("#talk .new-from:has-text('new in c2:')")
    assert page.locator("#talk .card.open").first.bounding_box()["y"] < height  # in sight without a search for it
    opened.close()


def test_a_page_follows_a_run_that_is_written_without_losing_its_place(browser: Any, tmp_path: Path) -> None:
    made = view_case()
    made.write(tmp_path / "run")
    known = {name: len(rows) for name, rows in made.rows.items()}
    with ViewServer(gyre_data.open(tmp_path / "run")) as server, gyre_data.RunWriter(tmp_path / "run") as writer:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = Opened(browser, f"{server.url}#e={BUSY}")
        page = opened.page
        page.wait_for_selector("#live .good")
        go_to(page, 11)
        page.evaluate("() => document.querySelector('#talk').scrollTop = 60")
        scroll = page.evaluate(
            "() => [document.querySelector('#talk').scrollTop, document.querySelector('#tree').scrollTop]"
        )
        builder = _continued(made)
        for name, rows in made.rows.items():
            writer.append(rows[known[name] :])
        writer.commit()
        page.wait_for_selector("#head:has-text('19 calls')")
        assert text(page, "#bar h2") == "c11"
        after = page.evaluate(
            "() => [document.querySelector('#talk').scrollTop, document.querySelector('#tree').scrollTop]"
        )
        assert after == pytest.approx(scroll, abs=10)  # pixels: a bar may come or go, the place stays
        page.keyboard.press("G")
        page.wait_for_selector(f"#talk :text('{builder}')")
        opened.close()
        server.shutdown()


def test_an_empty_run_bears_every_key_and_shows_its_first_call(browser: Any, tmp_path: Path) -> None:
    with gyre_data.RunWriter(tmp_path / "run") as writer, ViewServer(gyre_data.open(tmp_path / "run")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = Opened(browser, server.url)
        for key in "jkfFwtcdiioxpgGnNeab":
            opened.page.keyboard.press(key)
        opened.page.wait_for_selector("#talk:has-text('No call was recorded yet')")
        for rows in view_case().rows.values():
            writer.append(rows)
        writer.commit()
        opened.page.wait_for_selector("#executions .exec.on")
        opened.page.wait_for_selector("#talk .card.open, #talk .tok")
        opened.close()
        server.shutdown()


def _continued(made: Any, execution_id: str = BUSY) -> str:
    """One more call of the execution's main agent; returns what it says."""
    e = ExecutionBuilder(run=made, execution_id=execution_id)
    e.nodes = {n.node_id: n for n in made.rows["nodes"] if n.execution_id == execution_id}
    mine = [c for c in made.rows["calls"] if c.execution_id == execution_id]
    last = [c for c in mine if c.agent_role == "main" and c.output_node][-1]
    Talk(e).call(last.output_node, [tool("nothing there")], says("The changelog is empty, so I go on."))
    return "The changelog is empty"


def test_a_page_of_a_large_run_is_told_only_what_changed(
    browser: Any, large: tuple[Forest, Path], tmp_path: Path
) -> None:
    made, path = large
    shutil.copytree(path, tmp_path / "run")
    execution_id = made.rows["executions"][0].execution_id
    known = {name: len(rows) for name, rows in made.rows.items()}
    with ViewServer(gyre_data.open(tmp_path / "run")) as server, gyre_data.RunWriter(tmp_path / "run") as writer:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = Opened(browser, server.url)
        page, told = opened.page, []
        page.wait_for_selector("#live .good")
        size = "content-length"
        page.on("response", lambda r: "/api/execution" in r.url and told.append(int(r.headers[size])))
        for number in (637, 638, 639):
            _continued(made, execution_id)
            # A page may look between the tables of one commit, deliveries come last: here they are a commit apart.
            for names in (made.rows.keys() - {"deliveries"}, {"deliveries"}):
                for name in names:
                    writer.append(made.rows[name][known[name] :])
                    known[name] = len(made.rows[name])
                writer.commit()
                page.wait_for_selector(f"#head:has-text('{number} calls')")
                page.keyboard.press("G")
                page.wait_for_selector(f"#bar h2:text-is('c{number}')")
                unknown = ":has-text('not trained: delivery unknown')"
                page.wait_for_selector(f"#talk:not({unknown})" if names == {"deliveries"} else f"#talk{unknown}")
        assert max(told) < 20_000  # the whole is 1.6 MB
        shown = [text(page, part) for part in ("#tree", "#lanes", "#talk")]
        opened.go(f"{server.url}#e={execution_id}")
        page.keyboard.press("G")
        page.wait_for_selector("#talk .new-from:has-text('new in c639')")
        assert [text(page, part) for part in ("#tree", "#lanes", "#talk")] == shown
        opened.close()
        server.shutdown()


def test_a_million_tokens_open_and_fit(browser: Any, large: tuple[Forest, Path], tmp_path: Path) -> None:
    report = write_report(gyre_data.open(large[1]), tmp_path / "report.html")
    assert report.stat().st_size < 15e6
    opened = Opened(browser, f"file://{report}")  # benchmarks/view.py has how long it takes
    opened.page.wait_for_selector("#talk .card.open .content")
    opened.page.wait_for_selector("#totals:has-text('1,347')")
    assert opened.page.locator("#tree .row").count() < 120  # only what is in view exists
    to_first = "document.querySelector('#tree').dispatchEvent(new KeyboardEvent('keydown', {key: 'Home'}))"
    chosen = "document.querySelectorAll('#tree .row.on').length"
    assert opened.page.evaluate(f"() => {{ {to_first}; return {chosen} }}") == 1  # and at once what is chosen
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("windowError order")
    opened.page.wait_for_selector("#found .hit")
    opened.page.keyboard.press("Escape")
    opened.page.keyboard.press("t")
    opened.page.wait_for_selector("#talk .tok")
    opened.close()
