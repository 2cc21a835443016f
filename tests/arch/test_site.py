"""The documentation site builds with every link and anchor checked, and asks for nothing when it is looked at."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gyre_data
import gyre_proxy
import gyre_train
from gyre_data.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(ROOT / "tools/docs/mkdocs.yml"),
        "-d",
        str(out),
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proxy'}", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, f"make docs says:\n{done.stdout}{done.stderr}"
    return out


def test_every_page_of_the_repository_is_in_it(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if not (site / page).exists()] == []
    assert (site / "index.html").exists()


def test_the_references_name_every_public_name_and_every_command(site: Path) -> None:
    for package in (gyre_data, gyre_proxy, gyre_train):
        text = (site / "reference" / f"{package.__name__}.html").read_text()
        ids = set(re.findall(r'id="([\w.]+)"', text))
        assert [name for name in package.__all__ if not any(one.endswith(f".{name}") for one in ids)] == []
    text = (site / "reference" / "commands.html").read_text()
    assert [name for name in COMMANDS if f'id="gyre-{name}"' not in text] == []
    assert "--dry-run" in text


def test_it_asks_for_nothing_from_elsewhere(site: Path) -> None:
    foreign = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\bhref=["']?https?://"""
    )
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert foreign.search(text) is None, page
        assert 'class="mermaid' not in text, f"{page}: diagrams of this kind load a script from elsewhere"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text()), sheet
