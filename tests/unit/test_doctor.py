"""`gyre doctor`: what it finds wrong, what it says to do, its exit status."""

from __future__ import annotations

import asyncio
import json
import socket
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data import doctor as module
from gyre_data.child import free_port
from gyre_data.doctor import Finding, Level, doctor
from gyre_data.doctor_command import _lines
from gyre_data.main import app
from tests.support.scripted_engine import ScriptedEngine, serve_app
from tests.support.training import VOCAB, tiny_model


def by_check(found: tuple[Finding, ...]) -> dict[str, Finding]:
    return {one.check: one for one in found}


def test_whatever_is_not_well_says_what_to_do(tmp_path: Path) -> None:
    found = doctor(tmp_path)
    assert all(one.do for one in found if one.level is not Level.OK)
    assert {"python", "core", "gpu", "rdma", "limits", "disk", "port 8765", "engine", "clients"} <= set(by_check(found))


def test_the_exit_status_and_json_tell_a_program(tmp_path: Path) -> None:
    well = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    assert (well.exit_code, json.loads(well.stdout)["ok"]) == (0, True), well.stdout
    wrong = CliRunner().invoke(app, ["doctor", str(tmp_path), "--engine", "http://127.0.0.1:1"], env={"COLUMNS": "80"})
    assert wrong.exit_code == 1
    assert "none answers at http://127.0.0.1:1" in wrong.stdout
    lines = [line for line in wrong.stdout.splitlines() if str(tmp_path) not in line]  # a path is never broken
    assert max(map(len, lines)) <= 80
    assert wrong.stdout.splitlines()[-1].startswith("1 wrong")


@pytest.mark.parametrize(
    ("extras", "clients", "told"),
    [
        (("train", "local", "proxy"), "claude, codex", "gyre demo | gyre record claude"),
        (("local", "proxy"), "codex", "gyre record codex"),
        (("train", "proxy"), None, "gyre record -- CMD"),
        (("train", "local"), "claude", "gyre ls sample"),
    ],
)
def test_the_last_line_offers_what_works(extras: tuple[str, ...], clients: str | None, told: str) -> None:
    found = [
        Finding(check=f"extra {name}", level=Level.OK if name in extras else Level.MISSING, found="", do="pip install")
        for name in ("train", "local", "proxy")
    ]
    level = Level.OK if clients else Level.MISSING
    found.append(Finding(check="clients", level=level, found=clients or "none of claude, codex", do="any"))
    assert _lines(tuple(found), 80)[-1].plain.endswith(f"   next: {told}")


@pytest.mark.parametrize(("vocab", "level"), [(VOCAB, Level.OK), (100, Level.FAIL)])
async def test_a_tokenizer_is_compared_with_the_engine(tmp_path: Path, vocab: int, level: Level) -> None:
    model, engine = tiny_model(tmp_path / "tiny"), ScriptedEngine([], vocab=vocab)
    async with serve_app(engine) as url:
        found = by_check(await asyncio.to_thread(doctor, tmp_path, engines=[url], tokenizer=model))
    assert found["engine"].level is Level.OK
    assert "weights base:0" in found["engine"].found
    assert found["tokenizer"].level is level
    if level is Level.FAIL:
        assert "the served checkpoint's folder" in str(found["tokenizer"].do)


async def test_weights_without_a_name_are_remarked(tmp_path: Path) -> None:
    async with serve_app(ScriptedEngine([], version="default")) as url:
        found = by_check(await asyncio.to_thread(doctor, tmp_path, engines=[url]))
    assert found["engine"].level is Level.WARN
    assert "--weight-version" in str(found["engine"].do)


def test_a_port_that_somebody_else_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        monkeypatch.setattr(module, "_PORTS", ((server.getsockname()[1], "proxy"),))
        (taken,) = module._ports()
    (free,) = module._ports()
    assert (taken.level, free.level) == (Level.WARN, Level.OK)
    assert "another --port" in str(taken.do)


def test_rdma_devices_are_looked_at_port_by_port(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    found = [one for one in module._rdma(tmp_path) if "mlx5" in one.found]
    assert [(one.level, one.found) for one in found] == [
        (Level.OK, "mlx5_0: 1 of 1 ports active"), (Level.WARN, "mlx5_1: 0 of 1 ports active"),
    ]  # fmt: skip


def test_a_requirement_is_met_by_its_version() -> None:
    have = metadata.version("numpy")
    assert module._unmet("numpy>=1.0") is None
    assert module._unmet("numpy>=1.0,<1.1") == f"numpy {have} is not <1.1"
    assert module._unmet("numpy==99") == f"numpy {have} is not ==99"
    assert module._unmet("no-such-package>=1") == "no-such-package is missing"


def test_a_disk_that_cannot_be_written_is_wrong() -> None:
    (found,) = module._disk(Path("/proc/1"))
    assert found.level is Level.FAIL
