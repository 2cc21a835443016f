"""Golden texts. GYRE_TEST_UPDATE_GOLDEN=1 writes them anew; read the diff before you commit it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["check"]

FOLDER = Path(__file__).parent.parent / "golden"


def check(name: str, text: str) -> None:
    path = FOLDER / name
    if os.environ.get("GYRE_TEST_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
