"""The training loop: choose executions, step, record, checkpoint, publish; from wherever the last session stopped.

Order within a step, so that a stop at any point loses nothing and doubles nothing: gradients and optimiser, then ledger
and step row in one commit, then the checkpoint, then the publish. Rank 0 reads
data and writes the ledger (`coordinator`); the other ranks get their packs from it.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from .config import TrainingConfig, load_config
from .coordinator import Coordinator, Order, Setup
from .elastic.command import train_on_cells
from .folder import TrainSummary, checkpoints, finished, stop_file
from .interrupts import asked_to_stop
from .megatron.parallel import from_first_rank, is_first_rank, run_ranks
from .rollout.services import services
from .step import Learner
from .streaming.core import Core, open_core

__all__ = ["TrainSummary", "train"]

_LOG = logging.getLogger(__name__)


def train(
    config: TrainingConfig | str | Path, overrides: Sequence[str] = (), *, show_progress: bool = False
) -> TrainSummary:
    """Train as configured until `train.steps` or the end of the data, resuming what `output.dir` holds."""
    if not isinstance(config, TrainingConfig):
        config = load_config(config, overrides)
    if done := finished(config):
        return done
    if config.scheduler.cells:
        return train_on_cells(config, show_progress=show_progress)
    output = Path(config.output.dir)
    output.mkdir(parents=True, exist_ok=True)
    summary_file = output / "session.json"
    stop_file(config).unlink(missing_ok=True)
    with _stopping(stop_file(config)), services(config) as config:
        run_ranks(_rank_main, config.parallel, config, str(summary_file), show_progress, device=config.model.device)
    found = json.loads(summary_file.read_text(encoding="utf-8"))
    return TrainSummary(**{**found, "publish_errors": tuple(found["publish_errors"])})


@contextmanager
def _stopping(file: Path) -> Iterator[None]:
    """SIGTERM, and Ctrl-C once, make the stop file; a second Ctrl-C interrupts at once."""

    def ask(number: signal.Signals) -> None:
        _LOG.warning("%s: the step under way is finished and saved", number.name)
        file.touch()

    with asked_to_stop(ask):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _rank_main(config: TrainingConfig, summary_file: str, show_progress: bool) -> None:
    if not is_first_rank():
        _loop(config, None)
        return
    coordinator = Coordinator(config, show_progress)
    try:
        _loop(config, coordinator)
        Path(summary_file).write_text(json.dumps(asdict(coordinator.summary())), encoding="utf-8")
    finally:
        coordinator.close()


def _loop(config: TrainingConfig, coordinator: Coordinator | None) -> None:
    setup: Setup = from_first_rank(coordinator.setup if coordinator else None)
    learner = Learner(config, setup.anchor, setup.checkpoint)
    if coordinator:
        coordinator.publish()
    with _core(config, learner, setup, coordinator) as core:
        while (made := _streamed(core, coordinator) if core else _step(learner, coordinator)) is not None:
            order, figures = made
            save = from_first_rank(coordinator.saves(order) if coordinator else None)
            if coordinator:
                coordinator.record(order, figures, save)
            if core:
                core.applied(order.state["version"])
            if save:
                with coordinator.saving(order) if coordinator else nullcontext():
                    learner.save(checkpoints(config), order.work.step, order.state)
            if core:
                core.saved()
            if save and coordinator:
                coordinator.saved(order)


def _step(learner: Learner, coordinator: Coordinator | None) -> tuple[Order, dict[str, float]] | None:
    """One step by this process and its ranks alone; None when training is over."""
    while from_first_rank(coordinator.is_waiting() if coordinator else None):
        pass  # a wait may be hours, which no rank would stand in one collective call
    order: Order | None = from_first_rank(coordinator.next() if coordinator else None)
    return None if order is None else (order, learner.step(order.work))


def _streamed(core: Core, coordinator: Coordinator | None) -> tuple[Order, dict[str, float]] | None:
    """One step with whoever is there; None when training is over."""
    while from_first_rank(coordinator.is_held_up() if coordinator else None):
        pass
    return core.step()


def _core(
    config: TrainingConfig, learner: Learner, setup: Setup, coordinator: Coordinator | None
) -> AbstractContextManager[Core | None]:
    """Where satellites may join: what shares the steps out."""
    if not config.stream.satellites:
        return nullcontext()
    version = coordinator.version if coordinator else ""
    return open_core(config, learner, setup.anchor, coordinator, version, stop_file(config))
