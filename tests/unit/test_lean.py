"""The tables that `gyre stats` counts: the same figures as from the whole ones, and no token in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import gyre_data as gd
from gyre_data import small_batches
from gyre_data.breakdown import by_role
from gyre_data.compact import compact
from gyre_data.explain import explain_run
from gyre_data.lean import Lean
from gyre_data.listing import list_executions
from gyre_data.reader import Run
from gyre_data.removal import remove
from gyre_data.run_stats import stats
from gyre_data.segment import iter_sealed, map_file
from gyre_data.store import SAMPLE
from tests.support.busy_case import busy_case
from tests.support.forest import Forest

PEAKS = """
import sys, pyarrow, gyre_data
run = gyre_data.open(sys.argv[1])
tokens = gyre_data.stats(run).trees.distinct_tokens
counted = pyarrow.default_memory_pool().max_memory()
run.table("nodes")
print(tokens, counted, pyarrow.default_memory_pool().max_memory())
"""


class Whole:
    """All columns, as counting took them before."""

    def __init__(self, run: Run) -> None:
        self.table, self.path = run.table, run.path


def committed(run: Forest, path: Path) -> gd.RunWriter:
    """A run as a proxy leaves it: a batch a call in every table."""
    writer = gd.RunWriter(path)
    for name in ("executions", "groups", "environments", "scores", "blobs"):
        writer.write(run.rows[name])
    for call in run.rows["calls"]:
        of_call = [row for name in ("nodes", "deliveries") for row in run.rows[name] if row.call_id == call.call_id]
        writer.write([*of_call, call])
    return writer


def assert_counted_alike(run: Run) -> None:
    assert stats(run, model="Qwen/Qwen3-8B").to_json() == stats(Whole(run), model="Qwen/Qwen3-8B").to_json()


def test_of_a_plain_segment_nothing_is_copied(tmp_path: Path) -> None:
    run = busy_case().write(tmp_path / "run")
    (sealed,) = run.manifest.sealed["nodes"]
    data = map_file(run.path / "nodes" / sealed.name)
    schema, batches = iter_sealed(data, sealed, "nodes", columns=("token_ids", "node_id"))
    assert set(schema.names) == {"token_ids", "node_id"}
    for batch in batches:
        values = batch.column("token_ids").values.buffers()[1]
        assert data.address <= values.address <= data.address + data.size - values.size


@pytest.mark.parametrize("state", ["open", "recorded", "joined", "removed", "compacted", "cold"])
def test_figures_are_those_of_the_whole_tables(tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`joined`: as recorded, and so few batches are joined as if they were many."""
    if state == "joined":
        monkeypatch.setattr(small_batches, "_FEW_BATCHES", 1)
    with committed(busy_case(), tmp_path / "run") as writer:
        if state == "open":
            live = gd.open(tmp_path / "run")
            assert live.open_segments
            assert_counted_alike(live)
            return
        writer.seal()
    if state == "removed":
        remove(tmp_path / "run", ["e_0aaa"])
    elif state not in ("recorded", "joined"):
        compact(tmp_path / "run", cold=state == "cold")
    run = gd.open(tmp_path / "run")
    assert stats(run).trees.calls == (18 if state == "removed" else 19)
    assert_counted_alike(run)
    if state == "joined":
        assert [len(list(part()[1])) for part in run.segments("nodes", ("node_id",))] == [1]
        listed, cut = list(list_executions(run)), by_role(run)
        assert listed == list(list_executions(Whole(run)))
        assert cut == by_role(Whole(run))
        assert explain_run(run) == explain_run(Whole(run))


def test_the_sample_and_a_run_without_a_row(tmp_path: Path) -> None:
    assert_counted_alike(gd.open(SAMPLE))
    gd.RunWriter(tmp_path / "run").close()
    assert_counted_alike(gd.open(tmp_path / "run"))


def test_a_log_prob_that_is_no_number_is_found_where_it_is(tmp_path: Path) -> None:
    case = Forest()
    e = case.execution()
    for _ in range(3):
        e.call(output=6)
    outputs = [row for row in case.rows["nodes"] if row.logprobs is not None]
    outputs[1].logprobs[4] = -np.inf
    committed(case, tmp_path / "run").close()
    run = gd.open(tmp_path / "run")
    assert stats(run).trees.not_trained == {"logprob_not_finite": 1}
    assert_counted_alike(run)


def test_lists_have_their_lengths_and_hold_nothing(tmp_path: Path) -> None:
    committed(busy_case(), tmp_path / "run").close()
    run = gd.open(tmp_path / "run")
    lean, whole = Lean(run).table("nodes"), run.table("nodes")
    for name in ("token_ids", "logprobs"):
        assert [x and len(x) for x in lean.column(name).to_pylist()] == [
            x and len(x) for x in whole.column(name).to_pylist()
        ]
    assert lean.column("token_ids").type.value_type == pa.null()
    assert lean.select(["node_id", "policy_versions"]).equals(whole.select(["node_id", "policy_versions"]))


def test_a_cold_run_is_counted_in_a_fraction_of_what_it_unpacks_to(tmp_path: Path) -> None:
    case = Forest()
    last, e = None, case.execution()
    for _ in range(40):
        last = e.call(after=last, new=[("tool", 100_000)], output=5)
    committed(case, tmp_path / "run").close()
    compact(tmp_path / "run", cold=True)
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    tokens, counted, whole = map(int, done.stdout.split())
    assert tokens > 4_000_000
    assert counted < 12_000_000 < 4 * tokens < whole
