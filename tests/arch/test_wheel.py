"""The wheel holds exactly our four packages and lives beside PyPI's `proxy.py`, whose module is called `proxy`."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gyre_data.store import SAMPLE
from gyre_data.verify import verify

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_top_level_names_are_the_four_packages(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {n for n in names if not n.endswith(".dist-info")} == {"gyre_data", "gyre_proxy", "gyre_sched", "gyre_train"}


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


def test_it_installs_beside_proxy_py(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel), "proxy.py"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import proxy, gyre_proxy, gyre_data, importlib.metadata as m\n"
        "assert 'gyre' not in proxy.__file__, proxy.__file__\n"
        "owners = m.packages_distributions()\n"
        "print([owners[n] for n in ('gyre_data', 'gyre_proxy', 'gyre_sched', 'gyre_train', 'proxy')])\n"
    )
    # -S: the editable install of the checkout must not stand in for the wheel.
    run = [sys.executable, "-S", "-c", check]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env={}, check=False)
    assert done.stdout.strip() == str([["gyre-rl"]] * 4 + [["proxy.py"]]), done.stdout + done.stderr
