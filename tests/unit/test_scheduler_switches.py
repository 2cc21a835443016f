"""Switches and what they were made of, from a ledger; ledgers of before, which do not say it, are read as they are."""

from pathlib import Path

from gyre_sched.actions import CellFailed, Drained, SwitchDone, ToRollout, ToTrain
from gyre_sched.ledger import Ledger, read
from gyre_sched.switches import Switch, switches

OLD = (
    b'{"crc":2461396049,"entry":[0,5.0,{"kind":"ToTrain","cell":"c0","epoch":0}]}\n'
    b'{"crc":4237731955,"entry":[1,9.0,{"kind":"SwitchDone","cell":"c0","epoch":1,"version":0}]}\n'
)
"""Written before a switch said its phases."""
PHASES = (("engine_stop", 1.5), ("trainer_start", 2.0))


def test_a_switch_ends_where_it_was_told_and_a_lost_cell_ends_none() -> None:
    entries = [
        (0.0, ToTrain(cell="c0", epoch=0)),
        (1.0, ToTrain(cell="c1", epoch=0)),
        (2.0, Drained(cell="c0", epoch=1)),
        (3.0, CellFailed(cell="c1", epoch=1)),
        (4.0, SwitchDone(cell="c0", epoch=1, version=0, phases=PHASES)),
        (6.0, ToRollout(cell="c0", epoch=1)),
        (9.0, SwitchDone(cell="c0", epoch=2, version=1)),
    ]
    assert switches(entries) == [
        Switch(cell="c0", to="train", started_s=0.0, seconds=4.0, phases=PHASES),
        Switch(cell="c0", to="rollout", started_s=6.0, seconds=3.0, phases=()),
    ]


def test_phases_are_kept_and_a_line_of_before_stays_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(OLD)
    new = SwitchDone(cell="c0", epoch=2, version=1, phases=PHASES)
    with Ledger(path) as ledger:
        ledger.append(12.0, new)
    assert path.read_bytes().startswith(OLD)
    assert [record for _, record in read(path)] == [
        ToTrain(cell="c0", epoch=0),
        SwitchDone(cell="c0", epoch=1, version=0),
        new,
    ]
