"""Recorded text drives no terminal, and one execution that contradicts itself stops nobody from seeing the others."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gyre_data as gd
from gyre_data.errors import CorruptError
from gyre_data.main import app
from gyre_data.main import run as entry
from gyre_data.printable import printable, printable_json
from gyre_data.types import Call, ExecutionEvent, Node
from gyre_data.verify import verify
from gyre_data.view.report import write_report
from tests.support.rows import one_execution

ORDERS = "\x1b]0;title\x07\x1b[2J\x9b31m\x08\r\x7f\u202egpj.exe"
OBEYED = set("\x1b\x07\x9b\x08\r\x7f\u202e")


def gyre(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_signs_stand_for_control_characters() -> None:
    assert printable("a\x1b[2J\tb\n\x7f\x9b\u202e\ud800") == "a\u241b[2J\tb\n\u2421\ufffd\ufffd\ufffd"
    value = {"x\x9b": "\u202e\ud800\x7f"}
    told = printable_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(told) == value
    assert told.isascii()


def test_no_recorded_text_reaches_a_terminal_as_an_order(tmp_path: Path) -> None:
    function = {"name": f"tool{ORDERS}", "arguments": json.dumps({f"key{ORDERS}": ORDERS})}
    messages = [
        {"role": "user", "content": f"find me {ORDERS}"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "t", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "t", "content": f"result {ORDERS}"},
        {"role": "assistant", "content": f"done {ORDERS}"},
    ]
    line = {"task_id": f"task{ORDERS}", "group_id": f"g{ORDERS}", "agent_id": f"a{ORDERS}", "messages": messages}
    source, run = tmp_path / "s.jsonl", tmp_path / "run"
    source.write_text(json.dumps(line))
    said = [gyre("import", source, "-o", run)]
    (name,) = [e.execution_id for e in gd.open(run)]
    said += [gyre("score", run, name, "0.5", "--evaluator", f"judge{ORDERS}", "--detail", ORDERS)]
    said += [gyre("tag", run, "v1", "--note", ORDERS), gyre("tag", run), gyre("ls", run), gyre("search", run, "result")]
    said += [gyre("tree", run, name, *more) for more in ((), ("--all",), ("--json",))]
    said += [gyre("tree", run, f"{name}:c2", *more) for more in ((), ("--full",), ("--json",))]
    said += [gyre("explain", run, *more) for more in ((), (name,), (f"{name}:c2",))]
    said += [
        gyre("stats", run, *more) for more in ((), ("--json",), *(("--by", by) for by in ("tool", "task", "evaluator")))
    ]
    said += [gyre("query", run, "select * from messages"), gyre("query", run, "--json", "select * from scores")]
    for text in said:
        assert not OBEYED & set(text), text


def test_errors_obey_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gyre", "ls", str(tmp_path / ORDERS)])
    with pytest.raises(SystemExit):
        entry()
    assert not OBEYED & set(capsys.readouterr().err)


def test_one_inconsistent_execution_is_counted_and_the_others_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*one_execution("e_good"), *one_execution("e_bad")]
    moved = [replace(r, start_pos=99) if isinstance(r, Node) and r.node_id == "e_bad_p1" else r for r in rows]
    with gd.RunWriter(tmp_path / "run") as writer:
        writer.write(moved)
    run = gd.open(tmp_path / "run")
    found = gd.stats(run, model="Qwen/Qwen3-8B")
    assert (found.executions, found.trees.inconsistent, found.trees.calls) == (2, 1, 3)
    assert "1 inconsistent" in gyre("stats", tmp_path / "run")
    assert [row["calls"] for row in json.loads(gyre("stats", tmp_path / "run", "--by", "role", "--json"))] == [3]
    assert "1 inconsistent" in caplog.text
    report = write_report(run, tmp_path / "r.html").read_text()
    assert 'id="data:execution:0"' in report
    assert 'id="data:execution:1"' in report


def test_json_of_a_hundred_thousand_levels_is_damage(tmp_path: Path) -> None:
    with gd.RunWriter(tmp_path / "run") as writer:
        writer.write(one_execution())
    newest = max((tmp_path / "run" / "manifest").iterdir())
    whole = newest.read_bytes()
    newest.write_text("[" * 100_000)
    with pytest.raises(CorruptError, match="wanted a JSON manifest"):
        gd.open(tmp_path / "run")
    newest.write_bytes(whole)
    (tmp_path / "run" / "run.json").write_text("[" * 100_000)
    with pytest.raises(CorruptError, match="wanted a JSON object"):
        _ = gd.open(tmp_path / "run").info


@pytest.mark.parametrize("odd", ['{"endpoints": [2]}', '{"tokenizer": {"a": 1}}'])
def test_values_of_another_kind_in_run_json_are_damage(tmp_path: Path, odd: str) -> None:
    with gd.RunWriter(tmp_path / "run") as writer:
        writer.write(one_execution())
    (tmp_path / "run" / "run.json").write_text(odd)
    with pytest.raises(CorruptError, match="mend or remove it"):
        _ = gd.open(tmp_path / "run").info


@pytest.mark.parametrize("text", ["[" * 100_000, '{"input', '["x"]'])
def test_a_text_that_is_no_object_keeps_no_other_from_being_read(tmp_path: Path, text: str) -> None:
    """Of a provider, an importer or a harness: whatever stands in a column or a blob that should hold JSON."""
    run = tmp_path / "run"
    with gd.RunWriter(run) as writer:
        blob = writer.put_blob(text.encode())
        rows: list[Any] = [*one_execution("e_good"), *one_execution("e_bad")]
        for row in rows:
            if row.execution_id == "e_good":
                writer.append([row])
            elif isinstance(row, Call):
                told = {"provider_usage": text, "sampling_asked": text, "sampling_used": text, "upstream": "https://x"}
                writer.append([replace(row, **told, served_model="m", tools_blob=blob)])
            elif isinstance(row, ExecutionEvent):
                writer.append([replace(row, attributes=text)])
            else:
                writer.append([replace(row, message_blobs=(blob,)) if isinstance(row, Node) else row])
    for words in (
        *(
            ("ls", run),
            ("stats", run),
            ("tree", run, "e_bad"),
            ("tree", run, "e_bad:c2"),
            ("tree", run, "e_bad", "--json"),
        ),
        *(("explain", run, "e_bad:c1"), ("search", run, "x"), ("view", run, "-o", tmp_path / "r.html")),
        *(("query", run, "select * from executions"), ("query", run, "select * from messages")),
        *(("export", run, "-o", tmp_path / "copy"), ("export", run, "-o", tmp_path / "c.jsonl")),
        ("export", run, "--format", "verifiers", "-o", tmp_path / "v.jsonl"),
        ("export", run, "--format", "atif", "-o", tmp_path / "atif"),
    ):
        gyre(*words)
    assert {str(problem.kind) for problem in verify(run).problems} <= {"usage"}


def test_a_terminal_gets_signs_and_a_pipe_the_bytes(tmp_path: Path) -> None:
    source, run = tmp_path / "s.jsonl", tmp_path / "run"
    source.write_text(
        json.dumps({"messages": [{"role": "user", "content": ORDERS}, {"role": "assistant", "content": "x"}]})
    )
    gyre("import", source, "-o", run)
    words = [sys.executable, "-m", "gyre_data", "query", str(run), "--csv", "select content from messages limit 1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert ORDERS in subprocess.run(words, env=env, capture_output=True, check=True).stdout.decode()
    ours, theirs = pty.openpty()
    child = subprocess.Popen(words, env=env, stdout=theirs)
    os.close(theirs)
    told = b""
    with contextlib.suppress(OSError):  # how the end of a terminal is told
        while piece := os.read(ours, 65536):
            told += piece
    os.close(ours)
    assert child.wait() == 0
    assert printable("\x1b]0;title") in told.decode()
    assert not OBEYED - {"\r"} & set(told.decode())
