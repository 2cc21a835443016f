"""`gyre tree`, `gyre stats` and `gyre score` on a run on disk, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import gyre_data as gd
from gyre_data.errors import ConfigError, DataError
from gyre_data.model_shapes import MODELS
from tests.support.busy_case import busy_case
from tests.support.command import gyre, out


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    busy_case().write(Path("runs/a"))
    return Path("runs/a")


def test_tree_names_run_and_execution_by_default_or_prefix(runs: Path) -> None:
    newest = out("tree")
    assert newest.startswith("0ccc swe-412 #2")
    assert newest == out("tree", runs) == out("tree", "0ccc")
    assert out("tree", runs, "0bbb").startswith("0bbb swe-412 #1  claude-code")
    assert "\x1b" not in newest
    with pytest.raises(ConfigError, match="there is no runs/none"):
        raise gyre("tree", "runs/none").exception or AssertionError
    with pytest.raises(DataError, match="3 executions start with it"):
        raise gyre("tree", runs, "0").exception or AssertionError


def test_damage_is_told_plainly(runs: Path) -> None:
    (nodes,) = (runs / "nodes").glob("*.arrow")
    whole = nodes.read_bytes()
    for damaged in (whole[:100], whole[:-40] + b"\0" * 40):
        nodes.write_bytes(damaged)
        for words in (["tree", runs], ["explain", runs], ["ls", runs], ["search", runs, "x"]):
            told = str(gyre(*words).exception)
            assert f"{nodes}: " in told
            assert "restore the file from a copy" in told


def test_tree_json_holds_all_that_the_text_says(runs: Path) -> None:
    told = json.loads(out("tree", runs, "0bbb", "--json"))
    assert told["execution"]["end_reason"] == "harness_timeout"
    assert told["counts"]["calls"] == len(told["calls"]) == 17
    assert told["counts"]["kept_tokens"] == sum(t["owned_tokens"] for t in told["trajectories"])
    assert sum(c["trained_tokens"] for c in told["calls"]) == told["counts"]["kept_tokens"]
    assert sum(c["distinct_tokens"] for c in told["calls"]) == sum(n["num_tokens"] for n in told["nodes"])
    main = told["lanes"][0]
    openings = [segment["opening"] and segment["opening"]["kind"] for segment in main["segments"]]
    assert openings == [None, "compaction", "fork", "fork"]
    assert (main["num_calls"], main["subtree"]["num_calls"], main["subtree"]["num_agents"]) == (11, 15, 2)
    assert main["subtree"]["seconds"] > 0
    assert main["segments"][0]["agents"][0]["segments"][0]["agents"][0]["agent_id"] == "n2"
    failed = next(c for c in told["calls"] if c["status"] == "failed")
    assert (failed["output_tokens"], failed["temperature"], failed["not_trained"]) == (None, None, "call_failed")
    assert len(json.loads(out("tree", runs, "0bbb", "--json", "--j-max", "0"))["trajectories"]) == 6


def test_stats_of_several_runs(runs: Path) -> None:
    busy_case().write(Path("runs/b"))
    one, two = (json.loads(out("stats", *paths, "--json")) for paths in ([runs], [runs, "runs/b"]))
    assert two["calls"] == 2 * one["calls"] == 38
    assert one["false_forks"] == 1
    assert out("stats", runs).startswith("executions  3: 2 scored, 1 running")


def test_stats_forecast_for_a_model_and_cuts(runs: Path) -> None:
    told = json.loads(out("stats", runs, "--model", "qwen3-8b", "--json"))["forecast"]
    assert [cap["j_max"] for cap in told["caps"]] == [1, 2, 3, 4, 5, None]
    assert told["caps"][-1]["flops_ratio"] > 1.2
    assert "worth packing" in out("stats", runs, "-m", "Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match="nearest: Qwen/Qwen3-8B"):
        raise gyre("stats", runs, "--model", "Qwen3-8").exception or AssertionError
    assert out("stats", runs, "--by", "tool").startswith("no tool call")
    assert "unnamed" in out("stats", runs, "--by", "client")
    assert out("stats", runs, "--by", "task").splitlines()[1].startswith("swe-412  2 of 3 scored")


def test_stats_by_role_and_by_evaluator(runs: Path) -> None:
    roles = {row["role"]: row for row in json.loads(out("stats", runs, "--by", "role", "--json"))}
    whole = json.loads(out("stats", runs, "--json"))
    for name in ("calls", "distinct_tokens", "sampled_tokens", "trainable_tokens", "kept_tokens"):
        assert sum(row[name] for row in roles.values()) == whole[name]
    assert {name: row["distinct_tokens"] for name, row in roles.items()} == whole["role_tokens"]
    assert roles["side"]["not_trained"] == {"role_side": 1}
    groups = {row["evaluator"]: row for row in json.loads(out("stats", runs, "--by", "evaluator", "--json"))}
    assert (groups["style"]["scored"], groups["style"]["failed"], groups["style"]["mean"]) == (0, 1, None)
    assert (groups["pytest"]["scored"], groups["pytest"]["executions"], groups["pytest"]["mean"]) == (1, 3, 0.5)
    text = out("stats", runs, "--by", "evaluator")
    assert text.splitlines()[0].split() == ["evaluator", "group", "task", "scored", "failed", "mean", "std", "range"]
    assert "fewer than 2 valid scores: dropped; 1 failed, not counted as zero" in " ".join(text.split())
    gd.score(runs, "e_0bbb00000002", 1.0, evaluator="check")
    assert "2 of 3" in out("stats", runs, "--by", "evaluator")
    assert "equal scores, no signal" in " ".join(out("stats", runs, "--by", "evaluator").split())
    assert out("stats", runs, "--by", "role").splitlines()[1].startswith("main ")


def test_a_second_evaluator_is_told_since_nobody_can_guess_the_reward(runs: Path) -> None:
    told = out("score", runs, "0aaa", "0.25", "--evaluator", "style")
    assert "verdicts of check, pytest, style: whoever trains on it names the reward" in told
    assert told.splitlines()[-1] == f"is it trained: gyre explain {runs} e_0aaa00000001 --evaluator style"


def test_score_under_the_lock(runs: Path) -> None:
    assert "e_0aaa00000001: 0.25 partial by pytest@4" in out(
        "score", runs, "0aaa", "0.25", "--evaluator", "pytest@4", "--partial", "--detail", "3 of 12"
    )
    out("score", runs, "0aaa", "--evaluator", "style", "--failed")
    *_, last, failed = gd.open(runs)["0aaa"].scores
    assert (last.value, last.partial, last.evaluator_version, last.detail) == (0.25, True, "4", "3 of 12")
    assert (failed.status, failed.value) == ("failed", None)
    for wrong, told in ((["nan"], "not a number"), ([], "no value"), (["1", "--failed"], "wanted no value")):
        with pytest.raises(ConfigError, match=told):
            raise gyre("score", runs, "0aaa", *wrong).exception or AssertionError


class _Proxy(BaseHTTPRequestHandler):
    """Answers as the proxy's API would: takes a score, or refuses what its server is told to refuse."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.got.append((self.path, self.headers["authorization"], body))  # type: ignore[attr-defined]
        self.send_response(self.server.answer)  # type: ignore[attr-defined]
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "no such execution"}}')

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def proxy() -> Iterator[Any]:
    server = HTTPServer(("127.0.0.1", 0), _Proxy)
    server.got, server.answer = [], 200  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_score_goes_through_the_proxy_that_owns_the_run(
    runs: Path, proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_KEY", "k")
    url = f"http://127.0.0.1:{proxy.server_port}"
    with gd.RunWriter(runs) as owner:
        owner.update_info({"endpoints": {"proxy": url}})
        assert f"through {url}" in out("score", runs, "0aaa", "0.5", "--evaluator", "pytest@4")
        (path, key, body) = proxy.got.pop()
        assert path == "/api/executions/e_0aaa00000001/scores"
        assert key == "Bearer k"
        assert (body["evaluator"], body["version"], body["value"], body["status"]) == ("pytest", "4", 0.5, "scored")
        for code, error, told in ((404, DataError, "404 no such execution; see"), (401, ConfigError, "set GYRE_KEY")):
            proxy.answer = code
            with pytest.raises(error, match=told):
                raise gyre("score", runs, "0aaa", "0.5").exception or AssertionError
    # Nobody owns the folder any more: written here, though run.json still names the proxy.
    proxy.got.clear()
    assert "through" not in out("score", runs, "0aaa", "0.5")
    assert not proxy.got


def test_score_names_the_owner_when_it_has_no_api(runs: Path) -> None:
    with gd.RunWriter(runs) as owner:
        owner.update_info({"endpoints": {"proxy": "http://127.0.0.1:9"}})
        with pytest.raises(ConfigError, match="pid"):
            raise gyre("score", runs, "0aaa", "0.5").exception or AssertionError


@pytest.mark.parametrize(
    "words",
    [("explain", "sample"), ("query", "sample", "select 1 as x"), ("view", "sample", "-o", "r.html"),
     ("export", "sample", "-o", "x.jsonl")],
)  # fmt: skip
def test_an_evaluator_that_judged_nothing_is_refused(words: tuple[str, ...], runs: Path) -> None:
    with pytest.raises(ConfigError, match="judged something here, got 'nope'; there is judge"):
        raise gyre(*words, "--evaluator", "nope").exception or AssertionError


def test_roles_that_are_never_stored_or_trained_are_not_taken(runs: Path) -> None:
    with pytest.raises(ConfigError, match="system, user, assistant, tool; got --role nope"):
        raise gyre("search", "sample", "bay", "--role", "nope").exception or AssertionError
    for role in ("side", "unknown", "unknown_value"):
        assert gyre("export", "sample", "-o", "x.jsonl", "--role", role).exit_code == 2
    assert "15 replies" not in out("export", "sample", "-o", "x.jsonl", "--role", "main")


def test_a_model_that_is_not_known_lists_those_that_are(runs: Path) -> None:
    told = str(gyre("stats", "sample", "--model", "nope").exception)
    assert all(name in told for name in MODELS)
    assert max(map(len, told.splitlines()[1:])) <= 80


def test_the_heads_of_tables_stand_on_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for by in ("role", "client", "task", "tool", "evaluator"):
        lines = out("stats", "sample", "--by", by).splitlines()
        assert max(map(len, lines)) <= 80
        assert not lines[1].startswith(" "), by


def test_an_export_ends_with_what_to_do_next(runs: Path) -> None:
    for name, told in (("a.jsonl", "gyre import a.jsonl -o RUN"), ("copy", "gyre tree copy"), ("a.parquet", "python")):
        assert told in out("export", "sample", "-o", name).splitlines()[-1]
    assert "docs/convert.md" in out("export", "sample", "-o", "b.jsonl", "--format", "slime").splitlines()[-1]
