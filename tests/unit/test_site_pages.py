"""docs/start.md, operations.md and faults.md: commands run, extras and figures are the code's, tests exist."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from gyre_data.forecast import activation_bytes
from gyre_data.main import COMMANDS, app
from gyre_data.model_shapes import shape_of
from gyre_proxy.launch.tasks import load_tasks
from gyre_proxy.metrics import Metrics
from gyre_train.config import load_config

ROOT = Path(__file__).parents[2]
START, OPERATIONS, FAULTS = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("start", "operations", "faults"))
GIB = 2**30


def test_the_walk_through_the_sample_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```bash\n(.*?)```", START, re.DOTALL)
    lines = block.splitlines()
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[0] == "gyre"
        assert CliRunner().invoke(app, words[1:]).exit_code == 0, line
    assert (tmp_path / "run.html").stat().st_size > 100_000


def test_the_first_task_of_ones_own_is_judged_and_its_training_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    for text in re.findall(r"```(?:python|toml)\n(.*?)```", START, re.DOTALL):
        Path(re.match(r"# (mine/\w+\.\w+)", text)[1]).write_text(text)
    compile(Path("mine/agent.py").read_text(), "agent.py", "exec")
    Path("answer.txt").write_text("ab12")
    env = {**os.environ, "GYRE_SCORE_FILE": str(tmp_path / "score.json")}
    subprocess.run([sys.executable, "mine/judge.py"], env=env, check=True)
    assert json.loads(Path("score.json").read_text()) == {"value": 0.5}
    settings = load_config("mine/live.toml")
    tasks = load_tasks(Path(settings.rollout.tasks))
    assert [task.id for task in tasks] == ["count", "bays", *settings.data.eval_tasks]
    assert settings.rollout.run == "mine/out-run"


def test_every_extra_and_every_command_is_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = set(re.findall(r"`pip install '\.\[([\w]+)\]'`", START)) | {"train"}
    assert told == set(extras) - {"dev", "docs"}
    for page in (START, OPERATIONS):
        assert set(re.findall(r"(?:^|`|; )gyre (\w+)", page, re.MULTILINE)) - {"COMMAND"} <= set(COMMANDS)


def test_the_sizes_are_those_of_the_forecast() -> None:
    """Weights, KV of 100,000 tokens, state, and a pack's activations with full recomputation, GiB."""
    rows = re.findall(r"^\| ((?:Qwen|Llama)\S+) \| (.*) \|$", OPERATIONS, re.MULTILINE)
    assert len(rows) == 8
    for name, cells in rows:
        shape = shape_of(name)
        size = shape.num_parameters()
        kv = 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 100_000
        packs = [activation_bytes(shape, n, recompute=True, logit_rows=4096) for n in (16_384, 65_536, 131_072)]
        wanted = [f"{size / 1e9:.1f} B", f"{2 * size / GIB:,.0f}", f"{kv / GIB:.1f}", f"{18 * size / GIB:,.0f}"]
        assert cells.split(" | ") == wanted + [f"{pack / GIB:.1f}" for pack in packs], name


def test_the_metrics_are_those_of_the_proxy() -> None:
    exposed = {family.name for family in text_string_to_metric_families(Metrics().expose().decode())}
    named = set(re.findall(r"`(gyre_(?!train|sched)\w+)`", OPERATIONS))
    assert len(named) >= 6
    assert {name.removesuffix("_total") for name in named} <= exposed


def test_every_fault_names_tests_that_exist() -> None:
    faults = FAULTS.partition("| what may not be |")[0]
    rows = [line for line in faults.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| fault"))]
    assert len(rows) > 35
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named or row.endswith("| the same |"), row
        assert [name for name in named if f"def {name}(" not in sources] == [], row
