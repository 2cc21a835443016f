"""The page of `gyre simulate -o` stands alone and holds every cell of every rung."""

import json
import re
from itertools import pairwise
from pathlib import Path

from typer.testing import CliRunner

from gyre_data.main import app


def test_the_page_stands_alone_and_shows_every_cell(tmp_path: Path) -> None:
    out = tmp_path / "cells.html"
    words = ["simulate", "122b", "--steps", "4", "--seeds", "1", "--policy", "Colocate", "-o", str(out)]
    CliRunner().invoke(app, words, catch_exceptions=False)
    text = out.read_text()
    assert not re.search(r"https?://|src=|@import", text)
    found = re.search(r"const rungs=(.*?),kinds=", text)
    assert found
    charts = json.loads(found[1])
    assert len(charts) == 2
    for chart in charts:
        assert {span[0] for span in chart["spans"]} == set(range(8))
        roles = [span for span in chart["spans"] if span[1] not in ("busy", "optimiser")]
        for cell in range(8):  # roles of a cell follow one another without a gap
            mine = sorted(span[2:] for span in roles if span[0] == cell)
            assert mine[0][0] == 0
            assert all(abs(a[1] - b[0]) < 0.002 for a, b in pairwise(mine))
