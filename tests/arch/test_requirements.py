"""What the packages import is what pyproject.toml declares for them, and the notices name all of it."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gyre_data
from gyre_data import main

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_USERS = set(EXTRAS) - {"dev", "docs"}
# The extras that a part of the code may import from; the longest path that fits counts. As in `_EXTRA`.
SERVES = {
    "gyre_data": {"query", "remote"},
    "gyre_data/counting.py": {"proxy"},
    "gyre_data/decode.py": {"proxy"},
    "gyre_data/convert/importing.py": {"proxy"},
    "proxy/gyre_proxy": {"proxy"},
    "gyre_train": {"train", "gpu", "transfer", "log"},
    "gyre_train/engine": {"local"},
    "gyre_train/tiny.py": {"local"},
    "gyre_train/demo": {"train", "local", "proxy"},
    "gyre_sched": {"cluster"},
}
BROUGHT_BY = {"httpx2": "anthropic", "tokenizers": "transformers", "huggingface-hub": "tokenizers"}
OTHERWISE_NAMED = {"megatron": "megatron-core", "mooncake": "mooncake-transfer-engine-non-cuda"}
LOADED_OTHERWISE = {
    "uvloop": "uvicorn, by name",
    "httptools": "uvicorn, by name",
    "psutil": "megatron-core, for checkpoints",
    "tensorboard": "torch.utils.tensorboard",
    "trackio": "gyre_train/sinks.py, by the sink's name",
    "wandb": "gyre_train/sinks.py, by the sink's name",
}


def _names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(one).name) for one in requirements}


def _imports(path: Path) -> Iterator[str]:
    """Top-level names of other distributions that a module imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = node.args[0]
            if isinstance(named, ast.Constant) and not named.value.startswith("."):
                yield named.value.split(".")[0]


@cache
def _imported() -> list[tuple[str, Path, set[str]]]:
    """Each part of the code, a module of it, and the distributions that this module imports."""
    every = []
    for path in sorted({path for part in SERVES for path in (ROOT / part).rglob("*.py")}):
        part = max((part for part in SERVES if path.is_relative_to(ROOT / part)), key=len)
        foreign = {n for n in _imports(path) if n not in sys.stdlib_module_names and not n.startswith("gyre_")}
        every.append((part, path, {canonicalize_name(OTHERWISE_NAMED.get(name, name)) for name in foreign}))
    return every


def test_what_is_imported_is_declared() -> None:
    base = _names(PROJECT["dependencies"])
    for part, path, found in _imported():
        declared = base.union(*(_names(EXTRAS[extra]) for extra in SERVES[part]))
        for name, parent in BROUGHT_BY.items():
            declared |= {name} if parent in declared else set()
        assert found <= declared, f"{path.relative_to(ROOT)} imports {found - declared}; declare it in {SERVES[part]}"


def test_what_others_bring_is_brought() -> None:
    for name, parent in BROUGHT_BY.items():
        assert name in _names([one for one in requires(parent) or [] if "extra ==" not in one]), name


def test_what_is_declared_is_used() -> None:
    used = {part: set[str]() for part in SERVES}
    for part, _, found in _imported():
        used[part] |= found
    for extra in FOR_USERS:
        served = [found for part, found in used.items() if extra in SERVES[part]]
        assert _names(EXTRAS[extra]) - set().union(*served) <= set(LOADED_OTHERWISE), extra
    assert _names(PROJECT["dependencies"]) <= used["gyre_data"]


def test_every_command_names_an_extra_that_brings_what_it_imports() -> None:
    for module, extras in main._EXTRA.items():
        part = module.replace(".", "/").replace("gyre_proxy", "proxy/gyre_proxy")
        assert set(extras.split(",")) <= SERVES[part], module


@pytest.mark.parametrize("extra", ["", *sorted(FOR_USERS - {"gpu"})])
def test_the_versions_that_the_tests_run_with_are_allowed(extra: str) -> None:
    for one in map(Requirement, EXTRAS[extra] if extra else PROJECT["dependencies"]):
        if one.marker is None or one.marker.evaluate():
            assert one.specifier.contains(version(one.name)), f"{one} is not what is installed: {version(one.name)}"


def test_the_notices_name_every_package_with_its_licence() -> None:
    rows = re.findall(
        r"^\| (\w[\w-]*) \| ([^|]+) \| (.+) \|$", (ROOT / "THIRD_PARTY_NOTICES.md").read_text(), re.MULTILINE
    )
    told = {canonicalize_name(name): (extras, licence) for name, extras, licence in rows if name != "package"}
    wanted: dict[str, list[str]] = {name: ["(always)"] for name in _names(PROJECT["dependencies"])}
    for extra in [extra for extra in EXTRAS if extra in FOR_USERS]:
        for name in _names(EXTRAS[extra]):
            wanted.setdefault(name, []).append(extra)
    assert {name: extras for name, (extras, _) in told.items()} == {
        n: ", ".join(extras) for n, extras in wanted.items()
    }
    for name, (_, licence) in told.items():
        try:
            said = metadata(name)
        except PackageNotFoundError:
            assert "not installed" in licence, name
            continue
        texts = [said.get("License-Expression"), said.get("License"), *(said.get_all("Classifier") or [])]
        text = " ".join(one for one in texts if one).replace("Mozilla Public License", "MPL")
        kinds = set(re.findall(r"Apache|BSD|MIT|MPL|Zlib", licence))
        assert kinds, name
        assert [kind for kind in kinds if kind not in text] == [], f"{name} says {text[:200]}"


def test_one_version() -> None:
    assert PROJECT["version"] == gyre_data.__version__
    assert f"\n## {gyre_data.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_nobody_is_told_to_install_another_project() -> None:
    """`gyre` on the index is someone else's package; ours is `gyre-rl`."""
    suffixes = {".md", ".py", ".toml", ".txt", ".sh", ".yml", ".js", ".html", ".sbatch", ""}
    skipped = {"site", "node_modules", "runs", "gyre-demo"}
    wrong = re.compile(r"(?:pip|uv|pipx)\s[^\n`]*\binstall\b[^\n`]*(?<![\w./-])gyre(?![\w-])")
    assert wrong.search("pip install gyre")
    assert wrong.search("pip install -U 'gyre[train]'")
    # In a folder with a dot are files of tools: those of Hypothesis come and go while the tests run.
    ours = [one for one in ROOT.iterdir() if one.name == ".ci" or not one.name.startswith(".")]
    for folder in [one for one in ours if one.name not in skipped]:
        for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
            if (
                path.is_file()
                and path.suffix in suffixes
                and path != Path(__file__)
                and "__pycache__" not in path.parts
            ):
                found = wrong.search(path.read_text(errors="replace"))
                assert found is None, f"{path}: {found and found[0]}"
