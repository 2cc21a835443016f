"""The settings of a training run: one frozen tree, read from one TOML file and `--section.key=value` overrides.

A key that does not exist is an error that names the nearest one; a value of another type is an error that says which.
Nothing here loads torch, so that a wrong file is refused at once.
"""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gyre_data.errors import ConfigError

from .config_checks import check
from .elastic.settings import SchedulerConfig
from .publish.settings import PublishConfig
from .rollout.settings import RolloutConfig
from .streaming.settings import StreamConfig

__all__ = [
    "DataConfig",
    "LossConfig",
    "ModelConfig",
    "OutputConfig",
    "PackConfig",
    "ParallelConfig",
    "PublishConfig",
    "RolloutConfig",
    "SchedulerConfig",
    "StreamConfig",
    "TrainConfig",
    "TrainingConfig",
    "load_config",
    "to_toml",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The policy that is trained."""

    path: str = ""
    """Hugging Face folder (Llama, Qwen2, Qwen3, Qwen3-MoE) or a checkpoint of an earlier training run."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of weights and activations; below float32 the optimiser keeps float32 copies."""
    router_replay: Literal["none", "R3"] = "none"
    """`R3`: tokens go to the experts that the engine recorded for them, not to those the router would choose now."""
    device: str = "cpu"
    """`cpu` (gloo) or `cuda` (nccl; written, not yet verified)."""

    @property
    def on_gpu(self) -> bool:
        """Whether training runs on Megatron's own wrapper, optimiser and sequence parallelism (megatron/stock.py)."""
        return self.device.startswith("cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is trained on."""

    runs: tuple[str, ...] = ()
    """Folders of recorded runs."""
    live: tuple[str, ...] = ()
    """Those of `runs` that are still being recorded: their groups are trained as they become complete."""
    live_patience_s: float = 3600.0
    """Seconds until a live group that lost members, which nobody replaced, is taken as it stands; 0: never."""
    chat: tuple[str, ...] = ()
    """Chat files for SFT: JSON lines of {"messages": [...], "tools": [...]}; assistant turns are trained."""
    mix: dict[str, float] | None = None
    """Share of each entry of `runs` and `chat` in every stretch of training; unset: one order over all of them."""
    eval_tasks: tuple[str, ...] = ()
    """Tasks that are never trained."""
    eval_share: float = 0.0
    """Share of the other tasks, by a hash of the task's id alone, that is never trained either."""
    count: Literal["once", "per_row"] = "once"
    """A token shared by several trajectories is trained once, or once in each of them (oracle, SFT import)."""
    j_max: int = 5
    """Trajectories kept per execution."""
    evaluators: dict[str, float] | None = None
    """Weight of each evaluator in the reward; unset: the only one there is, and an error where there are several."""
    scale: Literal["std", "none"] = "std"
    """Whether advantages are divided by the group's standard deviation."""
    drop_zero_variance: bool = False
    """Leave executions of groups without signal out of E instead of counting them with advantage 0."""
    epochs: int = 1
    """Times each execution is trained; more than 1 is for SFT only."""

    @property
    def live_share(self) -> float:
        """Part of each step that comes from runs that grow, by `mix`; without one, all of it."""
        return sum(self.mix.get(name, 0.0) for name in self.live) / sum(self.mix.values()) if self.mix else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What is minimised; the letters are those of docs/training.md."""

    kind: Literal["sequence", "execution", "token", "sft"] = "sequence"
    """Policy loss with one ratio per `sequence` (trajectory), `execution` or `token`; `sft`: plain log-likelihood."""
    clip_low: float | None = None
    """Lower bound of the ratio; unset: 0.995, for `token` 0.8."""
    clip_high: float | None = None
    """Upper bound of the ratio; unset: 1.005, for `token` 1.2."""
    cap: float = 5.0
    """Truncation of the importance weight w between anchor and sampler; 0: no weights, w = 1."""
    advantage: float = 1.0
    """Factor of the group advantage; 0: no scores needed, the teacher alone decides."""
    teacher: float = 0.0
    """Factor of (teacher's log-prob - logp_old) in each token's advantage; needs `teacher_logprobs`."""
    teacher_name: str | None = None
    """Which teacher of the side table, where it holds several."""
    kl: float = 0.0
    """Factor of the KL penalty to the reference weights; each step runs one more forward."""
    reference: str | None = None
    """Hugging Face folder of the reference weights; unset: model.path."""

    @property
    def clip(self) -> tuple[float, float]:
        """Bounds of the ratio."""
        low, high = (0.8, 1.2) if self.kind == "token" else (0.995, 1.005)
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Steps and optimiser."""

    steps: int = 0
    """Optimiser steps in total over all sessions of this run; 0: until the data is used up."""
    executions_per_step: int = 16
    """E: executions of one optimiser step."""
    steps_per_burst: int = 1
    """K: optimiser steps between two pulls of the anchor when anchor = "burst"."""
    anchor: Literal["auto", "burst", "step", "behaviour"] = "auto"
    """Weights behind logp_old; auto: behaviour for data of the model's own lineage, step otherwise."""
    lr: float = 1e-6
    """Learning rate after warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls from there to `min_lr` at step `steps`."""
    min_lr: float = 0.0
    """Learning rate of the last step of a decay."""
    weight_decay: float = 0.0
    """AdamW decay; never on norm gains and biases."""
    beta1: float = 0.9
    """AdamW first moment."""
    beta2: float = 0.95
    """AdamW second moment."""
    eps: float = 1e-8
    """AdamW denominator floor."""
    clip_grad: float = 1.0
    """Largest gradient norm of a step; 0 only measures it."""
    seed: int = 0
    """Order of the executions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackConfig:
    """How trees become forward passes."""

    tokens: int = 8192
    """Most tokens in one pack."""
    attention: Literal["segments", "flex", "reference"] = "segments"
    """Tree attention: `segments` (exact, skips dead cells), `flex` (GPU, any dtype) or `reference` (dense mask)."""
    sharing: Literal["tree", "rows"] = "tree"
    """`tree`: shared prefixes once; `rows`: each trajectory as its own rows (same gradients, for comparison)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Processes."""

    tp: int = 1
    """Tensor-parallel ranks: each holds a slice of every layer."""
    pp: int = 1
    """Pipeline stages: each holds the same number of layers."""
    cp: int = 1
    """Context-parallel ranks: each computes some of a pack's rows and gathers keys and values of all."""
    dp: int = 1
    """Data-parallel copies of the model: each takes some of a step's packs."""
    ep: int = 1
    """Expert-parallel parts of the tp ranks: each holds whole experts; 1: every rank holds a slice of each."""
    recompute: Literal["none", "full"] = "none"
    """`full`: keep only each layer's input for the backward pass and run the layer again there."""

    @property
    def ranks(self) -> int:
        """Processes, all on this machine and started by `gyre train` itself."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """The trainer's own folder."""

    dir: str = ""
    """Ledger, steps, metrics.jsonl and checkpoints; training resumes from what is there."""
    policy_id: str | None = None
    """Lineage of the versions made (`policy_id:n`); unset: the folder's name and a random suffix."""
    save_every: int = 10
    """Steps between checkpoints; the last step and every published step are always kept."""
    keep: int = 2
    """Checkpoints kept; older ones are deleted."""
    log: tuple[str, ...] = ()
    """Beside metrics.jsonl: `tensorboard` (files in the folder), `wandb`, `trackio`, `prometheus` (metrics.prom)."""
    project: str = "gyre"
    """Project name in wandb and trackio; the run is named by its policy id."""
    page: int = 0
    """Port of this machine on which `gyre view` shows the training while it lasts; 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """All of it, as resolved."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read a TOML file (None: defaults) and apply overrides of the form `--section.key=value`; check the result.

    Relative paths in the file are relative to the working directory, as on the command line.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"training config: wanted a TOML file, {path} does not exist; check the path") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"training config {path}: wanted TOML, got a syntax error: {error}; fix it") from None
    for override in overrides:
        _apply_override(tree, override)
    config = _with_rollouts(_build(tree))
    check(config)
    return config


def _with_rollouts(config: TrainingConfig) -> TrainingConfig:
    """The config with the run that rollouts are recorded in among its data, as one that grows; cells share steps."""
    if config.scheduler.cells:
        config = replace(config, stream=replace(config.stream, satellites=True, controlled=True))
    if not config.rollout.tasks:
        return config
    run = config.rollout.run or f"{config.output.dir.rstrip('/')}-run"
    data = config.data
    data = replace(
        data,
        runs=data.runs if run in data.runs else (*data.runs, run),
        live=data.live if run in data.live else (*data.live, run),
    )
    return replace(config, data=data, rollout=replace(config.rollout, run=run))


def _apply_override(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.removeprefix("--").partition("=")
    section, dot, key = name.partition(".")
    if not override.startswith("--") or not equals or not dot or not key:
        near = difflib.get_close_matches(override, ("--dry-run", "--json", "--help"), n=1, cutoff=0.75)
        mend = f"did you mean {near[0]}?" if near else "write for example --train.lr=1e-5"
        raise ConfigError(f"override: wanted --section.key=value, got {override!r}; {mend}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    target = tree.setdefault(section, {})
    *tables, leaf = key.split(".")
    for table in tables:
        target = target.setdefault(table, {})
    target[leaf] = value


def _build(tree: Mapping[str, Any]) -> TrainingConfig:
    known = {f"{s.name}.{f.name}" for s in fields(TrainingConfig) for f in fields(_section_type(s.name))}
    sections = {s.name for s in fields(TrainingConfig)}
    built = {}
    for section, values in tree.items():
        if section not in sections or not isinstance(values, Mapping):
            raise _unknown(section, sorted(sections))
        section_type = _section_type(section)
        hints = get_type_hints(section_type)
        for key in values:
            if key not in hints:
                raise _unknown(f"{section}.{key}", sorted(known))
        arguments = {key: _convert(f"{section}.{key}", value, hints[key]) for key, value in values.items()}
        built[section] = section_type(**arguments)
    return TrainingConfig(**built)


def _section_type(name: str) -> type:
    section_type: type = get_type_hints(TrainingConfig)[name]
    return section_type


def _unknown(name: str, known: list[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    leaf = name.rpartition(".")[2]
    same_leaf = difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in known], n=1, cutoff=0.75)
    if same_leaf:
        nearest = min(
            (k for k in known if k.rpartition(".")[2] == same_leaf[0]),
            key=lambda k: -difflib.SequenceMatcher(a=k, b=name).ratio(),
        )
    return ConfigError(f"unknown key {name}; nearest {nearest}")


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the declared type, or raise an error that says what was wanted."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        inner = next(a for a in arguments if a is not type(None))
        return None if value is None else _convert(name, value, inner)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{name}: wanted one of {', '.join(map(str, arguments))}, got {value!r}; pick one")
        return value
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ConfigError(f'{name}: wanted a list of strings, got {value!r}; write ["a", "b"]')
        return tuple(items)
    if origin is dict and arguments[1] is not float:
        if not isinstance(value, Mapping) or not {type(one) for one in value.values()} <= {*get_args(arguments[1])}:
            raise ConfigError(f"{name}: wanted a table of plain values, got {value!r}; write {{ burst = 2 }}")
        return dict(value)
    if origin is dict:
        if not isinstance(value, Mapping) or not all(_is_number(weight) for weight in value.values()):
            raise ConfigError(f"{name}: wanted a table of numbers, got {value!r}; write {{ pytest = 1.0 }}")
        return {key: float(weight) for key, weight in value.items()}
    if hint is float and _is_number(value):
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{name}: wanted {hint.__name__}, got {value!r}; change its type")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def to_toml(config: TrainingConfig) -> str:
    """Return the resolved config as TOML that `load_config` reads back to the same tree."""
    lines = []
    for section, values in asdict(config).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        return (
            "{}"
            if not value
            else "{ " + ", ".join(f"{_toml_value(str(k))} = {_toml_value(v)}" for k, v in value.items()) + " }"
        )
    if isinstance(value, Sequence):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return repr(value)
