"""Chat files for SFT: what is in a line, what is left out and told, and what the trainer's reader makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gyre_data as gd
from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_train.chat import read_chat
from tests.support.importing import DATA, write_lines

SECRET = "ghp_" + "a1B2" * 9


@pytest.fixture(scope="module")
def sample() -> Any:
    return gd.open(gd.find_run("sample"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(line: dict[str, Any]) -> int:
    return sum(m["role"] == "assistant" and m.get("weight") != 0 for m in line["messages"])


def test_a_recorded_run_for_sft(sample: Any, tmp_path: Path) -> None:
    done = gd.export(sample, tmp_path / "sft.jsonl")
    assert (tmp_path / "sft.jsonl").stat().st_mode & 0o777 == 0o600
    found = lines(tmp_path / "sft.jsonl")
    admission = gd.admit(sample, need_score=False)
    assert done.format == "chat"
    assert done.num_rows["conversations"] == len(found) == admission.counts()["admitted"]["trajectories"]
    owned = sum(len(t.owned) for e in admission.executions for t in e.trajectories)
    assert sum(map(trained, found)) == done.num_rows["replies"] == owned, "every reply is trained in one line"
    assert any(m.get("weight") == 0 for line in found for m in line["messages"])
    for line in found:
        asked = {call["id"] for m in line["messages"] for call in m.get("tool_calls", ())}
        assert {m["tool_call_id"] for m in line["messages"] if m["role"] == "tool"} <= asked, "results name their call"
    read = list(read_chat(tmp_path / "sft.jsonl"))
    assert [len(one.messages) for one in read] == [len(line["messages"]) for line in found]
    arguments = [c["function"]["arguments"] for one in read for m in one.messages for c in m.get("tool_calls", ())]
    assert arguments, "the sample calls tools"
    assert all(isinstance(given, dict) for given in arguments)


def test_where_chooses_executions(sample: Any, tmp_path: Path) -> None:
    best = {e.execution_id for e in gd.list_executions(sample) if (e.score or 0) > 0.5}
    done = gd.export(sample, tmp_path / "a.jsonl", where="score > 0.5")
    assert {line["execution_id"] for line in lines(tmp_path / "a.jsonl")} == best
    assert done.left_out["executions"] == {"where": 8 - len(best)}
    above = {e.execution_id for e in gd.admit(sample).executions if e.advantage and e.advantage > 0}
    gd.export(sample, tmp_path / "b.jsonl", where="advantage > 0 or false")
    assert {line["execution_id"] for line in lines(tmp_path / "b.jsonl")} == above
    with pytest.raises(ConfigError, match="scoore"):
        gd.export(sample, tmp_path / "c.jsonl", where="scoore > 1")
    assert not (tmp_path / "c.jsonl").exists()


def test_only_main(sample: Any, tmp_path: Path) -> None:
    gd.export(sample, tmp_path / "a.jsonl", roles=["main"], j_max=1)
    found = lines(tmp_path / "a.jsonl")
    assert [line["agent_role"] for line in found] == ["main"] * 8
    assert len({line["execution_id"] for line in found}) == 8


def test_secrets_are_taken_out_unless_told(tmp_path: Path) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "x", "arguments": json.dumps({"key": SECRET})}}
    chat = [
        {"role": "user", "content": f"use {SECRET}"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done"},
    ]
    gd.import_sessions([write_lines(tmp_path / "in.jsonl", [{"messages": chat}])], tmp_path / "run")
    run = gd.open(tmp_path / "run")
    done = gd.export(run, tmp_path / "clean.jsonl")
    assert SECRET not in (tmp_path / "clean.jsonl").read_text()
    assert done.secrets == {"github_token": 2}
    assert done.num_rows["replies"] == 2
    gd.export(run, tmp_path / "whole.jsonl", redact=False)
    (line,) = lines(tmp_path / "whole.jsonl")
    assert line["messages"] == chat


@pytest.mark.parametrize("source", ["claude-code", "pi", "codex"])
def test_imported_sessions_export_and_come_back(source: str, tmp_path: Path) -> None:
    gd.import_sessions([DATA / source], tmp_path / "run")
    run = gd.open(tmp_path / "run")
    done = gd.export(run, tmp_path / "a.jsonl", j_max=None)
    gd.import_sessions([tmp_path / "a.jsonl"], tmp_path / "back")
    again = gd.export(gd.open(tmp_path / "back"), tmp_path / "b.jsonl", j_max=None)
    assert again.num_rows == done.num_rows

    def told(path: Path) -> list[str]:
        return sorted(json.dumps([line["messages"], line.get("tools")]) for line in lines(path))

    assert told(tmp_path / "a.jsonl") == told(tmp_path / "b.jsonl")


def test_nothing_is_overwritten_and_nothing_is_left_half(
    sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.jsonl"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        gd.export(sample, out)
    assert out.read_text() == "mine"

    def fails(*_: Any) -> bytes:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("gyre_data.convert.to_chat.json_line", fails)
        with pytest.raises(OSError, match="disk full"):
            gd.export(sample, out, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert out.read_text() == "mine"
    gd.export(sample, out, force=True)
    assert len(lines(out)) == 18
    with pytest.raises(ConfigError, match="give --format"):
        gd.export(sample, tmp_path / "a.csv")
    with pytest.raises(ConfigError, match="leave them out"):
        gd.export(sample, tmp_path / "copy", where="true")


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    done = CliRunner().invoke(app, ["export", "sample", "-o", str(out), "--where", "score > 0.5", "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["num_rows"]["executions"], told["left_out"]) == (0, 3, {"executions": {"where": 5}})
    done = CliRunner().invoke(app, ["export", "sample", "-o", str(out), "--no-redact", "--force"])
    assert "secrets were left in it" in done.stdout
    assert "18 conversations" in done.stdout
