"""Rules of structure that a reader relies on: sizes, import directions, light imports, one place per heavy package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "gyre_data": ROOT / "gyre_data",
    "gyre_train": ROOT / "gyre_train",
    "gyre_sched": ROOT / "gyre_sched",
    "gyre_proxy": ROOT / "proxy" / "gyre_proxy",
}
MODULES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
NEVER = {
    "gyre_data": {"gyre_proxy", "gyre_train", "gyre_sched"},
    "gyre_proxy": {"gyre_train", "gyre_sched"},
    "gyre_train": {"gyre_proxy", "gyre_sched"},
    "gyre_sched": {"gyre_data", "gyre_proxy", "gyre_train"},
}
ONE_PLACE = {
    "megatron": "gyre_train/megatron/",
    "flash_attn": "gyre_train/attn/",
    "mooncake": "gyre_train/publish/mooncake.py",
}
NOWHERE = {"sglang", "vllm", "pandas"}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def _package(path: Path) -> str:
    return next(name for name, folder in PACKAGES.items() if path.is_relative_to(folder))


def test_modules_and_functions_are_of_readable_size() -> None:
    for path in MODULES:
        text = path.read_text()
        assert len(text.splitlines()) <= 600, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 70, f"{path.name}:{node.lineno} {node.name} is too long"


def test_imports_point_one_way() -> None:
    for path in MODULES:
        assert not _imports(path) & NEVER[_package(path)], path


def test_heavy_packages_have_one_place() -> None:
    for path in MODULES:
        imported = _imports(path)
        assert not imported & NOWHERE, path
        for name, place in ONE_PLACE.items():
            assert name not in imported or str(path.relative_to(ROOT)).startswith(place), path


def test_the_scheduler_needs_the_standard_library_only() -> None:
    for path in PACKAGES["gyre_sched"].rglob("*.py"):
        foreign = _imports(path) - set(sys.stdlib_module_names) - {"gyre_sched"}
        assert foreign <= ({"ray"} if path.name == "ray.py" else set()), path


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import gyre_data", ("numpy", "pyarrow", "typer", "torch")),
        ("import gyre_sched", ("numpy", "pyarrow", "torch")),
        ("import gyre_train", ("torch", "megatron", "transformers")),
        ("import gyre_proxy", ("torch", "httpx", "transformers")),
        ("from gyre_data.main import app", ("pyarrow", "httpx", "torch", "numpy")),
    ],
)
def test_imports_are_light(statement: str, absent: tuple[str, ...]) -> None:
    check = f"{statement}; import sys; print([n for n in {absent!r} if n in sys.modules])"
    path = f"{ROOT}:{ROOT / 'proxy'}"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, env={"PYTHONPATH": path}, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_no_vague_module_names() -> None:
    assert not [path for path in MODULES if path.stem in ("utils", "util", "helpers", "misc", "common")]


def test_tokens_stay_arrays_in_the_trainer() -> None:
    """`.tolist()` on the way to the device would turn millions of ids into Python objects."""
    for path in PACKAGES["gyre_train"].rglob("*.py"):
        if not {"engine", "demo"} & set(path.relative_to(PACKAGES["gyre_train"]).parts):
            assert ".tolist()" not in path.read_text(), path


def test_combine_chunks_is_not_used() -> None:
    """It copies, and on 32-bit lists it can overflow."""
    for path in MODULES:
        assert ".combine_chunks(" not in path.read_text(), path


def test_public_names_are_typed() -> None:
    """Names that are loaded lazily are told to type checkers too."""
    import gyre_data

    for node in ast.parse((PACKAGES["gyre_data"] / "__init__.py").read_text()).body:
        if isinstance(node, ast.If):
            told = {
                alias.asname: one.module for one in node.body if isinstance(one, ast.ImportFrom) for alias in one.names
            }
            assert told == gyre_data._EXPORTS
            return
    raise AssertionError("gyre_data/__init__.py has no block for type checkers")
