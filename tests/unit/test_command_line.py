"""The `gyre` command: help without imports, one-line errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.installing import pip_install
from gyre_data.main import COMMANDS, _load, app
from tests.support.forest import Forest


def _gyre(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gyre_data", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)


def test_help_lists_every_command() -> None:
    shown = _gyre("--help").stdout
    assert all(name in shown and line[:20] in shown for name, (_, _, line) in COMMANDS.items())


def test_every_command_loads_and_every_option_has_help() -> None:
    code = (
        "from gyre_data.main import COMMANDS, _load\n"
        "for name in COMMANDS:\n"
        "    command = _load(name)\n"
        "    assert command.help, name\n"
        "    assert all(p.help for p in command.params if p.param_type_name == 'option'), name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)])
def test_help_shows_switches_without_a_value_and_all_that_it_says(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).output
    assert "--help" in shown
    assert not [line for line in shown.splitlines() if "--" in line and ("<bool>" in line or "list[" in line)]
    if words:
        command = _load(*words)
        said = [*command.help.split("\n\n"), *(param.help for param in command.params if param.help)]
        assert not [text for text in said if text.replace("\\[", "[") not in shown]


def test_an_error_is_one_line() -> None:
    done = _gyre("tree", "/nonexistent/run")
    assert done.returncode == 2
    assert done.stderr.startswith("gyre: ")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told", "extra"),
    [
        ("train CONFIG", "`gyre train` needs the module torch,", "train"),
        ("verify RUN --training --model RUN", "`gyre verify` needs the module torch,", "train"),
        ("engine RUN", "`gyre engine` needs the module torch,", "local"),
        ("demo --dir DEMO", "`gyre demo` needs the module ", "train,local,proxy"),
        ("proxy --run DEMO", "`gyre proxy` needs the module ", "proxy"),
    ],
)
def test_a_missing_extra_is_named(tmp_path: Path, words: str, told: str, extra: str) -> None:
    """With nothing installed but what pyproject.toml asks for without extras."""
    Forest().write(tmp_path / "RUN")
    (tmp_path / "CONFIG").write_text('[model]\npath = "RUN"\n[data]\nruns = ["RUN"]\n[output]\ndir = "OUT"\n')
    missing = ("torch", "megatron", "transformers", "safetensors", "httpx", "aiohttp", "starlette", "orjson", "msgspec")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); from gyre_data.main import run; run()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert told in done.stderr
    assert f"which is not installed; run: {pip_install(extra)}" in done.stderr


def test_an_unknown_command_is_refused() -> None:
    done = _gyre("expalin", "sample")
    assert done.returncode == 2
    assert "Did you mean 'explain'?" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["record", "cluade"], "wanted the program cluade, found none on PATH"),
        (["record", "--engine", "http://127.0.0.1:1", "true"], "got no --tokenizer"),
        (["record", "--run", "/proc/a", "true"], "wanted to record to /proc/a, got"),
        (["record", "true", "--run", "a"], "wanted --run before the client"),
        (
            ["record", "--run", "a", "--engine", "http://127.0.0.1:1", "--tokenizer", "none", "true", "-p"],
            "wanted a tokenizer folder",
        ),
        (["proxy", "--run", "a", "--port", "65536"], "--port"),
        (["proxy", "--run", "a", "--context-window", "0"], "--context-window"),
        (["proxy", "--run", "a", "--max-tokens", "0"], "--max-tokens"),
        (["proxy", "--run", "a", "--temperature", "-1"], "--temperature"),
        (["engine", "a", "--port", "65536"], "--port"),
    ],
)
def test_a_wrong_use_is_refused_and_leaves_nothing(tmp_path: Path, words: list[str], told: str) -> None:
    done = _gyre(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert not list(tmp_path.iterdir())
