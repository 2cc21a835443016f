"""Real harness clients from npm, where they are installed (tools/clients/install.sh)."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PI, CLAUDE = "@mariozechner/pi-coding-agent", "@anthropic-ai/claude-code"

__all__ = ["CLAUDE", "PI", "client_path"]


def client_path(*names: str) -> str:
    """A PATH with the clients first; skips the test when one of them is not installed."""
    folder = Path(os.environ.get("GYRE_TEST_CLIENTS") or ROOT / ".cache" / "clients") / "node_modules"
    for name in names:
        if not (folder / name).is_dir():
            pytest.skip(f"no {name} in {folder}; run tools/clients/install.sh (it needs npm)")
    native = folder / f"{CLAUDE}-linux-x64"
    return os.pathsep.join([str(folder / ".bin"), str(native), os.environ["PATH"]])
