"""Each extra alone, installed from the wheel into an environment of its own, brings what its part of the code imports.

Much is fetched and unpacked, so this is not among the quick tests. TORCH_FLAGS is handed to pip, as in the Makefile.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_data.store import SAMPLE

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]
WALK = """
import importlib, pkgutil, sys
def walk(name, *without):
    package = importlib.import_module(name)
    for one in pkgutil.iter_modules(package.__path__, name + "."):
        if one.name not in without and not one.name.endswith("__main__"):
            walk(one.name, *without) if one.ispkg else importlib.import_module(one.name)
"""
# What must work with this extra and no other.
PROGRAMS = {
    "query": "import gyre_data; assert gyre_data.open({sample!r}).sql('select * from calls').arrow().num_rows == 39",
    "proxy": WALK + "walk('gyre_proxy')",
    "local": WALK + "walk('gyre_train.engine'); import gyre_train.tiny as tiny; tiny.make_tiny('tiny', vocab=512)",
    "train": WALK + "walk('gyre_train', 'gyre_train.engine', 'gyre_train.demo', 'gyre_train.tiny')",
    "remote": "import gyre_data; assert len(list(gyre_data.open('file://{sample}'))) == 8",
    "log": "import trackio, wandb",
    "transfer": "import mooncake.engine",
    "cluster": WALK + "walk('gyre_sched')",
    "train,local,proxy": WALK + "walk('gyre_train'); walk('gyre_proxy')",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, capture_output=True, check=True)
    return next(out.glob("*.whl"))


@pytest.mark.parametrize("extra", PROGRAMS)
def test_an_extra_brings_what_its_part_needs(wheel: Path, tmp_path: Path, extra: str) -> None:
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-compile"]
    pip += [*os.environ.get("TORCH_FLAGS", "").split(), "-c", str(ROOT / "constraints.txt"), f"{wheel}[{extra}]"]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    program = PROGRAMS[extra].replace("{sample!r}", repr(str(SAMPLE))).replace("{sample}", str(SAMPLE))
    env = {"PATH": os.defpath, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
