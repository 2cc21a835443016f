"""Rank 0's part of training: which executions make the next step, what is written of it, what is published.

What counts as trained is what the ledger says up to the newest checkpoint's step.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gyre_data import ledger
from gyre_data.show.numbers import plural
from gyre_data.store import RunWriter
from gyre_data.types import LedgerRow, PolicyVersion, Step

from .anchor import check_burst, choose_anchor
from .config import TrainingConfig
from .edges import Anchor
from .folder import TrainSummary, Versions, check_folder, checkpoints, latest_checkpoint, read_state, stop_file
from .lineage import Lineage, lineage_of
from .live import Rest, wait_for_news
from .loss import inert_settings
from .metrics import MetricsLog
from .pack import Pack
from .page import Page
from .progress import ProgressLine
from .publish.open import open_publisher
from .rollout.loop import Rollouts, staleness
from .schedule import learning_rate
from .sinks import SinkSettings, open_sinks
from .source import Example, Split, load_source, plan_examples
from .step import StepWork
from .streaming.board import Key
from .streaming.filling import Filling

__all__ = ["Coordinator", "Order", "Setup"]

_LOG = logging.getLogger(__name__)
_WAIT_S = 2.0
_PUBLISH_AGAIN_S = 3.0
"""Seconds after which engines that could not be published to are tried again, while a step waits."""
_LOOK_AGAIN_S = 30.0
"""Seconds after which runs that grow are read again although nothing came: a group may be waited for no longer."""
_LOOK_S = 0.5
"""Seconds between two looks for more while a step is computed."""


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


class Coordinator:
    """Rank 0's part: data, ledger, metrics, decisions."""

    def __init__(self, config: TrainingConfig, show_progress: bool) -> None:
        self._config = config
        check_folder(Path(config.output.dir))
        self._writer = RunWriter(config.output.dir)
        try:
            self._open(show_progress)
        except BaseException:
            self._writer.close()
            raise

    def _open(self, show_progress: bool) -> None:
        config = self._config
        checkpoint = latest_checkpoint(checkpoints(config))
        state: dict[str, Any] = read_state(checkpoint) if checkpoint else {"step": 0}
        self._step = int(state["step"])
        self._writer.update_info({"data_runs": [str(Path(run).resolve()) for run in config.data.runs]})
        base = lineage_of(config.model.path)
        self._versions = Versions(config, self._writer, base.version)
        if checkpoint:
            self._versions.present = PolicyVersion.parse(state["version"])
            self._versions.remember()
        self._steps = {s.n: s.step for s in ledger.steps(config.output.dir) if s.step <= self._step}
        self._lineage = Lineage(
            version=PolicyVersion(policy_id=self._versions.policy_id, n=self._step),
            policy_ids=(self._versions.policy_id, *base.policy_ids),
            start=base.version,
            steps=self._steps,
        )
        self._trained: Counter[str] = Counter()
        self._recorded_at = ledger.newest_time(config.output.dir)
        for _, execution_id in {
            (r.step, r.execution_id) for r in ledger.ledger(config.output.dir) if r.step <= self._step
        }:
            self._trained[execution_id] += 1
        self._source = load_source(config, self._lineage, pack_tokens=config.pack.tokens, trained=self._trained)
        anchor = choose_anchor(config, self._source, self._lineage)
        check_burst(config, anchor, state)
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
        self._published_at = 0.0
        self._served = self._step
        """Steps behind the weights that every engine has."""
        self._rollouts = Rollouts(config, Split(config.data), self._step) if config.rollout.tasks else None
        self._sinks = open_sinks(
            config.output.log,
            SinkSettings(
                folder=Path(config.output.dir), project=config.output.project, run=self._versions.policy_id,
                step=self._step, config=asdict(config),
            ),
        )  # fmt: skip
        self._metrics = MetricsLog(Path(config.output.dir) / "metrics.jsonl", self._step)
        self._page = Page(config.output)
        self._progress = ProgressLine(
            total=self._total_steps(), done=self._step, show=show_progress, file=Path(config.output.dir) / "doing.json"
        )
        self._progress.__enter__()
        self._chosen: tuple[Example, ...] = ()
        self._rows: dict[str, Any] = {}
        self._told = ""
        self._loaded_at, self._rest = time.monotonic(), Rest()
        self._filling: Filling | None = None
        self._look_at = 0.0

    def _total_steps(self) -> int:
        """Steps there will be, by what the data holds now and `train.steps`."""
        config = self._config
        if self._source.live:
            return config.train.steps
        left = sum(max(0, config.data.epochs - self._trained[e.execution_id]) for e in self._source.examples)
        by_data = self._step - (-left // config.train.executions_per_step)
        return min(by_data, config.train.steps or by_data)

    @property
    def version(self) -> str:
        """Of the weights as they are."""
        return str(self._versions.present)

    def is_held_up(self) -> bool:
        """Whether the next step may not begin yet, because weights are being evaluated; waits some seconds if so."""
        if self._publish_errors and time.monotonic() > self._published_at + _PUBLISH_AGAIN_S:
            self.publish()  # what failed may be back, and what is waited for needs it
        if self._rollouts is None or self._stop.exists():
            return False
        if self._rollouts.is_evaluating(self._source, self._step, self.version):
            return self._wait("evaluate", self._rollouts.told)
        return False

    def is_waiting(self) -> bool:
        """Whether the next step has to wait, for runs that grow or for an evaluation; waits some seconds if so."""
        if self.is_held_up():
            return True
        self._dispatch()
        live, wanted = self._source.live, self._config.train.executions_per_step
        due = self._due()
        if not live or self._is_over() or (due if self._rollouts is not None else len(due) == wanted):
            return False
        if self._rollouts is not None:
            return self._wait("rollout", self._rollouts.told)
        names = ", ".join(run.path.name for run in live)
        come = f"step {self._step + 1}: {len(due)} of {plural(wanted, 'execution')}"
        return self._wait("rollout", f"{come}; waiting for more to be complete in run {names}")

    def _dispatch(self) -> None:
        if self._rollouts is not None and self._source.live and not (self._stop.exists() or self._is_over()):
            self._rollouts.dispatch(self._source, self._trained, self._step, self._served)

    def _due(self) -> list[Example]:
        """The executions of the next step, as far as they are there."""
        if self._rollouts is not None:
            return self._rollouts.choose(self._source.due(self._trained), self._step) or []
        return self._source.due(self._trained, self._config.train.executions_per_step)

    def _tell(self, doing: str) -> None:
        if doing != self._told:
            _LOG.info("%s", doing)
        self._told = doing

    def _wait(self, name: str, doing: str) -> bool:
        self._tell(doing)
        with self._progress.waiting(name, doing):
            self._look(_WAIT_S)
        return True

    def _look(self, wait_s: float) -> None:
        """Take in what comes to the runs that grow, at most `wait_s` from now."""
        if (rest_s := self._rest.left_s()) > wait_s:
            time.sleep(wait_s)
            return
        time.sleep(rest_s)
        late = time.monotonic() > self._loaded_at + _LOOK_AGAIN_S
        if wait_for_news(self._source.live, wait_s - rest_s) or late or not self._source.live:
            self._loaded_at = time.monotonic()
            with self._rest.after():
                self._source = load_source(
                    self._config, self._lineage, pack_tokens=self._config.pack.tokens, before=self._source,
                    trained=self._trained,
                )  # fmt: skip

    def _is_over(self) -> bool:
        steps = self._config.train.steps
        return bool(steps and self._step >= steps) or (self._stop.exists() and self._saved)

    def next(self) -> Order | None:
        """Choose and lay out the next step; None when training is over."""
        due = [] if self._is_over() else self._due()
        if not due:
            return None
        step = self._step + 1
        with self._progress.waiting("plan", f"laying out step {step}"):
            made = plan_examples(due, self._config)
        rows = {
            "executions": made.num_executions,
            "trained_tokens": made.num_edges,
            "packs": len(made.packs),
            "packed_tokens": made.num_packed_tokens,
            "unpacked_tokens": made.num_unpacked_tokens,
            "sharing": made.sharing_factor,
        }
        return self._order(due, rows, made.packs)

    def _order(self, due: Sequence[Example], rows: Mapping[str, Any], packs: tuple[Pack, ...]) -> Order:
        """The next step on these examples, whose row in the metrics begins with `rows`."""
        config, step = self._config.train, self._step + 1
        self._chosen, self._rows = tuple(due), dict(rows)
        rewards = [e.reward for e in due if e.reward is not None]
        if rewards:
            self._rows["reward_mean"] = sum(rewards) / len(rewards)
        after = self._trained + Counter(e.execution_id for e in due)
        last = step == config.steps or not (self._source.live or self._source.due(after, 1))
        publish = bool(self._config.publish.engines) and (last or step % self._config.publish.every == 0)
        return Order(
            work=StepWork(
                step=step, packs=packs, num_executions=self._rows["executions"], lr=learning_rate(config, step)
            ),
            # Live data: whoever waits for more must be able to stop without losing a step.
            save=last or publish or bool(self._source.live) or step % self._config.output.save_every == 0,
            publish=publish,
            state={
                "step": step,
                "version": str(self._versions.next()),
                "policy_ids": list(self._lineage.policy_ids),
                "steps_per_burst": config.steps_per_burst,
            },
        )  # fmt: skip

    # A step that is computed while it fills (`streaming.core.Arrivals`).

    def open_step(self) -> int | None:
        """Begin the next step with nothing in it; None when training is over."""
        if self._is_over() or not (self._source.live or self._source.due(self._trained, 1)):
            return None
        step = self._step + 1
        self._filling = Filling(
            step, self._config, lambda: self._progress.waiting("plan", f"laying out more of step {step}")
        )
        return step

    def arrivals(self, named: Sequence[str] | None) -> tuple[dict[Key, tuple[Pack, ...]], bool]:
        """Micro-steps of executions that came since, and whether the step has now all that it gets.

        With `named`, of these groups only; whoever names them knows when the step is whole.
        """
        live, filling = self._source.live, self._filling
        assert filling is not None
        if live and time.monotonic() >= self._look_at:
            self._look(0.0)
            self._dispatch()
            self._look_at = time.monotonic() + _LOOK_S
        if named is not None:
            found = self._source.due(self._trained)
            return filling.add_named(found, named, time.monotonic()) | filling.add_recorded(found), False
        if self._rollouts is not None:
            chosen, whole = self._rollouts.arriving(self._source.due(self._trained), filling.chosen, self._step)
            if not whole:
                self._tell(self._rollouts.told)
            return filling.add_all(chosen), whole or not self._source.live
        due = self._source.due(self._trained, self._config.train.executions_per_step)
        return filling.add(due), filling.is_full or not self._source.live

    def gives_up(self, whole: bool) -> bool:
        """Whether training is to stop before the open step is whole, or it is whole and nothing came."""
        assert self._filling is not None
        if not whole:
            return self._stop.exists()
        return not (self._filling.chosen or self._config.stream.controlled)

    @property
    def num_steps(self) -> int:
        """Steps that are applied."""
        return self._step

    def close_step(self) -> Order:
        """The step as it was filled; its packs have been computed."""
        filling, self._filling = self._filling, None
        assert filling is not None
        return self._order(filling.chosen, filling.rows(), ())

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
        if live := self._config.data.live:
            row |= staleness(self._chosen, live, order.work.step - 1, self._lineage)
        if self._rollouts is not None:
            row["groups_out"] = len(self._rollouts.out)
        parent, version = self._versions.present, PolicyVersion.parse(order.state["version"])
        self._versions.present = version
        folder = checkpoints(self._config) / f"step-{self._step:08d}"
        step = Step(
            step=self._step, policy_id=version.policy_id, n=version.n, parent_policy_id=parent.policy_id,
            parent_n=parent.n, num_executions=order.work.num_executions, trained_tokens=self._rows["trained_tokens"],
            loss=figures["loss"], metrics=json.dumps(row), checkpoint=str(folder) if save else None, at=now,
        )  # fmt: skip
        rows = [_ledger_row(step, example, t) for example in self._chosen for t in example.trajectories]
        self._writer.write([*rows, step])
        self._metrics.write(row)
        self._sinks.write(row)
        self._trained.update(e.execution_id for e in self._chosen)
        self._tokens += self._rows["trained_tokens"]
        self._steps[version.n] = self._step
        self._loss = figures["loss"]
        self._progress.step(row)

    def saving(self, order: Order) -> AbstractContextManager[None]:
        """Around the writing of a checkpoint."""
        return self._progress.waiting("save", f"saving step {order.work.step}")

    def saved(self, order: Order) -> None:
        """A checkpoint of the step is durable; publish it when that is due."""
        self._checkpoint = checkpoints(self._config) / f"step-{order.work.step:08d}"
        self._versions.remember()
        if order.publish:
            self.publish()

    def publish(self) -> None:
        """Bring the newest checkpoint to the engines; after a restart they may still serve an older one."""
        if self._checkpoint is None or not self._config.publish.engines:
            return
        started = self._published_at = time.monotonic()
        engines = plural(len(self._config.publish.engines), "engine")
        with self._progress.waiting("publish", f"publishing: waiting for {engines} to load {self.version}"):
            done = self._publisher.publish(self._checkpoint, self._versions.present)
        self._publish_errors = [f"{p.engine}: {p.error}" for p in done if p.error]
        self._served = self._served if self._publish_errors else self._step
        _LOG.info(
            "published %s to %d of %s in %.1f s", self.version, len(done) - len(self._publish_errors),
            plural(len(done), "engine"), time.monotonic() - started,
        )  # fmt: skip

    def summary(self) -> TrainSummary:
        """What this session did."""
        return TrainSummary(
            output=self._config.output.dir,
            version=self.version,
            checkpoint=str(self._checkpoint) if self._checkpoint else None,
            step=self._step,
            steps_done=self._step - self._first_step,
            loss=self._loss,
            trained_tokens=self._tokens,
            publish_errors=tuple(self._publish_errors),
            stopped=stop_file(self._config).exists(),
        )

    def close(self) -> None:
        """Release the folder."""
        self._publisher.close()
        if self._rollouts is not None:
            self._rollouts.close()
        self._progress.__exit__(None, None, None)
        self._page.close()
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
