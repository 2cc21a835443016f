"""The training config: overrides, types, nearest names, and a dump that reads back to the same tree."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_train import config
from gyre_train.config import TrainingConfig, load_config, to_toml

MINIMAL = """
[model]
path = "m"
[data]
runs = ["r"]
evaluators = { "py test" = 2, other = 0.5 }
[output]
dir = "out"
"""
SFT = ["--model.path=m", "--output.dir=o", "--data.chat=c.jsonl", "--loss.kind=sft"]


def write(tmp_path: Path, text: str = MINIMAL) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_overrides_win_and_the_dump_reads_back(tmp_path: Path) -> None:
    found = load_config(write(tmp_path), ["--train.lr=3", '--data.runs=["a", "b"]', "--output.policy_id=x y\\z"])
    assert found.train.lr == 3.0
    assert isinstance(found.train.lr, float)
    assert found.data.runs == ("a", "b")
    assert found.data.evaluators == {"py test": 2.0, "other": 0.5}
    assert found.output.policy_id == "x y\\z"
    assert load_config(write(tmp_path, to_toml(found))) == found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--optimizer.lr=1"], "unknown key optimizer; nearest"),
        (["--train.lr_rate=1"], r"unknown key train\.lr_rate; nearest train\.lr$"),
        (["--train.dtype='x'"], r"nearest model\.dtype"),
        (["--train.lr=fast"], r"train\.lr: wanted float, got 'fast'"),
        (["--train.steps=true"], r"train\.steps: wanted int, got True"),
        (["--loss.kind=ppo"], "wanted one of sequence, execution, token, sft, got 'ppo'"),
        (["--data.evaluators.pytest=high"], "wanted a table of numbers"),
        (["train.lr=1"], r"wanted --section\.key=value"),
        (["--train.steps_per_burst=2"], 'has no effect .* set train.anchor = "burst"'),
        (["--train.anchor=step", "--loss.kind=sft"], "no effect on sft; remove it"),
        (["--data.chat=c.jsonl"], 'use loss.kind = "sft"'),
        (["--data.epochs=2"], "used once by a policy loss"),
        (["--pack.tokens=0"], "above 0"),
        (["--parallel.ep=0"], r"parallel\.ep: wanted a finite number above 0"),
        (["--parallel.tp=2", "--parallel.ep=4"], r"parallel\.ep = 4: wanted a divisor of parallel\.tp = 2"),
        (["--pack.attention=flex"], r"flex: wanted a GPU .* set pack\.attention = segments"),
        (["--model.device=cuda"], r"wanted bfloat16 for flash-attn, the model runs in float32"),
        (["--dryrun"], r"got '--dryrun'; did you mean --dry-run\?"),
        (["--lr"], r"got '--lr'; write for example --train\.lr=1e-5"),
        (["--train.lr=inf"], "finite number above 0, got inf"),
        (["--train.lr=nan"], "finite number above 0, got nan"),
        (["--train.warmup_steps=-5"], r"train\.warmup_steps: wanted a number from 0"),
        (["--train.steps=-1"], r"train\.steps: wanted a number from 0"),
        (["--train.clip_grad=nan"], r"train\.clip_grad: wanted a number from 0"),
        (["--train.beta1=1.0"], r"train\.beta1: wanted a number from 0 to below 1"),
        (["--model.path="], "set model.path"),
        (["--train.min_lr=1e-7"], "no effect with train.schedule = constant"),
        (["--train.schedule=linear"], "wanted to know the last step; set train.steps"),
        (["--train.schedule=linear", "--train.steps=2", "--train.min_lr=1"], "wanted at most train.lr"),
        (["--loss.clip_low=1.5"], "wanted bounds around 1, got 1.5"),
        (["--loss.advantage=0"], "nothing to learn from"),
        (["--loss.reference=x"], "no effect with loss.kl = 0"),
        (["--loss.kind=sft", "--loss.kl=1"], "loss.kl has no effect on sft; remove it"),
        (["--stream.parts=2"], r"stream\.parts has no effect without satellites; set stream\.satellites = true"),
        (["--stream.satellites=true", "--stream.protocol=rdma"], 'set stream.method = "mooncake" or remove it'),
        (["--stream.satellites=true", "--stream.port=70000"], "wanted a number from 0 to 65535, got 70000"),
    ],
)
def test_a_wrong_setting_says_what_to_do(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path), overrides)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; check the path"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="syntax error"):
        load_config(write(tmp_path, "[model"))


def test_a_command_without_a_file_says_where_one_is() -> None:
    done = CliRunner().invoke(app, ["train"])
    assert "wanted a TOML file, got none; docs/training.md" in str(done.exception)


def test_a_run_needs_no_file_at_all() -> None:
    assert load_config(None, SFT).data.chat == ("c.jsonl",)


def test_every_key_is_in_the_docs_with_its_default() -> None:
    doc = (Path(__file__).resolve().parents[2] / "docs/training.md").read_text()
    lines = [line.split("`") for line in doc.split("## Keys")[1].splitlines() if line.startswith("| `")]
    rows = {line[1]: line[3] for line in lines}
    default = TrainingConfig()
    wanted = {}
    for section in dataclasses.fields(default):
        for key in dataclasses.fields(getattr(default, section.name)):
            value = getattr(getattr(default, section.name), key.name)
            wanted[f"{section.name}.{key.name}"] = "unset" if value in (None, "") else config._toml_value(value)
    assert {name: rows.get(name) for name in wanted} == wanted
