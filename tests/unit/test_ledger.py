"""The ledger says what the current weights have seen."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from gyre_data import RunWriter, admit, ledger
from gyre_data.admission import AdmittedExecution
from gyre_data.frame import Records
from gyre_data.types import Step
from tests.support.forest import START, Forest
from tests.support.ledgers import append, rows_of


def step(number: int, at: datetime) -> Step:
    return Step(
        step=number,
        policy_id="run",
        n=number,
        parent_policy_id="run" if number > 1 else "base",
        parent_n=number - 1,
        num_executions=1,
        trained_tokens=4,
        at=at,
    )


def admitted(run_path: Path) -> Records[AdmittedExecution]:
    run = Forest()
    for value in (0.0, 1.0, 0.5, 0.25):
        e = run.execution(group="g", score=value)
        e.call(after=(root := e.call()))
        e.call(after=root)
    return admit(run.write(run_path)).executions


def test_what_was_appended_is_consumed(tmp_path: Path) -> None:
    a, b, *_ = admitted(tmp_path / "data")
    assert ledger.consumed(tmp_path / "train") == set()
    with RunWriter(tmp_path / "train") as writer:
        append(writer, step(1, START), [a])
        append(writer, step(2, START + timedelta(seconds=1)), [b])
    assert ledger.consumed(tmp_path / "train") == {a.execution_id, b.execution_id}
    assert ledger.consumed(tmp_path / "train", last_step=1) == {a.execution_id}
    assert [s.n for s in ledger.steps(tmp_path / "train")] == [1, 2]
    rows = [row for row in ledger.ledger(tmp_path / "train") if row.execution_id == a.execution_id]
    assert [(r.trajectory, r.owned_tokens) for r in rows] == [(t.index, t.num_owned) for t in a.trajectories]
    assert sum(r.owned_tokens for r in rows) == a.num_owned
    assert {(r.reward, r.advantage, r.score_ids) for r in rows} == {(a.reward, a.advantage, a.score_ids)}
    assert {(Path(r.data_run), r.manifest) for r in rows} == {((tmp_path / "data").resolve(), a.run.manifest_number)}


def test_going_back_to_a_checkpoint_voids_later_steps(tmp_path: Path) -> None:
    a, b, c, d = admitted(tmp_path / "data")
    with RunWriter(tmp_path / "train") as writer:
        for number, (what, execution) in enumerate([(1, a), (2, b), (3, c), (2, d)]):
            append(writer, step(what, START + timedelta(seconds=number)), [execution])
    assert ledger.consumed(tmp_path / "train") == {a.execution_id, d.execution_id}
    assert [s.step for s in ledger.steps(tmp_path / "train")] == [1, 2]


def test_ledger_rows_without_their_step_did_not_happen(tmp_path: Path) -> None:
    a, b, *_ = admitted(tmp_path / "data")
    with RunWriter(tmp_path / "train") as writer:
        append(writer, step(1, START), [a])
        writer.write(rows_of(step(2, START + timedelta(seconds=1)), [b]))
    assert ledger.consumed(tmp_path / "train") == {a.execution_id}
