"""What a training config may not say: values out of range, settings that need another, settings without effect."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

from gyre_data.errors import ConfigError
from gyre_train.attn.api import check_backend

from .elastic.settings import check_scheduler
from .publish.settings import check_publish
from .rollout.settings import check_rollout
from .streaming.settings import check_stream

if TYPE_CHECKING:
    from .config import DataConfig, TrainingConfig

__all__ = ["check"]

_POSITIVE = (
    *("data.j_max", "data.epochs", "train.executions_per_step", "train.steps_per_burst", "train.lr"),
    *("pack.tokens", "parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp", "parallel.ep"),
    *("output.save_every", "output.keep", "publish.every", "publish.timeout_s", "stream.parts", "stream.lease_s"),
)

_FROM_ZERO: dict[str, float] = {
    **dict.fromkeys(
        ("train.steps", "train.warmup_steps", "train.weight_decay", "train.eps", "train.clip_grad", "train.min_lr"),
        math.inf,
    ),
    **dict.fromkeys(("loss.cap", "loss.advantage", "loss.teacher", "loss.kl", "data.live_patience_s"), math.inf),
    **dict.fromkeys(("train.beta1", "train.beta2", "data.eval_share"), 1.0),
}


def check(config: TrainingConfig) -> None:
    """Refuse what cannot work and settings that would have no effect."""
    data, train = config.data, config.train
    if not config.model.path:
        raise ConfigError("model.path: wanted a Hugging Face folder, got nothing; set model.path")
    if not config.output.dir:
        raise ConfigError("output.dir: wanted a folder for ledger and checkpoints, got nothing; set output.dir")
    if not data.runs and not data.chat:
        raise ConfigError(
            "data: wanted recorded runs, chat files or tasks, got none; set data.runs, data.chat or rollout.tasks"
        )
    check_backend(config.pack.attention, device=config.model.device, dtype=config.model.dtype)
    if config.model.router_replay != "none" and not data.runs:
        raise ConfigError(
            f"model.router_replay = {config.model.router_replay} has no effect on chat files, which no engine routed; "
            "remove it"
        )
    _check_mix(data)
    _check_live(config)
    _check_loss(config)
    check_scheduler(config)
    check_stream(config.stream)
    by_controller = config.stream.controlled and not config.publish.engines
    if by_controller or config.publish.engines or not config.rollout.tasks:  # engines started here get weights too
        check_publish(config.publish, by_controller=by_controller)
    if config.rollout.tasks and config.stream.controlled and not config.scheduler.cells:
        raise ConfigError(
            "stream.controlled with rollout.tasks: whoever says what a step has dispatches it too; "
            "set scheduler.cells, or remove one"
        )
    check_rollout(
        config.rollout, per_step=train.executions_per_step, held_out=bool(data.eval_tasks or data.eval_share),
        live=data.live,
    )  # fmt: skip
    if train.schedule == "constant" and train.min_lr:
        raise ConfigError("train.min_lr has no effect with train.schedule = constant; choose linear or cosine")
    if train.schedule != "constant" and not train.steps:
        raise ConfigError(f"train.schedule = {train.schedule}: wanted to know the last step; set train.steps")
    if train.min_lr > train.lr:
        raise ConfigError(f"train.min_lr: wanted at most train.lr = {train.lr}, got {train.min_lr}; lower it")
    if train.steps_per_burst > 1 and train.anchor != "burst":
        raise ConfigError(
            f'train.steps_per_burst = {train.steps_per_burst} has no effect with anchor = {train.anchor}; '
            'set train.anchor = "burst"'
        )  # fmt: skip
    for name in _POSITIVE:
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}: wanted a finite number above 0, got {value}; set one")
    if config.parallel.tp % config.parallel.ep:
        raise ConfigError(
            f"parallel.ep = {config.parallel.ep}: wanted a divisor of parallel.tp = {config.parallel.tp}, whose ranks "
            "share out the experts; set another"
        )
    for name, below in _FROM_ZERO.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        if not 0 <= value < below:
            raise ConfigError(f"{name}: wanted a number from 0 to below {below}, got {value}; set one")


def _check_mix(data: DataConfig) -> None:
    if data.mix is None:
        return
    wanted, named = {*data.runs, *data.chat}, set(data.mix)
    if wanted != named:
        raise ConfigError(
            f"data.mix: wanted a share of each entry of data.runs and data.chat, missing {sorted(wanted - named)}, "
            f"unknown {sorted(named - wanted)}; name them as they stand there"
        )
    if bad := [name for name, share in data.mix.items() if not 0 < share < math.inf]:
        raise ConfigError(f"data.mix: wanted finite shares above 0, got others for {bad}; set them, or remove the run")


def _check_live(config: TrainingConfig) -> None:
    if unknown := sorted({*config.data.live} - {*config.data.runs}):
        raise ConfigError(f"data.live: wanted names of data.runs, got {unknown}; name them as they stand there")
    if config.data.live and not config.train.steps:
        raise ConfigError("data.live: a run that grows has no end of its own; set train.steps")
    if config.data.live and config.data.epochs != 1:
        raise ConfigError(f"data.epochs = {config.data.epochs}: what is recorded meanwhile is used once; set it to 1")


def _check_loss(config: TrainingConfig) -> None:
    data, loss = config.data, config.loss
    if loss.kind == "sft":
        changed = [f.name for f in fields(loss) if f.name != "kind" and getattr(loss, f.name) != f.default]
        if config.train.anchor != "auto" or changed:
            name = f"loss.{changed[0]}" if changed else f"train.anchor = {config.train.anchor}"
            raise ConfigError(f"{name} has no effect on sft; remove it")
        return
    if data.chat:
        raise ConfigError('data.chat: chat files have no sampled tokens; use loss.kind = "sft" or data.runs')
    if data.epochs != 1:
        raise ConfigError(f"data.epochs: an execution is used once by a policy loss, got {data.epochs}; set it to 1")
    low, high = loss.clip
    if not 0 <= low <= 1 <= high:
        raise ConfigError(
            f"loss.clip: wanted bounds around 1, got {low} and {high}; set clip_low below 1, clip_high above"
        )
    if not loss.advantage and not loss.teacher:
        raise ConfigError("loss.advantage = 0 and loss.teacher = 0: nothing to learn from; set one of them")
    for name, of in (("teacher_name", "teacher"), ("reference", "kl")):
        if getattr(loss, name) is not None and not getattr(loss, of):
            raise ConfigError(f"loss.{name} has no effect with loss.{of} = 0; set loss.{of} or remove it")
