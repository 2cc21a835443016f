"""What the words of a command name: run, execution, call, token."""

from __future__ import annotations

from pathlib import Path

import pytest

import gyre_data as gd
from gyre_data.errors import ConfigError, DataError
from gyre_data.show.target import find_call, split_run, targets, where_of
from gyre_data.store import SAMPLE
from tests.support.busy_case import busy_case


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    busy_case().write(Path("runs/a"))
    return Path("runs/a")


def test_the_run_comes_first_and_may_be_left_out(runs: Path) -> None:
    for words, run, rest in (
        ([], runs, []),
        (["0bbb"], runs, ["0bbb"]),
        (["runs/a"], runs, []),
        (["runs/a", "0bbb"], runs, ["0bbb"]),
        (["sample"], SAMPLE, []),
        (["sample", "982c"], SAMPLE, ["982c"]),
    ):
        found = split_run(words, 1)
        assert (found[0].path, found[1]) == (run, rest), words
    assert split_run(["runs"], 1, one_is_run=False)[1] == ["runs"]
    with pytest.raises(ConfigError, match="at most 2 words, got 3"):
        split_run(["runs/a", "0bbb", "c1"], 1)
    assert (where_of(gd.open(SAMPLE)), where_of(gd.open(runs))) == ("sample", "runs/a")


def test_an_execution_a_call_and_a_token(runs: Path) -> None:
    run = gd.open(runs)
    newest, whole, call, token = targets(run, [None, "0bbb", "0bbb:c3", "e_0bbb00000002:12:7"])
    assert (newest.short, newest.number) == ("0ccc", None)
    assert (whole.execution.execution_id, whole.short, whole.number) == ("e_0bbb00000002", "0bbb", None)
    assert (call.number, call.token, call.call) == (3, None, call.execution.tree.calls[2])
    assert (token.number, token.token) == (12, 7)
    assert targets(run, [":c1"])[0].short == "0ccc"
    with pytest.raises(ConfigError, match="write 0bbb:c1"):
        assert whole.call
    with pytest.raises(ConfigError, match="tokens count from 0"):
        targets(run, ["0bbb:c3:x"])


def test_calls_by_number_or_by_the_start_of_their_id(runs: Path) -> None:
    tree = gd.open(runs)["0bbb"].tree
    assert find_call(tree, tree.calls[4].call_id) == find_call(tree, "c5") == find_call(tree, "5") == 5
    with pytest.raises(DataError, match="it has c1 to c17"):
        find_call(tree, "c18")
    with pytest.raises(DataError, match="17 of its calls start with it"):
        find_call(tree, "c_")
    with pytest.raises(DataError, match="none of its calls"):
        find_call(tree, "x")
