"""Rank 0's part of training: which executions make the next step, what is written of it, what is published.

What counts as trained is what the ledger says up to the newest checkpoint's step. Version numbers never go back: the
folder's run.json holds the newest one that was ever saved, so that a step taken again after a checkpoint was deleted
does not give its old name to other weights.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gyre_data import ledger
from gyre_data import manifest as manifests
from gyre_data.errors import ConfigError
from gyre_data.schema import TABLES
from gyre_data.store import RunWriter
from gyre_data.types import LedgerRow, PolicyVersion, Step

from .config import TrainingConfig
from .edges import Anchor
from .lineage import Lineage, lineage_of
from .live import wait_for_news
from .loss import inert_settings
from .megatron.checkpoint import latest_checkpoint, read_state
from .metrics import MetricsLog
from .progress import ProgressLine
from .publish.open import open_publisher
from .schedule import learning_rate
from .sinks import SinkSettings, open_sinks
from .source import Example, Source, load_source, plan_examples
from .step import StepWork

__all__ = ["Coordinator", "Order", "Setup", "TrainSummary", "checkpoints", "choose_anchor", "stop_file"]

_LOG = logging.getLogger(__name__)
_NEWEST = "newest_version"
_WAIT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSummary:
    """What a session of training left behind."""

    output: str
    version: str
    """Weights of the newest checkpoint."""
    checkpoint: str | None
    step: int
    steps_done: int
    """Steps of this session."""
    loss: float | None
    """Of the last step; None when there was nothing to do."""
    trained_tokens: int
    """In this session."""
    publish_errors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What every rank starts from."""

    checkpoint: Path | None
    anchor: Anchor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One step as rank 0 wants it."""

    work: StepWork
    save: bool
    publish: bool
    """Only a saved step is published, so that a published version can always be resumed from."""
    state: dict[str, Any]


def checkpoints(config: TrainingConfig) -> Path:
    """Where a run's checkpoints lie."""
    return Path(config.output.dir) / "checkpoints"


def stop_file(config: TrainingConfig) -> Path:
    """While it exists, training ends after the step under way, with a checkpoint. Ranks in processes see it too."""
    return Path(config.output.dir) / "stop"


def _check_folder(output: Path) -> None:
    """Refuse to train into a recorded run: it would take the run's lock and hide it from `gyre ls`."""
    held = manifests.newest(output)
    if held is not None and (recorded := [name for name in held.tables if TABLES[name].owner == "run"]):
        raise ConfigError(
            f"output.dir: wanted a folder of the trainer's own, {output} is a recorded run (it holds "
            f"{', '.join(recorded)}); use another folder"
        )


def choose_anchor(config: TrainingConfig, source: Source, lineage: Lineage) -> Anchor | None:
    """Return the anchor for this data: None for SFT; `auto` asks whether the model's own lineage sampled it.

    Data that is recorded meanwhile is sampled by weights of this run: its anchor is that of the burst.
    """
    if config.loss.kind == "sft":
        return None
    if config.train.anchor != "auto":
        return Anchor(config.train.anchor)
    if config.data.live:
        return Anchor.BURST
    own = set(lineage.policy_ids)
    known_own = all(example.policy_ids and example.policy_ids <= own for example in source.examples)
    return Anchor.BEHAVIOUR if known_own else Anchor.STEP


def _check_burst(config: TrainingConfig, anchor: Anchor | None, state: Mapping[str, Any]) -> None:
    """Refuse another K, or another anchor, in the middle of a burst: logp_old would be of weights nobody chose."""
    begun, now = int(state.get("steps_per_burst", 1)), config.train.steps_per_burst
    done = int(state["step"]) % begun
    if done and (begun != now or anchor is not Anchor.BURST):
        end = int(state["step"]) - done + begun
        came = f"train.steps_per_burst = {now}" if anchor is Anchor.BURST else f"train.anchor = {anchor}"
        raise ConfigError(
            f"{came}: step {state['step']} lies inside a burst of {begun} steps with its own anchor; train to step "
            f"{end} with steps_per_burst = {begun} first (--train.steps={end}), then change it"
        )


class Coordinator:
    """Rank 0's part: data, ledger, metrics, decisions."""

    def __init__(self, config: TrainingConfig, show_progress: bool) -> None:
        self._config = config
        _check_folder(Path(config.output.dir))
        self._writer = RunWriter(config.output.dir)
        try:
            self._open(show_progress)
        except BaseException:
            self._writer.close()
            raise

    def _open(self, show_progress: bool) -> None:
        config = self._config
        checkpoint = latest_checkpoint(checkpoints(config))
        state = read_state(checkpoint) if checkpoint else {"step": 0}
        self._step = int(state["step"])
        base = lineage_of(config.model.path)
        self._policy_id, self._base = self._claim_folder(base)
        self._version = PolicyVersion.parse(state["version"]) if checkpoint else self._base
        self._newest = int(self._writer.update_info({}).get(_NEWEST, 0))
        if checkpoint:
            self._remember()
        self._steps = {s.n: s.step for s in ledger.steps(config.output.dir) if s.step <= self._step}
        self._lineage = Lineage(
            version=PolicyVersion(policy_id=self._policy_id, n=self._step),
            policy_ids=(self._policy_id, *base.policy_ids),
            start=self._base,
            steps=self._steps,
        )
        self._source = load_source(config, self._lineage, pack_tokens=config.pack.tokens)
        self._trained: Counter[str] = Counter()
        self._recorded_at = ledger.newest_time(config.output.dir)
        for _, execution_id in {
            (r.step, r.execution_id) for r in ledger.ledger(config.output.dir) if r.step <= self._step
        }:
            self._trained[execution_id] += 1
        anchor = choose_anchor(config, self._source, self._lineage)
        _check_burst(config, anchor, state)
        if anchor is not None:
            for warning in inert_settings(anchor, config.train.steps_per_burst, config.loss):
                _LOG.warning("%s", warning)
        self.setup = Setup(checkpoint=checkpoint, anchor=anchor)
        self._checkpoint = checkpoint
        self._first_step = self._step
        self._stop, self._saved = stop_file(config), True
        self._tokens = 0
        self._loss: float | None = None
        self._publisher = open_publisher(config.publish)
        self._publish_errors: list[str] = []
        self._sinks = open_sinks(
            config.output.log,
            SinkSettings(
                folder=Path(config.output.dir), project=config.output.project, run=self._policy_id, step=self._step,
                config=asdict(config),
            ),
        )  # fmt: skip
        self._metrics = MetricsLog(Path(config.output.dir) / "metrics.jsonl", self._step)
        self._progress = ProgressLine(total=self._total_steps(), done=self._step, show=show_progress)
        self._progress.__enter__()
        self._chosen: tuple[Example, ...] = ()
        self._rows: dict[str, Any] = {}
        self._told = ""

    def _claim_folder(self, base: Lineage) -> tuple[str, PolicyVersion]:
        """Return policy id and base version of the folder, deciding them on first use."""
        config = self._config
        info = self._writer.update_info({})
        if "base" not in info:
            stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(config.output.dir).resolve().name) or "run"
            policy_id = config.output.policy_id or f"{stem}-{secrets.token_hex(3)}"
            info = self._writer.update_info({"policy_id": policy_id, "base": str(base.version)})
        if info["base"] != str(base.version):
            raise ConfigError(
                f"output.dir: {config.output.dir} holds the training of {info['base']}, model.path holds "
                f"{base.version}; use a new output.dir, or the model it was started from"
            )
        if config.output.policy_id not in (None, info["policy_id"]):
            raise ConfigError(
                f"output.policy_id: {config.output.dir} makes versions of {info['policy_id']}, got "
                f"{config.output.policy_id}; remove the setting or use a new output.dir"
            )
        return str(info["policy_id"]), base.version

    def _remember(self) -> None:
        """Keep the number of the version that was saved, whatever becomes of its checkpoint."""
        self._newest = max(self._newest, self._version.n)
        self._writer.update_info({_NEWEST: self._newest})

    def _next_version(self) -> PolicyVersion:
        """The version that the next step makes: above the present one and every one that was saved."""
        present = self._version.n if self._version.policy_id == self._policy_id else 0
        return PolicyVersion(policy_id=self._policy_id, n=max(present, self._newest) + 1)

    def _total_steps(self) -> int:
        """Steps there will be, by what the data holds now and `train.steps`."""
        config = self._config
        if self._source.live:
            return config.train.steps
        left = sum(max(0, config.data.epochs - self._trained[e.execution_id]) for e in self._source.examples)
        by_data = self._step - (-left // config.train.executions_per_step)
        return min(by_data, config.train.steps or by_data)

    def is_waiting(self) -> bool:
        """Whether runs that grow have yet to bring the examples of the next step; waits for them some seconds if so."""
        live, wanted = self._source.live, self._config.train.executions_per_step
        here = len(self._source.due(self._trained, wanted))
        if not live or here == wanted or self._is_over():
            return False
        doing = (
            f"step {self._step + 1}: {here} of {wanted} executions; waiting for {', '.join(r.path.name for r in live)}"
        )
        if doing != self._told:
            _LOG.info("%s", doing)
        self._told = doing
        with self._progress.waiting("rollout", doing):
            if wait_for_news(live, _WAIT_S):
                self._source = load_source(self._config, self._lineage, pack_tokens=self._config.pack.tokens)
        return True

    def _is_over(self) -> bool:
        steps = self._config.train.steps
        return bool(steps and self._step >= steps) or (self._stop.exists() and self._saved)

    def next(self) -> Order | None:
        """Choose and lay out the next step; None when training is over."""
        config = self._config.train
        due = [] if self._is_over() else self._source.due(self._trained, config.executions_per_step)
        if not due:
            return None
        step = self._step + 1
        self._chosen = tuple(due)
        with self._progress.waiting("plan", f"laying out step {step}"):
            made = plan_examples(due, self._config)
        self._rows = {
            "executions": made.num_executions,
            "trained_tokens": made.num_edges,
            "packs": len(made.packs),
            "packed_tokens": made.num_packed_tokens,
            "unpacked_tokens": made.num_unpacked_tokens,
            "sharing": made.sharing_factor,
        }
        rewards = [e.reward for e in due if e.reward is not None]
        if rewards:
            self._rows["reward_mean"] = sum(rewards) / len(rewards)
        after = self._trained + Counter(e.execution_id for e in due)
        last = step == config.steps or not (self._source.live or self._source.due(after, 1))
        publish = bool(self._config.publish.engines) and (last or step % self._config.publish.every == 0)
        return Order(
            work=StepWork(
                step=step, packs=made.packs, num_executions=made.num_executions, lr=learning_rate(config, step)
            ),
            # Live data: whoever waits for more must be able to stop without losing a step.
            save=last or publish or bool(self._source.live) or step % self._config.output.save_every == 0,
            publish=publish,
            state={
                "step": step,
                "version": str(self._next_version()),
                "policy_ids": list(self._lineage.policy_ids),
                "steps_per_burst": config.steps_per_burst,
            },
        )  # fmt: skip

    def saves(self, order: Order) -> bool:
        """Whether the step that was just computed gets a checkpoint: it was due, or the run is to stop."""
        self._saved = order.save or self._stop.exists()
        return self._saved

    def record(self, order: Order, figures: dict[str, float], save: bool) -> None:
        """Write ledger, step row and metrics of a step that has been applied."""
        # The ledger orders attempts at a step by time, so a clock that was set back must not reorder them.
        now = self._recorded_at = max(datetime.now(UTC), self._recorded_at + timedelta(microseconds=1))
        self._step = order.work.step
        row = {"step": self._step, "version": order.state["version"], **self._rows, **figures}
        seconds = max(figures["seconds"], 1e-9)
        row["tokens_per_s"] = self._rows["packed_tokens"] / seconds
        row["trained_tokens_per_s"] = self._rows["trained_tokens"] / seconds
        row |= self._progress.waits()
        parent, self._version = self._version, PolicyVersion.parse(order.state["version"])
        folder = checkpoints(self._config) / f"step-{self._step:08d}"
        step = Step(
            step=self._step, policy_id=self._policy_id, n=self._version.n, parent_policy_id=parent.policy_id,
            parent_n=parent.n, num_executions=order.work.num_executions, trained_tokens=self._rows["trained_tokens"],
            loss=figures["loss"], metrics=json.dumps(row), checkpoint=str(folder) if save else None, at=now,
        )  # fmt: skip
        rows = [_ledger_row(step, example, t) for example in self._chosen for t in example.trajectories]
        self._writer.write([*rows, step])
        self._metrics.write(row)
        self._sinks.write(row)
        self._trained.update(e.execution_id for e in self._chosen)
        self._tokens += self._rows["trained_tokens"]
        self._steps[self._version.n] = self._step
        self._loss = figures["loss"]
        self._progress.step(row)

    def saving(self, order: Order) -> AbstractContextManager[None]:
        """Around the writing of a checkpoint."""
        return self._progress.waiting("save", f"saving step {order.work.step}")

    def saved(self, order: Order) -> None:
        """A checkpoint of the step is durable; publish it when that is due."""
        self._checkpoint = checkpoints(self._config) / f"step-{order.work.step:08d}"
        self._remember()
        if order.publish:
            self.publish()

    def publish(self) -> None:
        """Bring the newest checkpoint to the engines; after a restart they may still serve an older one."""
        if self._checkpoint is None or not self._config.publish.engines:
            return
        started = time.monotonic()
        engines = f"{len(self._config.publish.engines)} engines"
        with self._progress.waiting("publish", f"publishing: waiting for {engines} to load {self._version}"):
            done = self._publisher.publish(self._checkpoint, self._version)
        self._publish_errors = [f"{p.engine}: {p.error}" for p in done if p.error]
        _LOG.info(
            "published %s to %d of %d engines in %.1f s", self._version, len(done) - len(self._publish_errors),
            len(done), time.monotonic() - started,
        )  # fmt: skip

    def summary(self) -> TrainSummary:
        """What this session did."""
        return TrainSummary(
            output=self._config.output.dir,
            version=str(self._version),
            checkpoint=str(self._checkpoint) if self._checkpoint else None,
            step=self._step,
            steps_done=self._step - self._first_step,
            loss=self._loss,
            trained_tokens=self._tokens,
            publish_errors=tuple(self._publish_errors),
        )

    def close(self) -> None:
        """Release the folder."""
        self._publisher.close()
        self._progress.__exit__(None, None, None)
        self._metrics.close()
        self._sinks.close()
        self._writer.close()


def _ledger_row(step: Step, example: Example, trained: Any) -> LedgerRow:
    return LedgerRow(
        step=step.step, policy_id=step.policy_id, data_run=example.data_run, manifest=example.manifest,
        execution_id=example.execution_id, group_id=example.group_id, trajectory=trained.trajectory,
        leaf_node=trained.leaf_node, owned_tokens=trained.owned_tokens, reward=example.reward,
        advantage=example.advantage, score_ids=example.score_ids, at=step.at,
    )  # fmt: skip
