"""The `gyre` command inside this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from gyre_data.main import app

__all__ = ["gyre", "out"]


def gyre(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def out(*arguments: object) -> str:
    done = gyre(*arguments)
    assert done.exit_code == 0, done.output
    return done.output
