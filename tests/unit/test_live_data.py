"""Training on a run while it is recorded: which groups are complete, in which order they come, waiting and stopping."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gyre_data import ledger
from gyre_data.arrays import from_table
from gyre_data.errors import ConfigError
from gyre_data.schema import EndReason, ScoreStatus
from gyre_data.store import Run, RunWriter
from gyre_data.store import open as open_run
from gyre_data.types import ExecutionEvent, GroupEvent, Score
from gyre_train.config import load_config
from gyre_train.live import settled_at, wait_for_news
from gyre_train.loop import train
from gyre_train.metrics import read_metrics
from gyre_train.source import load_source
from tests.support.training import chat_file, config, recorded_run, tiny_model

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TABLES = ("blobs", "executions", "nodes", "calls", "deliveries", "scores")


def at(minutes: int) -> datetime:
    return NOON + timedelta(minutes=minutes)


def started(name: str, group: str | None = "g") -> ExecutionEvent:
    return ExecutionEvent(execution_id=name, event="started", at=at(0), group_id=group)


def ended(name: str, minutes: int, reason: EndReason = EndReason.FINISHED) -> ExecutionEvent:
    return ExecutionEvent(execution_id=name, event="ended", at=at(minutes), end_reason=reason)


def judged(name: str, minutes: int, by: str = "tests", status: ScoreStatus = ScoreStatus.SCORED) -> Score:
    value = 1.0 if status is ScoreStatus.SCORED else None
    return Score(
        score_id=f"s_{name}_{by}_{minutes}", execution_id=name, evaluator=by, status=status, value=value, at=at(minutes)
    )


@pytest.mark.parametrize(
    ("rows", "evaluators", "complete"),
    [
        ([ended("a", 5), judged("a", 6)], (), None),  # b still runs
        ([ended("a", 5), judged("a", 6), ended("b", 9)], (), None),  # nobody judged b
        ([ended("a", 5), judged("a", 6), ended("b", 9), judged("b", 10)], (), 10),
        ([ended("a", 5), judged("a", 12), ended("b", 9), judged("b", 10)], (), 12),
        ([ended("a", 5), judged("a", 6), ended("b", 9), judged("b", 10, status=ScoreStatus.FAILED)], (), 10),
        ([ended("a", 5), judged("a", 6), ended("b", 9), judged("b", 10, by="style")], ("tests",), None),
        ([ended("a", 5), judged("a", 6), ended("b", 9), judged("b", 10)], ("tests@2",), 10),
        ([ended("a", 5), ended("b", 9)], None, 9),  # SFT needs no verdict
        ([ended("a", 5), judged("a", 6), ended("b", 9, EndReason.INFRA_FAULT)], (), None),  # its place is empty
    ],
)
def test_a_group_is_complete_when_all_ended_and_were_judged(
    tmp_path: Path, rows: list[Any], evaluators: tuple[str, ...] | None, complete: int | None
) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.write([GroupEvent(group_id="g", at=at(0), size=2), started("a"), started("b"), *rows])
    wanted = {} if complete is None else dict.fromkeys(("a", "b"), at(complete))
    assert settled_at(open_run(tmp_path / "run"), evaluators) == wanted


def test_a_member_that_fell_out_is_replaced_and_not_waited_for(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.write([GroupEvent(group_id="g", at=at(0), size=2), *map(started, "abc"), started("alone", None)])
        writer.write(
            [ended("a", 3, EndReason.INFRA_FAULT), *(ended(n, 5) for n in "bc"), judged("b", 6), judged("c", 7)]
        )
        run = open_run(tmp_path / "run")
        assert settled_at(run, ()) == dict.fromkeys("abc", at(7))
        writer.write([ended("alone", 8), judged("alone", 9)])
        assert wait_for_news([run], 5)
        assert settled_at(run, ())["alone"] == at(9)
        assert not wait_for_news([run], 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    return open_run(recorded_run(tmp_path_factory.mktemp("runs") / "whole", model, groups=4))


class Recording:
    """Records the groups of `whole` into a run of its own, when it is told to."""

    def __init__(self, whole: Run, path: Path) -> None:
        self.path, self._writer = path, RunWriter(path)
        self._rows = {name: from_table(name, whole.table(name)) for name in TABLES}
        self._groups: dict[str, list[str]] = {}
        for row in self._rows["executions"]:
            if row.group_id and row.execution_id not in self._groups.setdefault(row.group_id, []):
                self._groups[row.group_id].append(row.execution_id)
        self._writer.write(self._rows["blobs"])
        self.open_run = open_run(path)

    def add(self, group: str, *, but: int = 0) -> None:
        """A group, without the verdicts of its last `but` executions."""
        names = self._groups[group]
        unjudged = names[len(names) - but :]
        for table in TABLES[1:]:
            rows = [r for r in self._rows[table] if r.execution_id in names]
            if table == "scores":
                rows = [r for r in rows if r.execution_id not in unjudged]
            self._writer.write([dataclasses.replace(r, at=datetime.now(UTC)) if hasattr(r, "at") else r for r in rows])

    def judge(self, group: str) -> None:
        """The verdicts of all of its executions."""
        names = self._groups[group]
        rows = [r for r in self._rows["scores"] if r.execution_id in names]
        self._writer.write([dataclasses.replace(r, score_id=r.score_id + "x", at=datetime.now(UTC)) for r in rows])

    def close(self) -> None:
        self._writer.close()


@contextmanager
def recording(whole: Run, path: Path) -> Iterator[Recording]:
    made = Recording(whole, path)
    try:
        yield made
    finally:
        made.close()


def of_groups(names: list[str]) -> list[str]:
    return [name[2] for name in names]


def test_groups_come_in_the_order_in_which_they_were_complete(model: Path, whole: Run, tmp_path: Path) -> None:
    with recording(whole, tmp_path / "run") as live:
        settings = config(model, tmp_path / "out", f'--data.live=["{live.path}"]', "--train.steps=9", runs=live.path)
        assert load_source(settings).due({}) == []  # nothing yet, and no error
        live.add("g2", but=1)
        live.add("g3")
        source = load_source(settings)
        assert of_groups([e.execution_id for e in source.due({})]) == ["3", "3"]
        assert source.excluded["executions"]["pending"] == 2
        live.judge("g2")
        live.add("g0")
        source = load_source(settings)
        names = [e.execution_id for e in source.due({})]
        assert of_groups(names) == ["3", "3", "2", "2", "0", "0"]  # the seed draws 3, 0, 2
        assert [e.execution_id for e in source.due(dict.fromkeys(names[:3], 1), 2)] == names[3:5]


def test_training_waits_for_what_is_recorded_and_takes_each_once(model: Path, whole: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with recording(whole, tmp_path / "run") as live:
        settings = config(
            model, out, f'--data.live=["{live.path}"]', "--train.steps=3", "--train.executions_per_step=2",
            "--output.save_every=100", runs=live.path,
        )  # fmt: skip

        def record() -> None:
            live.add("g1")
            for group in ("g0", "g3"):
                while len(ledger.ledger(out)) < len(seen) + 1:  # the step before has been taken
                    time.sleep(0.05)
                seen[:] = ledger.ledger(out)
                live.add(group)

        seen: list[Any] = []
        recorder = threading.Thread(target=record, daemon=True)
        recorder.start()
        done = train(settings)
        recorder.join(10)
    assert (done.step, done.steps_done) == (3, 3)
    trained = sorted({(row.step, row.execution_id) for row in ledger.ledger(out)})
    assert [(step, name[2]) for step, name in trained] == [(1, "1")] * 2 + [(2, "0")] * 2 + [(3, "3")] * 2
    rows = read_metrics(out / "metrics.jsonl")
    assert rows[1]["rollout_seconds"] > 0
    assert [json.loads(step.metrics)["step"] for step in ledger.steps(out)] == [1, 2, 3]
    assert all(step.checkpoint for step in ledger.steps(out))  # whoever waits can stop without losing a step


def test_a_wait_ends_with_the_stop_file_and_the_next_session_goes_on(model: Path, whole: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with recording(whole, tmp_path / "run") as live:
        live.add("g1")
        settings = config(
            model, out, f'--data.live=["{live.path}"]', "--train.steps=2", "--train.executions_per_step=2",
            runs=live.path,
        )  # fmt: skip

        def stop() -> None:
            while not ledger.ledger(out):
                time.sleep(0.05)
            (out / "stop").touch()

        threading.Thread(target=stop, daemon=True).start()
        assert train(settings).step == 1
        live.add("g2")
        done = train(settings)
        assert (done.step, done.steps_done) == (2, 1)
    assert of_groups(sorted({row.execution_id for row in ledger.ledger(out)})) == ["1", "1", "2", "2"]


def test_a_mix_keeps_the_share_of_a_run_that_grows(model: Path, whole: Run, tmp_path: Path) -> None:
    chat = chat_file(tmp_path / "chat.jsonl", "hello", "good day", "good night")
    with recording(whole, tmp_path / "run") as live:
        mix = f'--data.mix={{"{live.path}" = 1, "{chat}" = 1}}'
        settings = config(
            model, tmp_path / "out", f'--data.live=["{live.path}"]', "--train.steps=9", mix,
            runs=live.path, chat=chat,
        )  # fmt: skip

        def shares() -> tuple[int, int, bool]:
            source = load_source(settings)
            due = source.due({})
            recorded = sum(e.part == str(live.path) for e in due)
            return recorded, len(due) - recorded, bool(source.live)

        assert shares() == (0, 0, True)  # a chat alone would not be the mix
        live.add("g1")
        assert shares() == (2, 2, True)
        live.add("g0")
        assert shares() == (3, 3, False)  # the chats are used up: nothing is left to wait for


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ['--data.live=["elsewhere"]', "--train.steps=1"],
            r"wanted names of data.runs, got \['elsewhere'\]",
        ),
        (['--data.live=["run"]'], "data.live: a run that grows has no end of its own; set train.steps"),
    ],
)
def test_a_live_run_without_an_end_or_a_name_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["--model.path=m", "--output.dir=o", '--data.runs=["run"]', *overrides])
