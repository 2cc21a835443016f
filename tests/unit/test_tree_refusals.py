"""A tree that cannot be right is refused with what to do, never repaired."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from gyre_data.errors import AlignmentError, CorruptError, DataError
from gyre_data.execution import Execution, executions, find
from gyre_data.tree import Tree
from tests.support.forest import ExecutionBuilder, Forest


def one() -> tuple[Forest, ExecutionBuilder]:
    run = Forest()
    e = run.execution("e_0123456789ab", group="g")
    e.call(after=e.call(new=[("user", 5)]), new=[("tool", 3)])
    return run, e


def change(run: Forest, number: int, **columns: Any) -> None:
    run.rows["nodes"][number] = replace(run.rows["nodes"][number], **columns)


@pytest.mark.parametrize(
    ("number", "columns", "error", "told"),
    [
        (3, {"start_pos": 7}, AlignmentError, "wanted start_pos 11, got 7"),
        (3, {"parent_id": "n_gone"}, CorruptError, "needs node n_gone, which the run does not hold"),
        (0, {"parent_id": "self"}, CorruptError, "parents run in a circle"),
        (1, {"node_id": "first"}, CorruptError, "occurs twice"),
    ],
)
def test_broken_rows(number: int, columns: dict[str, Any], error: type[Exception], told: str) -> None:
    run, e = one()
    first, last = run.rows["nodes"][0].node_id, run.rows["nodes"][-1].node_id
    change(
        run,
        number,
        **{k: {"self": last, "first": first}.get(v, v) if isinstance(v, str) else v for k, v in columns.items()},
    )
    with pytest.raises(error, match=told) as caught:
        Tree.load(run, e.execution_id)
    assert "gyre verify" in str(caught.value)


def test_log_probs_that_do_not_match_their_ids() -> None:
    run, e = one()
    nodes = run.table("nodes")
    values = nodes.column("logprobs").to_pylist()
    values[2] = values[2][:3]
    at = nodes.schema.get_field_index("logprobs")
    broken = nodes.set_column(at, nodes.schema.field(at), pa.array(values, nodes.schema.field(at).type))
    run.table = lambda name, table=run.table: broken if name == "nodes" else table(name)  # type: ignore[method-assign]
    with pytest.raises(AlignmentError, match="wanted number of log-probs 4, got 3"):
        Tree.load(run, e.execution_id)


def test_find_by_prefix() -> None:
    ids = ["e_12ab", "e_12cd", "e_34ef", "own-name"]
    assert [find(ids, p) for p in ("e_12ab", "34", "own", "12c")] == ["e_12ab", "e_34ef", "own-name", "e_12cd"]
    with pytest.raises(DataError, match=r"2 executions start with it \(e_12ab, e_12cd\); give a longer prefix"):
        find(ids, "12")
    with pytest.raises(DataError, match="no execution starts with it"):
        find(ids, "zz")


def test_events_add_to_one_another() -> None:
    run = Forest()
    e = run.execution(group="g", harness="claude-code", end=None)
    assert executions(run)[e.execution_id].running
    e.end("harness_timeout")
    info = executions(run)[e.execution_id]
    assert (info.running, info.end_reason, info.group_id, info.harness) == (
        False,
        "harness_timeout",
        "g",
        "claude-code",
    )


def test_execution_handle() -> None:
    run, e = one()
    side = e.call(new=[("user", 2)], role="side")
    handle = Execution.load(run, "0123")
    assert handle.main.token_ids.tolist() == handle.tree.path_ids(handle.main.leaf).tolist()
    assert handle.tree.node_id[handle.main.leaf] == run.rows["calls"][1].output_node
    assert handle.path(side.output).nodes.tolist() == handle.tree.path(handle.tree.index[side.output]).tolist()
    with pytest.raises(DataError, match="wanted an execution with calls"):
        Tree.load(run, "e_none")


def test_an_execution_with_calls_but_no_event_row_is_known() -> None:
    run, e = one()
    run.rows["executions"] = []
    assert executions(run)[e.execution_id].running


def test_calls_that_were_never_rendered_make_an_empty_tree() -> None:
    run = Forest()
    e = run.execution("e_0123456789ab")
    call = e.call(status="failed", output=None, delivery=None)
    run.rows["nodes"].clear()
    run.rows["calls"][0] = replace(call.call, prompt_node=None, prompt_tokens=None)
    tree = Tree.load(run, e.execution_id)
    assert (len(tree), tree.num_tokens, tree.roots, list(tree.branches())) == (0, 0, [], [])
    assert tree.leaf(tree.calls[0]) is None
