"""docs/training.md: what it names exists, its settings are settings, its bounds are the code's."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from gyre_train.config import LossConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs/training.md").read_text()
BLOCKS = re.findall(r"```toml\n(.*?)```", DOC, re.DOTALL)
BASE = ["--model.path=m", "--output.dir=o"]


def test_every_file_it_names_exists() -> None:
    named = set(re.findall(r"`((?:gyre_data|gyre_train|tests|examples|benchmarks)/[\w./-]+)`", DOC))
    assert set(re.findall(r"`(gyre_\w+/[\w/]+\.py)`", DOC)) <= named
    named |= {f"docs/{page}" for page in re.findall(r"\]\(([\w-]+\.\w+)(?:#[\w-]+)?\)", DOC)}
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_name_in_the_code_exists() -> None:
    """`Name.attribute` or a function, in brackets behind the file that defines it."""
    found = [
        (file.replace("/", "."), name)
        for file, names in re.findall(r"`(gyre_\w+/[\w/]+)\.py` \(([^)]*)\)", DOC)
        for name in re.findall(r"`([\w.]+)`", names)
    ]
    found += re.findall(r"`(gyre_\w+)\.(\w+)`", DOC)
    assert len(found) > 15
    for module, name in found:
        target = import_module(module)
        for part in name.split("."):
            target = getattr(target, part)


@pytest.mark.parametrize("text", [*BLOCKS, (ROOT / "examples/gpu/train.toml").read_text()])
def test_its_settings_are_settings(text: str, tmp_path: Path) -> None:
    given = tomllib.loads(text)
    (tmp_path / "c.toml").write_text(text)
    base = [one for one in BASE if one[2:].split(".")[0] not in given]
    if not {"runs", "chat"} & given.get("data", {}).keys() and "rollout" not in given:
        base.append('--data.runs=["r"]')
    load_config(tmp_path / "c.toml", base)


def test_the_bounds_of_each_loss_are_the_codes() -> None:
    told = re.findall(r"^\| `(sequence|execution|token)`[^|]*\|[^|]*\| ([\d.]+), ([\d.]+) \|", DOC, re.MULTILINE)
    assert {kind: (float(low), float(high)) for kind, low, high in told} == {
        kind: LossConfig(kind=kind).clip for kind in ("sequence", "execution", "token")
    }
