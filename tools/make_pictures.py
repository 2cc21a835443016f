"""Write the pictures of docs/inspect.md: what `gyre tree` and `gyre explain` show in a terminal, as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

import gyre_data
from gyre_data.execution import Execution, executions, short_id
from gyre_data.explain import explain_run
from gyre_data.show.explain_text import run_lines
from gyre_data.show.outline import outline
from gyre_data.show.tree_text import tree_lines
from gyre_data.store import SAMPLE
from tests.support.busy_case import busy_case

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH = 84


def picture(name: str, title: str, lines: Iterable[Text]) -> None:
    console = Console(record=True, width=WIDTH, force_terminal=True, highlight=False, file=io.StringIO())
    for line in lines:
        console.print(line)
    svg = console.export_svg(title=title, unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # nothing is fetched to look at a picture
    (DOCS / f"{name}.svg").write_text(svg)


def main() -> None:
    busy = Execution.load(busy_case(), "0bbb")
    picture("inspect-tree", "gyre tree", tree_lines(outline(busy), short="0bbb", where="runs/a", width=WIDTH))
    run = gyre_data.open(SAMPLE)
    known, found = executions(run), explain_run(run)
    shorts = {v.execution_id: short_id(known, v.execution_id) for v in found.verdicts}
    picture("inspect-explain", "gyre explain", run_lines(found, shorts=shorts, where="sample", width=WIDTH))


if __name__ == "__main__":
    main()
