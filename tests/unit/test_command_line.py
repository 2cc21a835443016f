"""The `gyre` command: help without imports, one-line errors."""

import subprocess
import sys

from gyre_data.main import COMMANDS


def _gyre(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gyre_data", *words], capture_output=True, text=True, check=False)


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


def test_an_error_is_one_line() -> None:
    done = _gyre("tree", "/nonexistent/run")
    assert done.returncode == 2
    assert done.stderr.startswith("gyre: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_unknown_command_is_refused() -> None:
    assert _gyre("bogus").returncode == 2
