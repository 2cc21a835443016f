"""The page of `gyre view` while a run is written: each part is drawn anew when what it draws from changes.

A commit's tables become visible one after another, so the page may see any prefix of one (`COMMIT_ORDER`); answers of
the server may come late or overtake one another.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import gyre_data
from gyre_data.types import TeacherLogprobs
from gyre_data.view.server import ViewServer
from gyre_data.view.training import open_training
from tests.e2e.test_view_page import BUSY, Opened, go_to, text
from tests.support.chromium import chromium
from tests.support.forest import ExecutionBuilder, Forest
from tests.support.training_beside import TrainedFolder, figures, write_cells
from tests.support.view_case import TOKENIZER, Talk, says, tool, user, view_case

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[dev]' brings playwright")

SHORT, STARTED = "e_b02c00000001", "e_9d1e00000003"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(sync_api) as started:
        yield started


class Recorded:
    """A run that is being written, and a page that follows it."""

    def __init__(self, browser: Any, path: Path, made: Forest, writer: gyre_data.RunWriter, url: str) -> None:
        self.path, self.made, self.writer, self.url = path, made, writer, url
        self.known = {name: len(rows) for name, rows in made.rows.items()}
        self.opened = Opened(browser, f"{url}#e={BUSY}")
        self.page = self.opened.page
        self.page.wait_for_selector("#live .good")

    def talk(self, execution_id: str, **columns: Any) -> Talk:
        """Adds calls to an execution in memory."""
        e = ExecutionBuilder(run=self.made, execution_id=execution_id)
        e.nodes = {n.node_id: n for n in self.made.rows["nodes"] if n.execution_id == execution_id}
        return Talk(e, more=columns)

    def calls(self, execution_id: str) -> list[Any]:
        rows = [c for c in self.made.rows["calls"] if c.execution_id == execution_id]
        return sorted(rows, key=lambda c: c.started_at)

    def commit(self, *names: str) -> None:
        """What was added to these tables, or to all, becomes visible."""
        for name in names or self.made.rows:
            self.writer.append(self.made.rows[name][self.known[name] :])
            self.known[name] = len(self.made.rows[name])
        self.writer.commit()

    def open(self, execution_id: str) -> None:
        self.page.locator("#executions .exec", has_text=execution_id[2:8]).click()
        self.page.wait_for_selector(f"#head code:text-is('{execution_id}')")
        self.page.wait_for_selector("#talk .new-from")


@pytest.fixture
def recorded(browser: Any, tmp_path: Path) -> Iterator[Recorded]:
    made = view_case()
    made.rows["teacher_logprobs"].clear()
    made.write(tmp_path / "run")
    with gyre_data.RunWriter(tmp_path / "run") as writer:
        writer.update_info({"tokenizer": str(TOKENIZER)})
        run = gyre_data.open(tmp_path / "run")
        with ViewServer(run, look=lambda: open_training(run, None)[1]) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            shown = Recorded(browser, tmp_path / "run", made, writer, server.url)
            yield shown
            shown.opened.close()
            server.shutdown()


@contextmanager
def held(page: Any, part: str) -> Iterator[list[Any]]:
    """Answers to requests of `part`, as the server gives them now, reach the page when the block ends, newest first."""
    waiting: list[Any] = []
    page.route(f"**{part}*", lambda route: waiting.append((route, route.fetch())))
    yield waiting
    page.route(f"**{part}*", lambda route: route.continue_())
    for route, answer in reversed(waiting):
        with page.expect_event("requestfinished", lambda done, route=route: done == route.request):
            route.fulfill(response=answer)
    page.evaluate("() => fetch('/api/figures').then((answer) => answer.text())")  # what came is taken by then


def until_held(page: Any, waiting: list[Any], says: str = "") -> None:
    """Until an answer that says this is held."""
    while not waiting or says not in waiting[-1][1].text():
        page.evaluate("() => new Promise(requestAnimationFrame)")


def early(talk: Talk, **more: Any) -> None:
    """A side call that began before all others and is known only now."""
    made = talk.call(None, [user("ping")], says("pong"), role="side", **more)
    rows = talk.e.run.rows["calls"]
    first = min(c.started_at for c in rows if c.execution_id == talk.e.execution_id)
    (at,) = (i for i, c in enumerate(rows) if c.call_id == made.id)
    rows[at] = replace(rows[at], started_at=first - timedelta(seconds=2), ended_at=first - timedelta(seconds=1))


def test_a_mark_stays_on_its_call_when_numbers_move(recorded: Recorded) -> None:
    page = recorded.page
    go_to(page, 11)
    page.keyboard.press("d")
    page.wait_for_selector("#bar button:text-is('Compare with c11')")
    early(recorded.talk(BUSY))
    recorded.commit()
    page.wait_for_selector("#bar h2:text-is('c12')")
    page.wait_for_selector("#bar button:text-is('Compare with c12')")
    page.wait_for_selector("#talk .new-from:has-text('new in c12:')")
    go_to(page, 13)
    page.keyboard.press("d")
    page.wait_for_selector("#talk .heads .card:nth-child(1) b:text-matches(' c12$')")


def test_a_comparison_follows_both_executions(recorded: Recorded) -> None:
    page = recorded.page
    go_to(page, 11)
    page.keyboard.press("d")
    recorded.open(STARTED)
    page.keyboard.press("d")
    marked, here = (f"#talk .heads .card:nth-child({n})" for n in (1, 2))
    page.wait_for_selector(f"{marked}:has-text('0.50 pytest')")
    page.wait_for_selector(f"{here}:has-text('no score')")
    gyre_data.score(recorded.writer, STARTED, 0.25, evaluator="again")
    recorded.writer.commit()
    page.wait_for_selector(f"{here}:has-text('0.25 again')")
    gyre_data.score(recorded.writer, BUSY, 0.75, evaluator="again")  # the one that is not the execution at hand
    recorded.writer.commit()
    page.wait_for_selector(f"{marked}:has-text('0.75 again')")
    page.get_by_role("button", name="Clear the mark").click()
    page.wait_for_selector("#talk button:text-is('with #0 (1.00)')")
    gyre_data.score(recorded.writer, SHORT, 0.5, evaluator="again")
    recorded.writer.commit()
    page.wait_for_selector("#talk button:text-is('with #0 (0.50)')")


def test_the_execution_chosen_last_is_shown_whichever_answer_is_late(recorded: Recorded) -> None:
    page = recorded.page
    with held(page, f"/api/execution?id={SHORT}") as waiting:
        page.locator("#executions .exec", has_text=SHORT[2:8]).click()
        until_held(page, waiting)
        recorded.open(STARTED)
    assert STARTED in text(page, "#head")


def test_an_execution_that_grew_while_its_answer_was_late_is_loaded_again(recorded: Recorded) -> None:
    page = recorded.page
    with held(page, f"/api/execution?id={SHORT}") as waiting:
        page.locator("#executions .exec", has_text=SHORT[2:8]).click()
        until_held(page, waiting)
        recorded.talk(SHORT).call(None, [user("ping")], says("pong"), role="side")
        recorded.commit()
        page.wait_for_selector(f"#executions .exec:has-text('{SHORT[2:8]}') [title^='5 calls']")
    page.wait_for_selector("#head:has-text('5 calls')")


def test_the_call_chosen_last_is_compared_whichever_text_is_late(recorded: Recorded) -> None:
    page = recorded.page
    go_to(page, 2)
    page.keyboard.press("d")
    go_to(page, 3)
    page.keyboard.press("d")
    here = "#talk .heads .card:nth-child(2) b"
    page.wait_for_selector(f"{here}:text-matches(' c3$')")
    with held(page, "/api/texts") as waiting:
        page.locator("#tree .row.call:has(code:text-is('c14'))").click()
        until_held(page, waiting)
        page.locator("#tree .row.call:has(code:text-is('c2'))").click()
        page.wait_for_selector(f"{here}:text-matches(' c2$')")
    assert text(page, here).endswith(" c2")


def test_tokens_asked_for_while_texts_are_late_are_shown(recorded: Recorded) -> None:
    page = recorded.page
    with held(page, "/api/texts") as waiting:
        page.locator("#tree .row.call:has(code:text-is('c14'))").click()
        until_held(page, waiting)
        page.keyboard.press("t")
        page.wait_for_selector("#talk .new-from:has-text('new in c14:')")
    assert page.locator("#talk .tok").count() > 0


def test_an_earlier_message_tells_what_its_sub_agents_do_by_now(recorded: Recorded) -> None:
    page = recorded.page
    go_to(page, 9)
    page.keyboard.press("w")
    page.locator("#talk .card:has(.tool:text-is('Task')) .card-head").click()
    page.wait_for_selector("#talk .toolcall .jump:has-text('sub-agent a91: 3 calls')")
    agent = recorded.talk(BUSY, role="sub_agent", agent_id="a91")
    lost = {"status": "failed", "error": "engine sgl-2 lost: connection reset", "delivery": None, "temperature": None}
    agent.call(recorded.calls(BUSY)[6].output_node, [user("And the fixtures?")], None, **lost)
    recorded.commit()
    page.wait_for_selector("#talk .toolcall .jump:has-text('sub-agent a91: 4 calls')")


def test_the_meaning_of_colours_follows(recorded: Recorded) -> None:
    page = recorded.page
    recorded.open(SHORT)
    page.locator("#tree .row.call:has(code:text-is('c1'))").click()
    page.wait_for_selector("#bar h2:text-is('c1')")
    page.keyboard.press("t")
    page.wait_for_selector("#talk .legend:has-text('trajectory 0 (main)'):not(:has-text('trajectory 1'))")
    fork = {"extension": "fork", "branch_reason": "rewind"}
    recorded.talk(SHORT).call(recorded.calls(SHORT)[1].output_node, [tool("no such file")], says("Then not."), **fork)
    recorded.commit()
    page.wait_for_selector("#talk .legend:has-text('trajectory 1 (main)')")
    page.locator("#colour").select_option("gap")
    page.wait_for_selector("#talk .legend:has-text('no recomputed log-probs')")
    first = recorded.calls(SHORT)[0].output_node
    (node,) = (n for n in recorded.made.rows["nodes"] if n.node_id == first)
    recorded.made.add(
        "teacher_logprobs",
        TeacherLogprobs(node_id=first, teacher="run:5", logprobs=node.logprobs + 0.5, at=recorded.made.now()),
    )
    recorded.commit()
    page.wait_for_selector("#talk .legend:has-text('< 0.002')")
    page.wait_for_selector("#talk .tok.heat-5")


def test_what_was_opened_stays_open_and_is_told_anew(recorded: Recorded) -> None:
    page = recorded.page
    go_to(page, 11)
    page.keyboard.press("i")
    page.locator("#side summary", has_text="Raw request").click()
    page.wait_for_selector("#side details[open] pre")
    recorded.talk(BUSY).call(None, [user("ping")], says("pong"), role="side")
    recorded.commit(*(recorded.made.rows.keys() - {"deliveries"}))
    page.wait_for_selector("#head:has-text('19 calls')")
    assert page.locator("#side details[open] pre").count() == 1
    recorded.commit("deliveries")
    page.keyboard.press("o")
    page.locator("#talk summary", has_text="undelivered").click()
    page.locator("#bar button", has_text="Mark").focus()
    recorded.talk(BUSY).call(None, [user("ping")], says("pong"), role="side")
    recorded.commit(*(recorded.made.rows.keys() - {"deliveries"}))
    page.wait_for_selector("#head:has-text('20 calls')")
    page.wait_for_selector("#talk details[open] summary:has-text('undelivered')")
    assert page.locator("#bar button:focus").inner_text() == "Mark"
    page.keyboard.press("G")
    page.wait_for_selector("#side dd:text-is('unknown')")
    recorded.commit("deliveries")
    page.wait_for_selector("#side dd:text-is('delivered')")


def test_a_search_is_of_the_execution_in_sight_as_it_is_now(recorded: Recorded) -> None:
    page = recorded.page
    page.keyboard.press("/")
    page.keyboard.type("def window")
    page.wait_for_selector("#found .hit code:text-is('c3')")
    page.keyboard.press("Escape")
    recorded.open(SHORT)
    page.keyboard.press("/")
    page.wait_for_function(
        "() => [...document.querySelectorAll('#found .hit code')].map(el => el.textContent) == 'c1,c2,c3'"
    )
    page.keyboard.press("Escape")
    recorded.talk(SHORT).call(None, [user("def window")], says("pong"), role="side")
    recorded.commit()
    page.wait_for_selector("#head:has-text('5 calls')")
    page.keyboard.press("/")
    page.wait_for_selector("#found .hit code:text-is('c5')")


def test_the_line_above_follows_run_json(recorded: Recorded) -> None:
    recorded.writer.update_info({"policy": "run:9"})
    gyre_data.score(recorded.writer, SHORT, 0.25, evaluator="again")
    recorded.writer.commit()
    recorded.page.wait_for_selector("#where:has-text('run:9')")


def test_steps_follow_their_ledger_and_the_run(recorded: Recorded) -> None:
    """Their files are a trainer's, whose ledger is there before figures; a page may still see them one by one."""
    page = recorded.page
    trained = TrainedFolder(recorded.path.parent / "rl", [recorded.path])
    trained._append("metrics.jsonl", figures(1))
    page.wait_for_selector("#training .training-head:has-text('step 1')")
    page.keyboard.press("S")
    page.wait_for_selector("#talk:has-text('the ledger of this step is not there')")
    trained.step([(SHORT, "n_a"), ("e_late", "n_b")])
    page.wait_for_selector(f"#talk .consumed .jump:has-text('{SHORT}')")
    page.wait_for_selector("#talk .consumed .dim:has-text('e_late')")
    Talk(recorded.made.execution("e_late")).call(None, [user("ping")], says("pong"))
    recorded.commit()
    page.wait_for_selector("#talk .consumed .jump:has-text('e_late')")
    assert page.locator("#training .cells").count() == 0
    write_cells(trained.path / "ledger.jsonl")  # its scheduler began later
    page.wait_for_selector("#training .cells")
    trained.close()


def test_figures_never_go_back(recorded: Recorded) -> None:
    page = recorded.page
    trained = TrainedFolder(recorded.path.parent / "rl", [recorded.path])
    page.wait_for_selector("#training .none-yet")
    with held(page, "/api/training") as waiting:
        for n in (1, 2):
            trained.step([(SHORT, "n_a")])
            until_held(page, waiting, f'"run:{n}"')
    assert text(page, "#training .training-head code") == "run:2"
    trained.close()


def test_a_writer_that_is_killed_leaves_interrupted_executions(browser: Any, tmp_path: Path) -> None:
    view_case().write(tmp_path / "run")
    waits = "import gyre_data, sys; w = gyre_data.RunWriter(sys.argv[1]); print(flush=True); sys.stdin.read()"
    asked = [sys.executable, "-c", waits, str(tmp_path / "run")]
    with subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()  # it holds the folder now
        with ViewServer(gyre_data.open(tmp_path / "run")) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            opened = Opened(browser, f"{server.url}#e={STARTED}")
            opened.page.wait_for_selector("#live .good")
            opened.page.wait_for_selector("#head .good:text-is('running')")
            writer.kill()
            opened.page.wait_for_selector("#totals .bad:has-text('1 interrupted')")
            assert opened.page.locator("#head .bad:text-is('interrupted')").count() == 1
            opened.close()
            server.shutdown()
