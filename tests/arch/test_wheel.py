"""What is released: a wheel with exactly our four packages, an archive that builds the same wheel, and both clean.

The wheel lives beside PyPI's `proxy.py`, whose module is called `proxy`.
"""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import gyre_data
from gyre_data.store import SAMPLE
from gyre_data.verify import verify

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"gyre_data", "gyre_proxy", "gyre_sched", "gyre_train"}
VERSION = gyre_data.__version__


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the archive and the wheel that is built from the archive."""
    out = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"gyre_rl-{VERSION}-py3-none-any.whl"


def _no_litter(names: list[str]) -> list[str]:
    """Names that no release holds: tests, caches, hidden files, compiled code."""
    litter = {"tests", "__pycache__", "site", "runs", "benchmarks", "node_modules"}
    hidden = [name for name in names if any(part.startswith(".") for part in Path(name).parts)]
    return hidden + [name for name in names if litter & set(Path(name).parts) or name.endswith((".pyc", ".so"))]


def test_the_wheel_is_whole_clean_and_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        said = message_from_bytes(packed.read(f"gyre_rl-{VERSION}.dist-info/METADATA"))
        scripts = packed.read(f"gyre_rl-{VERSION}.dist-info/entry_points.txt").decode()
    info = f"gyre_rl-{VERSION}.dist-info"
    assert {name.split("/")[0] for name in names} == PACKAGES | {info}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/THIRD_PARTY_NOTICES.md"} <= set(names)
    assert _no_litter(names) == []
    assert (said["Name"], said["Version"], said["License-Expression"]) == ("gyre-rl", VERSION, "Apache-2.0")
    assert "gyre = gyre_data.main:run" in scripts
    assert wheel.stat().st_size < 2_000_000


def test_every_module_of_the_checkout_is_in_the_wheel(wheel: Path) -> None:
    """It is built from the archive: what the archive leaves out is missed here."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.split("/")[0] in PACKAGES}
    tracked = ["git", "ls-files", "-z", "gyre_data", "gyre_train", "gyre_sched", "proxy/gyre_proxy"]
    done = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    files = {name.removeprefix("proxy/") for name in done.stdout.split("\0") if name}
    assert files <= names


def test_the_archive_is_clean_and_small(built: Path) -> None:
    archive = built / f"gyre_rl-{VERSION}.tar.gz"
    with tarfile.open(archive) as packed:
        names = [name.partition("/")[2] for name in packed.getnames()]
    assert _no_litter([name for name in names if name != ".gitignore"]) == []
    assert {"README.md", "CHANGELOG.md", "LICENSE", "THIRD_PARTY_NOTICES.md", "pyproject.toml", "PKG-INFO"} <= set(
        names
    )
    assert archive.stat().st_size < 3_000_000


def test_the_price_table_is_in_it(wheel: Path) -> None:
    assert "gyre_data/prices.toml" in zipfile.ZipFile(wheel).namelist()


def test_the_page_of_gyre_view_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assets = ROOT / "gyre_data" / "view" / "assets"
    assert {f"gyre_data/view/assets/{path.name}" for path in assets.iterdir()} <= names


def test_the_sample_run_is_in_it_whole(wheel: Path, tmp_path: Path) -> None:
    """A wheel leaves out what git ignores; one missing file and `gyre tree sample` fails on a user's machine."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.startswith("gyre_data/sample/")]
        packed.extractall(tmp_path, names)
        assert sum(packed.getinfo(name).compress_size for name in names) < 64_000
    files = {p.relative_to(SAMPLE) for p in SAMPLE.rglob("*") if p.is_file()}
    assert {Path(name).relative_to("gyre_data/sample") for name in names} == files
    report = verify(tmp_path / "gyre_data/sample")
    assert (report.problems, report.num_rows["calls"]) == ((), 39)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment that holds the wheel, what it asks for, and proxy.py."""
    home = tmp_path_factory.mktemp("bare") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "-q", "--no-compile"]
    pip += ["-c", str(ROOT / "constraints.txt"), str(wheel), "proxy.py"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return home / "bin"


def _told(bare: Path, cwd: Path, program: str) -> str:
    """What a program of that environment prints; it knows nothing of the checkout."""
    env = {"PATH": os.defpath, "HOME": str(cwd), "COLUMNS": "200"}
    done = subprocess.run(
        [bare / "python", "-c", program], capture_output=True, text=True, cwd=cwd, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_installs_beside_proxy_py(bare: Path, tmp_path: Path) -> None:
    program = (
        "import proxy, gyre_proxy, gyre_data, gyre_sched, gyre_train, importlib.metadata as m\n"
        "assert 'gyre' not in proxy.__file__, proxy.__file__\n"
        "owners = m.packages_distributions()\n"
        "print([owners[n] for n in ('gyre_data', 'gyre_proxy', 'gyre_sched', 'gyre_train', 'proxy')])\n"
    )
    assert _told(bare, tmp_path, program).strip() == str([["gyre-rl"]] * 4 + [["proxy.py"]])


def test_the_command_is_there(bare: Path) -> None:
    done = subprocess.run([bare / "gyre", "--version"], capture_output=True, text=True, check=True, env={})
    assert done.stdout == f"gyre {VERSION}\n"


def test_four_packages_are_enough_to_look_and_a_missing_extra_is_named(bare: Path, wheel: Path, tmp_path: Path) -> None:
    commands = {
        "--help": (0, "simulate"),
        "ls sample": (0, "what would be trained"),
        "tree sample 982c": (0, "compaction"),
        "explain sample": (0, "evaluator_failed"),
        "stats sample": (0, "sharing"),
        "verify sample": (0, "clean"),
        "view sample -o run.html": (0, "run.html"),
        "export sample -o copy": (0, "copy"),
        "demo": (2, f"pip install '{wheel}[train,local,proxy]'"),
        "record claude": (2, f"pip install '{wheel}[proxy]'"),
        "engine model": (2, f"pip install '{wheel}[local]'"),
    }
    program = (
        "import contextlib, io, json, sys\n"
        "from gyre_data.main import run\n"
        "told = {}\n"
        f"for words in {list(commands)!r}:\n"
        "    sys.argv, said, status = ['gyre', *words.split()], io.StringIO(), 0\n"
        "    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):\n"
        "        try:\n"
        "            run()\n"
        "        except SystemExit as left:\n"
        "            status = left.code or 0\n"
        "    told[words] = status, said.getvalue()\n"
        "print(json.dumps(told))\n"
    )
    told = json.loads(_told(bare, tmp_path, program))
    for words, (status, wanted) in commands.items():
        assert (told[words][0], wanted in told[words][1]) == (status, True), f"gyre {words}: {told[words]}"
