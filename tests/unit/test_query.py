"""SQL over runs: the views say what the library says, DuckDB reads the runs and nothing else."""

from __future__ import annotations

import csv
import gc
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

import gyre_data as gd
from gyre_data import frame, query
from gyre_data.admission import admit
from gyre_data.eligible import candidates, eligibility
from gyre_data.errors import ConfigError
from gyre_data.execution import Execution
from gyre_data.installing import pip_install
from gyre_data.ownership import keep
from gyre_data.schema import TABLES
from gyre_data.tree import Forest as Trees
from gyre_data.types import VersionSpan
from tests.support.busy_case import busy_case
from tests.support.command import gyre, out
from tests.support.forest import Forest, forests
from tests.support.rows import one_execution

CHECK = {"check": 1.0}


@settings(max_examples=4, deadline=None)
@given(forests())
def test_views_say_what_the_trees_say(run: Forest) -> None:
    wanted: dict[str, list[Any]] = {"nodes": [], "calls": [], "paths": [], "tokens": []}
    forest = Trees(run)
    for execution_id in forest.execution_ids:
        tree = forest.tree(execution_id)
        judged = eligibility(tree)
        kept, _ = keep(tree, judged, j_max=2)
        owner = {i: t.index for t in kept for i in t.owned}
        wanted["nodes"] += [(name, n) for name, n in zip(tree.node_id, tree.num_tokens_N.tolist(), strict=True)]
        wanted["calls"] += [(c.call_id, n, tree.delivery.get(c.call_id)) for n, c in enumerate(tree.calls, 1)]
        for c in candidates(tree, judged):
            own = next((t for t in kept if t.leaf == c.leaf), None)
            row = (tree.node_id[c.leaf], int(tree.num_tokens_N[c.path].sum()), own and own.index, own and own.num_owned)
            wanted["paths"].append((*row, [tree.node_id[i] for i in c.path.tolist()]))
        for i in np.flatnonzero(judged.trainable_N).tolist():
            logprobs, at = tree.logprobs(i), int(tree.start_pos_N[i])
            assert logprobs is not None
            for k, (token, logprob) in enumerate(zip(tree.ids(i).tolist(), logprobs.tolist(), strict=True)):
                wanted["tokens"].append((tree.node_id[i], k, at + k, token, logprob, owner.get(i), "base", 0))
    sql = {
        "nodes": "select node_id, num_tokens from nodes",
        "calls": "select call_id, number, delivery from calls",
        "paths": "select leaf_node, num_tokens, trajectory, case when trajectory is not null then owned_tokens end,"
        " node_ids from paths",
        "tokens": "select node_id, index, position, token_id, logprob, trajectory, policy_id, version"
        " from trainable_tokens",
    }
    for name, rows in wanted.items():
        assert sorted(query.sql(run, sql[name], j_max=2), key=str) == sorted(rows, key=str), name


@settings(max_examples=3, deadline=None)
@given(forests())
def test_admission_as_views(run: Forest) -> None:
    found = admit(run, evaluators=CHECK)
    told = query.sql(run, "select * exclude (level, rule, run) from excluded", evaluators=CHECK).to_pylist()
    assert told == found.excluded.to_pylist()
    assert len(told) == len(found.excluded)
    whole = query.sql(run, "select execution_id, admitted, reason, advantage from admission", evaluators=CHECK)
    assert len(whole) == len({row.execution_id for row in run.rows["executions"]})
    assert {(name, a) for name, admitted, _, a in whole if admitted} == {
        (e.execution_id, e.advantage) for e in found.executions
    }
    assert all(reason for _, admitted, reason, _ in whole if not admitted)


def test_a_live_run_is_asked_as_it_stood_when_it_was_opened(tmp_path: Path) -> None:
    with gd.RunWriter(tmp_path / "r") as writer:
        writer.write(one_execution("e_1"))
        run = gd.open(tmp_path / "r")
        writer.write(one_execution("e_2"))
        counts = "select count(*), count(distinct execution_id) from calls"
        assert list(run.sql(counts)) == [(3, 1)]
        run.refresh()
        assert list(run.sql(counts)) == [(6, 2)]
        assert [state for (state,) in run.sql("select state from executions")] == ["ended", "ended"]


def test_spans_of_several_versions_are_read_token_by_token() -> None:
    run = Forest()
    e = run.execution()
    a = e.call(output=3)
    spans = [("run", 4, 0, 1), ("run", 5, 1, 3)]
    versions = tuple(VersionSpan(policy_id=p, n=n, start=s, end=t) for p, n, s, t in spans)
    run.rows["nodes"] = [
        replace(row, policy_versions=versions) if row.node_id == a.output else row for row in run.rows["nodes"]
    ]
    found = query.sql(run, "select index, policy_id, version from trainable_tokens order by index")
    assert list(found) == [(0, "run", 4), (1, "run", 5), (2, "run", 5)]


def test_messages_and_tool_calls(tmp_path: Path) -> None:
    run = Forest()
    e = run.execution()
    a = e.call(new=[("user", 3)])
    prompt = next(n for n in e.nodes.values() if n.kind == "prompt")
    e.say(prompt.node_id, {"role": "system", "content": "be brief"}, {"role": "user", "content": "look\naround"})
    e.say(a.output, {"role": "assistant", "content": "", "tool_calls": [{"name": "Bash", "arguments": {"c": "ls"}}]})
    opened = run.write(tmp_path / "r")
    found = opened.sql("select role, number, content from messages order by node_id = ?, number".replace("?", "''"))
    assert sorted(found) == [("assistant", 0, ""), ("system", 0, "be brief"), ("user", 1, "look\naround")]
    called = opened.sql("select author, name, arguments->>'c' from tool_calls")
    assert list(called) == [("policy", "Bash", "ls")]


def test_scores_that_count_are_the_last_written() -> None:
    run = Forest()
    e = run.execution()
    for value in (0.0, 1.0, 0.25):
        e.score(value)
    e.score(None, status="failed")
    e.score(0.75, evaluator="other")
    run.rows["scores"][2] = run.rows["scores"][2].__class__(
        **{
            **{k: getattr(run.rows["scores"][2], k) for k in run.rows["scores"][2].__slots__},
            "at": run.rows["scores"][0].at,
        }
    )
    found = query.sql(run, "select value from scores where counts")
    assert list(found) == [(0.25,), (0.75,)]


def test_every_table_and_view_can_be_read(tmp_path: Path) -> None:
    run = busy_case().write(tmp_path / "r")
    views = query.describe()
    assert set(TABLES) <= set(views)
    assert all(doc.endswith(".") and columns["run"] == "VARCHAR" for doc, columns in views.values())
    counts = ", ".join(f"(select count(*) from {name}) as {name}" for name in [*views, *(f"raw.{n}" for n in TABLES)])
    (found,) = query.sql(run, f"select {counts.replace('as raw.', 'as raw_')}", evaluators=CHECK).to_pylist()
    stored = {name: run.table(name).num_rows for name in TABLES}
    assert {name: found[f"raw_{name}"] for name in TABLES} == stored
    assert {name: found[name] for name in TABLES} == stored | {"executions": 3}
    assert query.sql(run, "select * from calls").columns == tuple(views["calls"][1])
    ids = query.sql(run, "select token_ids from raw.nodes").arrow()["token_ids"]
    assert ids.to_pylist() == run.table("nodes")["token_ids"].to_pylist()


def test_several_runs(tmp_path: Path) -> None:
    runs = [busy_case().write(tmp_path / name) for name in ("a", "b")]
    found = gd.sql(runs, "select run, count(*) as n, count(delivery) from calls group by 1 order by 1")
    assert [row[1:] for row in found] == [(19, 18)] * 2
    assert [Path(row[0]).name for row in found] == ["a", "b"]
    for view in ("trainable_tokens", "nodes", "admission", "excluded", "paths", "executions"):
        one, two = (len(query.sql(r, f"select * from {view}", evaluators=CHECK)) for r in (runs[0], runs))
        assert two == 2 * one > 0
    with pytest.raises(ConfigError, match="its rows would count twice"):
        gd.sql([runs[0], runs[0]], "select * from calls")


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("select * from nodez", "got 'nodez'; nearest: nodes"),
        ("select * from qqq", "views: executions, calls"),
        ("select output_token from calls", 'Candidate bindings: "output_tokens"'),
        ("selec 1", 'syntax error at or near "selec" in LINE 1: selec 1;'),
        ("select sum(status) from calls", r"No function matches .*explicit type casts\.;"),
        ("select cast(call_id as int) from calls", "Could not convert string"),
        ("select cast(range::hugeint * 9223372036854775807 * 9 as hugeint) from range(3)", "cast it to double"),
        ("select * from '/etc/passwd'", "wanted a view of the run, got '/etc/passwd'"),
        ("select * from 'x.csv'", "save a result with -o"),
        ("select * from read_text('/etc/passwd')", "one that uses files"),
        ("copy (select 1) to 'out.csv'", "wanted one SELECT .* got COPY"),
        ("select 1; select 2", "got SELECT, SELECT"),
        ("create table x as select 1", "got CREATE"),
        ("attach 'x.db'", "got ATTACH"),
        ("set enable_external_access = true", "got SET"),
        ("  ", "got nothing"),
        ("show tables", "the views are executions, calls"),
        ("explain analyze copy (select 1) to 'out.csv'", "one that uses files"),
        ("explain analyze install httpfs", "one that uses files"),
        ("explain analyze set memory_limit = '1GB'", "configuration has been locked"),
        ("select * from enable_logging(storage_path = 'log')", "configuration has been locked"),
        ("select * from enable_profiling(save_location = 'p.json')", "configuration has been locked"),
        ("select * from duckdb_secrets()", "one that uses files"),
        ("select * from read_csv('https://example.com/x.csv')", "one that uses files"),
        ("select load_aws_credentials()", "DuckDB can run"),
        ("select " + "(" * 5000 + "1" + ")" * 5000, "Max expression depth"),
        ("select '\udcff'", "write it in UTF-8"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_mend(sql: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=told):
        query.sql(busy_case(), sql)
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_into_memory_goes_to_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reader = query.batches(busy_case(), "select current_setting('temp_directory') as place")
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert reader.read_all()["place"].to_pylist() == [str(folder)]
    assert not folder.exists()
    query.batches(busy_case(), "select 1")  # not read
    with pytest.raises(ConfigError):
        query.sql(busy_case(), "select")
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "when", ["date '294247-01-10'", "make_timestamp(9223372036854775806)", "'infinity'::timestamp"]
)
def test_a_time_that_python_cannot_hold_is_told(when: str, runs: Path) -> None:
    sql = f"select {when} as at"
    with pytest.raises(ConfigError, match="cast them to varchar in the SQL"):
        gd.sql(gd.open(runs), sql).to_pylist()
    for words in (("--json", sql), ("--csv", sql), (sql,)):
        done = gyre("query", runs, *words)
        assert isinstance(done.exception, ConfigError), done.output
    assert gyre("query", runs, f"select ({when})::varchar as at").exit_code == 0


def test_a_view_is_made_only_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = busy_case()
    read: list[str] = []
    monkeypatch.setattr(run, "table", lambda name: (read.append(name), Forest.table(run, name))[1])
    query.sql(run, "select count(*) from calls")
    assert set(read) == {"calls", "deliveries"}
    local = run.table("calls")
    with pytest.raises(ConfigError, match="'local'"):
        query.sql(run, "select * from local")  # no Python variable is in reach
    assert local.num_rows == 19


def test_a_result_goes_where_one_wants_it(tmp_path: Path) -> None:
    run = busy_case().write(tmp_path / "r")
    found = run.sql("select role, sum(output_tokens) as n from calls group by 1 order by 2 desc")
    assert repr(found) == "Frame(5 rows: role, n)"
    assert found.pl().to_dicts() == pl.DataFrame(found).to_dicts() == found.to_pylist() == found.arrow().to_pylist()
    assert pa.table(found).schema.field("n").type == pa.int64()
    excluded = admit(run, evaluators=CHECK).excluded
    assert excluded.pl().height == len(excluded) == pl.DataFrame(excluded).height
    assert excluded[:2].arrow().to_pylist()[0]["reason"] == str(excluded[0].reason)
    assert (excluded, *excluded[:1]) == (tuple(excluded), excluded[0])
    assert hash(excluded[:0]) == hash(())
    assert repr(excluded[:0]) == "Records(Exclusion, [])"
    listed = gd.list_executions(run)
    assert pl.DataFrame(listed)["num_calls"].to_list() == [e.num_calls for e in listed] == [1, 17, 1]
    assert {e.execution_id for e in listed} == set(run.sql("select execution_id from executions").pl()["execution_id"])


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    for module in (frame, query):
        monkeypatch.setattr(module, "import_module", missing)
    found = gd.admit(busy_case(), evaluators=CHECK).groups
    with pytest.raises(ConfigError, match="pip install polars"):
        found.pl()
    with pytest.raises(ConfigError, match="pip install pandas"):
        found.df()
    with pytest.raises(ConfigError, match=re.escape(pip_install("query"))):
        query.sql(busy_case(), "select 1")


def test_iterating_a_run(tmp_path: Path) -> None:
    run = busy_case().write(tmp_path / "r")
    handles = list(run)
    assert [e.execution_id for e in handles] == ["e_0aaa00000001", "e_0bbb00000002", "e_0ccc00000003"]
    assert len(run) == 3
    assert "e_0bbb00000002" in run
    assert "e_0bbb" not in run
    assert all(isinstance(e, Execution) for e in handles)
    assert [len(e.tree.calls) for e in handles] == [1, 17, 1]
    assert run["0bbb"].main.token_ids.dtype == np.int32


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    busy_case().write(Path("runs/a"))
    return Path("runs/a")


BY_ROLE = "select role, count(*) as n, sum(output_tokens) as tokens from calls group by 1 order by 2 desc, 1"


def test_query_as_text_json_and_csv(runs: Path) -> None:
    assert out("query", runs, BY_ROLE) == out("query", BY_ROLE) == (
        "role           n  tokens\n"
        "main          12     238\n"
        "sub_agent      4      93\n"
        "main_summary   1      60\n"
        "side           1       5\n"
        "unknown        1       3\n"
    )  # fmt: skip
    assert json.loads(out("query", runs, BY_ROLE, "--json"))[1] == {"role": "sub_agent", "n": 4, "tokens": 93}
    assert json.loads(out("query", runs, "select 1 as x where false", "--json")) == []
    assert list(csv.reader(io.StringIO(out("query", runs, BY_ROLE, "--csv"))))[:2] == [
        ["role", "n", "tokens"], ["main", "12", "238"],
    ]  # fmt: skip
    odd = "select 1/0 as a, 'x' || chr(10) || 'y' as b, null as c, [1.5, 2] as d, 'z'::blob as e, current_date as f"
    (row,) = json.loads(out("query", runs, odd, "--json"))
    assert (row["a"], row["b"], row["c"], row["d"], row["e"]) == (None, "x\ny", None, [1.5, 2], "eg==")
    assert out("query", runs, odd).splitlines()[1].split()[:3] == ["inf", "x\\ny", "-"]


def test_query_saves_files(runs: Path) -> None:
    for name in ("o.parquet", "o.arrow", "o.csv", "o.json"):
        assert out("query", runs, "select node_id, token_ids from nodes", "-o", name) == f"{name}: 60 rows\n"
    assert pq.read_table("o.parquet").num_rows == 60
    with pa.ipc.open_file("o.arrow") as saved:
        assert saved.read_all().num_rows == 60
    assert len(json.loads(Path("o.json").read_text())) == len(Path("o.csv").read_text().splitlines()) - 1 == 60
    assert out("query", runs, "select 1 as x", "-o", "new/o.csv") == "new/o.csv: 1 rows\n"
    assert {path.stat().st_mode & 0o777 for path in Path().glob("**/o.*")} == {0o600}
    for name, told in (("o.txt", "ends in .parquet"), ("new", "ends in .parquet")):
        with pytest.raises(ConfigError, match=told):
            raise gyre("query", runs, "select 1 as x", "-o", name).exception or AssertionError
    failing = "select case when range = 90000 then error('late') else 'x' end as x from range(100000)"
    with pytest.raises(ConfigError, match="late"):
        raise gyre("query", runs, failing, "-o", "late.csv").exception or AssertionError
    assert not [path.name for path in Path().iterdir() if "late" in path.name]


def test_query_without_sql_lists_views_and_columns(runs: Path) -> None:
    told = out("query", runs)
    assert all(name in told for name in query.describe())
    assert "trainable_tokens  One row a token that RL may train" in told
    assert f"next: gyre query {runs}" in told
    assert max(map(len, told.splitlines())) <= 80
    assert json.loads(out("query", runs, "--json"))["paths"]["columns"]["node_ids"] == "VARCHAR[]"
    with pytest.raises(ConfigError, match="wanted SQL"):
        raise gyre("query", runs, "--csv").exception or AssertionError


def test_query_settings(runs: Path) -> None:
    kept = "select count(*) as n from paths where trajectory is not null"
    found = [out("query", runs, kept, *j).split()[-1] for j in ([], ["--j-max", "1"], ["--j-max", "0"])]
    assert found == ["6", "2", "7"]
    with pytest.raises(ConfigError, match="--evaluator check"):
        raise gyre("query", runs, "select * from admission").exception or AssertionError
    assert "group_running" in out("query", runs, "select * from admission", "--evaluator", "check=2")
    with pytest.raises(ConfigError, match="NAME=WEIGHT"):
        raise gyre("query", runs, "select 1 as x", "--evaluator", "check=much").exception or AssertionError
    assert (
        out("query", runs, "select range as n from range(9)", "--limit", "2").splitlines()[-1].startswith("the first 2")
    )
    for words in (["select 1 as x"], []):
        with pytest.raises(ConfigError, match="there is no runs/none"):
            raise gyre("query", "runs/none", *words).exception or AssertionError
    with pytest.raises(ConfigError, match="wanted one of --json, --csv and -o"):
        raise gyre("query", runs, "select 1 as x", "--json", "--csv").exception or AssertionError
