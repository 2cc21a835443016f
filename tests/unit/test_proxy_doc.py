"""docs/proxy.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_row_of_the_fault_table_names_its_test():
    text = (ROOT / "docs" / "proxy.md").read_text().partition("## Faults")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    named = [re.search(r"`(test_\w+)` \|$", row) for row in rows if not row.endswith("| the same |")]
    assert len(named) > 20
    assert all(named)
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert [found[1] for found in named if f"def {found[1]}(" not in sources] == []
