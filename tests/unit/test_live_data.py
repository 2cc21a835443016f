"""Training on a run while it is recorded: which groups are complete, in which order they come, waiting and stopping."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gyre_data import ledger
from gyre_data.admission import admit
from gyre_data.errors import ConfigError
from gyre_data.schema import DeliveryState, EndReason, ScoreStatus
from gyre_data.store import Run, RunWriter
from gyre_data.store import open as open_run
from gyre_data.tree import Forest
from gyre_data.types import ExecutionEvent, GroupEvent, Score
from gyre_train import recorded
from gyre_train.config import load_config
from gyre_train.coordinator import _WAIT_S
from gyre_train.live import Rest, settled_at, wait_for_news
from gyre_train.loop import _rank_main, train
from gyre_train.metrics import read_metrics
from gyre_train.source import Source, load_source
from tests.support.live import recording
from tests.support.ranks import fork_ranks
from tests.support.training import chat_file, config, recorded_run, tiny_model

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


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


def test_a_group_whose_lost_member_nobody_replaces_is_taken_after_a_while(tmp_path: Path) -> None:
    rows = [ended("a", 5), judged("a", 6), ended("b", 9, EndReason.INFRA_FAULT)]
    with RunWriter(tmp_path / "run") as writer:
        writer.write([GroupEvent(group_id="g", at=at(0), size=2), started("a"), started("b"), *rows])
        run = open_run(tmp_path / "run")
        assert settled_at(run, (), 600.0, now=at(18)) == {}
        assert settled_at(run, (), 600.0, now=at(19)) == dict.fromkeys(("a", "b"), at(19))
        writer.write([started("c")])
        run.refresh()
        assert settled_at(run, (), 600.0, now=at(60)) == {}, "it was replaced after all"
        writer.write([ended("c", 70), judged("c", 71)])
        run.refresh()
        assert settled_at(run, (), 600.0, now=at(72)) == dict.fromkeys(("a", "b", "c"), at(71))


def test_a_group_that_its_launcher_made_smaller_is_complete(tmp_path: Path) -> None:
    rows = [ended("a", 5), judged("a", 6), ended("b", 9, EndReason.INFRA_FAULT)]
    with RunWriter(tmp_path / "run") as writer:
        writer.write([GroupEvent(group_id="g", at=at(0), size=2), started("a"), started("b"), *rows])
        writer.write([GroupEvent(group_id="g", at=at(10), size=1)])
    assert settled_at(open_run(tmp_path / "run"), ()) == dict.fromkeys(("a", "b"), at(6))


def test_a_member_that_fell_out_is_replaced_and_not_waited_for(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.write([GroupEvent(group_id="g", at=at(0), size=2), *map(started, "abc"), started("alone", None)])
        writer.write(
            [ended("a", 3, EndReason.INFRA_FAULT), *(ended(n, 5) for n in "bc"), judged("b", 6), judged("c", 7)]
        )
        run = open_run(tmp_path / "run")
        assert settled_at(run, ()) == dict.fromkeys("abc", at(7))
        writer.write([ended("alone", 8), judged("alone", 9)])
        assert wait_for_news([run], 60)
        assert settled_at(run, ())["alone"] == at(9)
        assert not wait_for_news([run], 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    return open_run(recorded_run(tmp_path_factory.mktemp("runs") / "whole", model, groups=4))


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


def told(source: Source) -> tuple[Any, ...]:
    """All of a source that can be compared: examples in order of their ids, with the trees that they make."""
    examples = sorted(source.examples, key=lambda e: e.execution_id)
    plain = [dataclasses.replace(e, tree=len, recorded=None) for e in examples]
    trees = [[list(map(str, dataclasses.astuple(e.tree(n)))) for n in (0, 7)] for e in examples]
    return plain, trees, source.excluded, [e.execution_id for e in source.due({})], len(source.live)


def still_due(source: Source, trained: Mapping[str, int]) -> tuple[Any, ...]:
    """What is trained next, with everything that the step and the ledger are made of."""
    due = source.due(trained)
    plain = [dataclasses.replace(e, tree=len, recorded=None) for e in due]
    return plain, [list(map(str, dataclasses.astuple(e.tree(n)))) for n, e in enumerate(due)], source.complete


@pytest.mark.parametrize("seed", range(2))
def test_reading_on_gives_what_a_fresh_reading_gives(model: Path, whole: Run, tmp_path: Path, seed: int) -> None:
    random, grown = Random(seed), False
    with recording(whole, tmp_path / "run") as live, recording(whole, tmp_path / "done") as done:
        done.add("g3")
        parts = f'--data.runs=["{live.path}","{done.path}"]'
        settings = config(model, tmp_path / "out", parts, f'--data.live=["{live.path}"]', "--train.steps=9")
        before = forgetting = None
        trained: Counter[str] = Counter()
        left = ["g0", "g1", "g2"]
        for _ in range(8):
            match random.choice(("group", "unjudged", "verdict", "nothing", "call", "static")):
                case "group" if left:
                    live.add(left.pop())
                case "unjudged" if left:
                    live.add(left.pop(), but=1)
                case "verdict" if len(left) < 3:  # another one for each execution: rewards are as before, ids are not
                    live.judge(f"g{len(left)}", value=random.random())
                case "call" if len(left) < 3:  # an answer that came in after its execution had ended
                    live.deliver(f"g{len(left)}", DeliveryState.UNDELIVERED)
                case "static" if not grown:
                    done.judge("g3", value=random.random())
                    grown = True
            after = load_source(settings, before=before)
            fresh = load_source(settings)
            assert told(after) == told(fresh)
            before = after
            forgetting = load_source(settings, before=forgetting, trained=trained)
            for forgot in (forgetting, load_source(settings, trained=trained)):
                assert still_due(forgot, trained) == still_due(fresh, trained)
            trained.update(e.execution_id for e in fresh.due(trained, 1))


def test_only_groups_of_which_something_is_new_are_looked_at(
    model: Path, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def watched(*args: Any, only: list[str], **more: Any) -> Any:
        looked.extend(sorted({name[2] for name in only}))
        return admit(*args, only=only, **more)

    monkeypatch.setattr(recorded, "admit", watched)
    with recording(whole, tmp_path / "run") as live:
        settings = config(model, tmp_path / "out", f'--data.live=["{live.path}"]', "--train.steps=9", runs=live.path)
        live.add("g0")
        source = load_source(settings)
        live.add("g1")
        source = load_source(settings, before=source)
        assert looked == ["0", "1"]
        live.judge("g0")
        load_source(settings, before=source)
        assert looked == ["0", "1", "0"]


def test_what_was_trained_of_a_live_run_is_neither_kept_nor_read_again(
    model: Path, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    tree_of = Forest.tree
    monkeypatch.setattr(Forest, "tree", lambda self, name: (read.append(name[2]), tree_of(self, name))[1])
    with recording(whole, tmp_path / "run") as live:
        settings = config(model, tmp_path / "out", f'--data.live=["{live.path}"]', "--train.steps=9", runs=live.path)
        trained: Counter[str] = Counter()
        source = load_source(settings, trained=trained)
        for number in range(3):
            live.add(f"g{number}")
            source = load_source(settings, before=source, trained=trained)
            assert of_groups([e.execution_id for e in source.examples]) == [str(number)] * 2
            trained.update(e.execution_id for e in source.due(trained))
        live.add("g3")
        for before in (source, None):
            read.clear()
            one = load_source(settings, before=before, trained=trained)
            assert read == ["3", "3"], "no other tree was read"
            assert of_groups([e.execution_id for e in one.due(trained)]) == ["3", "3"]
            assert one.recorded is not None
            assert {key[1] for key in one.recorded.by_group} == {"g3"}
            assert one.excluded["executions"]["trained"] == 6
            assert one.complete == {"g0", "g1", "g2", "g3"}


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
        done = train(settings)
        assert (done.step, done.stopped) == (1, True)
        live.add("g2")
        done = train(settings)
        assert (done.step, done.steps_done, done.stopped) == (2, 1, False)
    assert of_groups(sorted({row.execution_id for row in ledger.ledger(out)})) == ["1", "1", "2", "2"]


def test_ranks_wait_together_and_take_the_steps_of_one_process(model: Path, whole: Run, tmp_path: Path) -> None:
    out, one = tmp_path / "out", tmp_path / "one"
    with recording(whole, tmp_path / "run") as live:
        options = (f'--data.live=["{live.path}"]', "--train.steps=9", "--train.executions_per_step=2")
        settings = config(model, out, *options, "--parallel.tp=2", "--parallel.dp=2", runs=live.path)
        out.mkdir()

        def record() -> None:
            for number, group in enumerate(("g1", "g0")):
                while len(ledger.steps(out)) < number:  # the step before has been taken
                    time.sleep(0.05)
                time.sleep(_WAIT_S)  # the ranks stand in their wait
                live.add(group)
            while len(ledger.steps(out)) < 2:
                time.sleep(0.05)
            (out / "stop").touch()

        recorder = threading.Thread(target=record, daemon=True)
        recorder.start()
        fork_ranks(_rank_main, settings.parallel, tmp_path, settings, str(out / "session.json"), False)
        recorder.join(10)
        done = train(config(model, one, *options, "--train.steps=2", runs=live.path))
    assert done.step == 2
    taken = [sorted((r.step, r.execution_id, r.trajectory) for r in ledger.ledger(folder)) for folder in (out, one)]
    assert taken[0] == taken[1]
    assert {(step, name[2]) for step, name, _ in taken[0]} == {(1, "1"), (2, "0")}
    weights = [load_file(folder / "checkpoints/step-00000002/model.safetensors") for folder in (out, one)]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[1])
    assert read_metrics(out / "metrics.jsonl")[1]["rollout_seconds"] > 0


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


def test_looks_take_a_fifth_of_the_time_at_most() -> None:
    now = 100.0
    rest = Rest(lambda: now)
    assert rest.left_s() == 0.0, "the first look waits for nothing"
    with rest.after():
        now += 0.5
    assert rest.left_s() == 2.0
    now += 1.5
    assert rest.left_s() == 0.5
    now += 3.0
    assert rest.left_s() == 0.0
