"""`gyre run` over a real proxy: verdicts, timeouts, environment states, resuming, left-overs, cancellation."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gyre_data import open as open_run
from gyre_data.errors import ConfigError
from gyre_proxy.launch.client import ProxyClient, serves
from gyre_proxy.launch.record import record
from gyre_proxy.launch.supervisor import Supervisor, Watched
from gyre_proxy.launch.tasks import Task
from tests.support.launching import serving_scripted, supervise
from tests.support.proxy_server import Served, check_run

HARNESS = str(Path(__file__).parents[1] / "support" / "mini_harness.py")
JUDGE = (
    "import json, os; "
    "json.dump({'value': 0.5, 'partial': os.environ['GYRE_END_REASON'] != 'finished'}, "
    "open(os.environ['GYRE_SCORE_FILE'], 'w'))"
)


def task(name: str, *flags: str, judge: str = JUDGE, num_calls: int = 2, timeout_s: float = 30.0) -> Task:
    return Task(
        id=name,
        prompt="p",
        command=(sys.executable, HARNESS, str(num_calls), *flags),
        evaluator=(sys.executable, "-c", judge),
        timeout_s=timeout_s,
    )


def events(run: Path) -> dict[str, dict[str, object]]:
    """What the executions table says of each execution, later rows over earlier ones."""
    known: dict[str, dict[str, object]] = {}
    for row in open_run(run).table("executions").to_pylist():
        seen = known.setdefault(row["execution_id"], {})
        seen.update({name: value for name, value in row.items() if value is not None})
    return known


def rows(run: Path, table: str) -> list[dict[str, object]]:
    return open_run(run).table(table).to_pylist()


@pytest.fixture
async def served(tmp_path: Path):
    async with serving_scripted(tmp_path / "run") as proxy:
        yield proxy


async def test_executions_run_are_judged_and_leave_their_states(served: Served) -> None:
    result = await supervise(served, task("t"), attempts=2, concurrency=2, states_every=1)
    assert result.ended == {"finished": 2}
    assert result.verdicts == {"scored": 2}
    known = events(served.run)
    assert {e["sample_index"] for e in known.values()} == {0, 1}
    assert {e["group_id"] for e in known.values()} == {"g-t"}
    scores = rows(served.run, "scores")
    assert [s["value"] for s in scores] == [0.5, 0.5]
    states = rows(served.run, "environments")
    for execution in known:
        mine = [s for s in states if s["execution_id"] == execution]
        assert len({s["digest"] for s in mine}) >= 2, "the start, and at least the end"
        (score,) = [s for s in scores if s["execution_id"] == execution]
        assert score["state_id"] in {s["state_id"] for s in mine}
    calls = rows(served.run, "calls")
    assert len(calls) == 4
    assert all(c["environment_state_id"] is not None for c in calls)
    check_run(served.run)


async def test_a_timeout_is_scored_and_a_failed_evaluator_is_not(served: Served) -> None:
    slow = task("slow", "--sleep", timeout_s=3.0)
    broken = task("broken", judge="raise SystemExit('no')")
    result = await supervise(served, slow, broken, concurrency=2)
    assert result.ended == {"harness_timeout": 1, "finished": 1}
    assert result.verdicts == {"scored": 1, "failed": 1}
    by_task = {e["task_id"]: e["execution_id"] for e in events(served.run).values()}
    scores = {s["execution_id"]: s for s in rows(served.run, "scores")}
    assert scores[by_task["slow"]]["value"] == 0.5
    assert scores[by_task["slow"]]["partial"] is True
    assert scores[by_task["broken"]]["value"] is None
    assert scores[by_task["broken"]]["status"] == "failed"


async def test_the_same_command_resumes(served: Served) -> None:
    await supervise(served, task("t"), attempts=1)
    again = await supervise(served, task("t"), attempts=1)
    assert again.ended == {}
    more = await supervise(served, task("t"), attempts=3)
    assert more.ended == {"finished": 2}
    assert sorted(e["sample_index"] for e in events(served.run).values()) == [0, 1, 2]


async def test_what_a_dead_launcher_left_is_replaced(served: Served) -> None:
    async with ProxyClient(served.url) as client:
        group = await client.create_group("t", 1, "g-t")
        await client.create_execution(task="t", group=group, sample_index=0, harness="h")
        (claimed,) = await client.claim(1, ["t"])
    result = await supervise(served, task("t"), attempts=1)
    assert result.ended == {"finished": 1}
    known = events(served.run)
    assert known.pop(claimed["id"])["end_reason"] == "infra_fault"
    (replacement,) = known.values()
    assert replacement["end_reason"] == "finished"


async def test_an_unjudged_end_is_judged_on_the_next_run(served: Served) -> None:
    bare = Task(id="t", prompt="p", command=(sys.executable, HARNESS, "1"))
    await supervise(served, bare, attempts=1)
    assert rows(served.run, "scores") == []
    result = await supervise(served, task("t"), attempts=1)
    assert result.verdicts == {"scored": 1}


async def test_a_stop_ends_harnesses_and_the_next_run_goes_on(served: Served) -> None:
    running = asyncio.create_task(supervise(served, task("t", "--sleep"), attempts=2, concurrency=2))
    deadline = asyncio.get_running_loop().time() + 60
    while len(rows(served.run, "calls")) < 4:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert {e["end_reason"] for e in events(served.run).values()} == {"cancelled"}
    assert not list(served.run.glob("workspaces/*/pid"))
    result = await supervise(served, task("t"), attempts=2)
    assert result.ended == {"finished": 2}
    assert Counter(e["end_reason"] for e in events(served.run).values()) == {"cancelled": 2, "finished": 2}
    check_run(served.run)


async def test_two_launchers_do_not_share_a_run(served: Served) -> None:
    running = asyncio.create_task(supervise(served, task("t", "--sleep"), attempts=1))
    deadline = asyncio.get_running_loop().time() + 60
    while not rows(served.run, "calls"):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    with pytest.raises(ConfigError, match="another `gyre run`"):
        await supervise(served, task("t"), attempts=1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_was_launched_is_recorded(served: Served) -> None:
    await supervise(served, task("t"), attempts=1)
    (known,) = events(served.run).values()
    launcher = json.loads(str(known["launcher"]))
    assert launcher["command"][1] == HARNESS
    assert known["harness"] == "mini_harness"


async def test_any_command_is_recorded(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the harness leaves files where it works
    async with ProxyClient(served.url) as client:
        ended = await record(client, served.run, [sys.executable, HARNESS, "2"])
        execution, status = ended.execution_id, ended.status
        assert status == 0
        status = (await record(client, served.run, [sys.executable, "-c", "raise SystemExit(3)"])).status
        assert status == 3
        with pytest.raises(ConfigError, match="none on PATH"):
            await record(client, served.run, ["no-such-program-here"])
    known = events(served.run)
    assert known[execution]["end_reason"] == "finished"
    assert sorted(str(e["end_reason"]) for e in known.values()) == ["crashed", "finished", "infra_fault"]
    assert len(rows(served.run, "calls")) == 2
    check_run(served.run)


async def test_another_runs_proxy_is_not_taken_for_ours(served: Served, tmp_path: Path) -> None:
    assert await asyncio.to_thread(serves, served.url, served.run, None)
    assert not await asyncio.to_thread(serves, served.url, tmp_path / "another", None)
    assert not await asyncio.to_thread(serves, "http://127.0.0.1:1", served.run, None)


async def test_a_run_folder_may_be_named_from_here(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(served.run.parent)
    async with ProxyClient(served.url, patience_s=5) as client:
        result = await Supervisor(client, Path(served.run.name), [task("t")]).run()
    assert result.verdicts == {"scored": 1}, "the evaluator works in the workspace; the paths it is told hold there"


@pytest.mark.parametrize(
    "wrote",
    ['{"value": 1, "partial": "yes"}', '{"value": 1' + "0" * 400 + "}", "[" * 100_000],
    ids=["partial", "huge", "deep"],
)
async def test_an_odd_score_file_costs_one_verdict_and_not_the_run(served: Served, wrote: str) -> None:
    odd = f"import os; open(os.environ['GYRE_SCORE_FILE'], 'w').write({wrote!r})"
    result = await supervise(served, task("odd", judge=odd, num_calls=0), task("good", num_calls=0))
    assert result.verdicts == {"failed": 1, "scored": 1}


async def test_a_broken_repository_in_a_workspace_costs_nothing(served: Served) -> None:
    broken = Task(id="t", prompt="p", command=(sys.executable, "-c", "import os; os.mkdir('.git')"))
    assert (await supervise(served, broken)).ended == {"finished": 1}
    assert {row["kind"] for row in rows(served.run, "environments")} == {"digest"}


async def test_only_executions_of_the_task_file_are_claimed(served: Served) -> None:
    async with ProxyClient(served.url) as client:
        group = await client.create_group("other", 1, "g-other")
        await client.create_execution(task="other", group=group, sample_index=0, harness="h")
        result = await supervise(served, task("t", num_calls=0))
        assert result.ended == {"finished": 1}
        assert [one["state"] for one in await client.executions(group)] == ["queued"]


async def test_a_verdict_names_the_evaluators_settings(served: Served) -> None:
    await supervise(served, task("t", num_calls=0), task("u", judge=JUDGE + "; 1", num_calls=0))
    assert len({row["config_digest"] for row in rows(served.run, "scores")} - {None}) == 2


async def test_what_is_done_is_told_with_all_its_calls(served: Served) -> None:
    """Also those whose events come only after its end."""
    told: list[int] = []

    def changed(watched: Mapping[str, Watched]) -> None:
        told.extend(one.num_calls for one in watched.values() if one.state == "done")

    await supervise(served, replace(task("t"), evaluator=None), attempts=3, concurrency=1, on_change=changed)
    assert set(told) == {2}
