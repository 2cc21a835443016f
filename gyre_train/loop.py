"""The training loop: choose executions, step, record, checkpoint, publish; from wherever the last session stopped.

Order within a step, so that a stop at any point loses nothing and doubles nothing: gradients and optimiser, then ledger
and step row in one commit, then the checkpoint, then the publish. Rank 0 reads
data and writes the ledger (`coordinator`); the other ranks get their packs from it.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .config import TrainingConfig, load_config
from .coordinator import Coordinator, Setup, TrainSummary, checkpoints, stop_file
from .megatron.parallel import from_first_rank, is_first_rank, run_ranks
from .step import Learner

__all__ = ["TrainSummary", "train"]

_LOG = logging.getLogger(__name__)


def train(
    config: TrainingConfig | str | Path, overrides: Sequence[str] = (), *, show_progress: bool = False
) -> TrainSummary:
    """Train as configured until `train.steps` or the end of the data, resuming what `output.dir` holds."""
    if not isinstance(config, TrainingConfig):
        config = load_config(config, overrides)
    output = Path(config.output.dir)
    output.mkdir(parents=True, exist_ok=True)
    summary_file = output / "session.json"
    stop_file(config).unlink(missing_ok=True)
    with _stopping(stop_file(config)):
        run_ranks(_rank_main, config.parallel, config, str(summary_file), show_progress, device=config.model.device)
    found = json.loads(summary_file.read_text(encoding="utf-8"))
    return TrainSummary(**{**found, "publish_errors": tuple(found["publish_errors"])})


@contextmanager
def _stopping(file: Path) -> Iterator[None]:
    """SIGTERM, and Ctrl-C once, make the stop file; a second Ctrl-C interrupts at once."""

    def stop(number: int, _: Any) -> None:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        _LOG.warning("%s: the step under way is finished and saved", signal.Signals(number).name)
        file.touch()

    if threading.current_thread() is not threading.main_thread():  # signals belong to whoever owns the main thread
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
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
    while True:
        while from_first_rank(coordinator.is_waiting() if coordinator else None):
            pass  # a wait may be hours, which no rank would stand in one collective call
        order = from_first_rank(coordinator.next() if coordinator else None)
        if order is None:
            return
        figures = learner.step(order.work)
        save = from_first_rank(coordinator.saves(order) if coordinator else None)
        if coordinator:
            coordinator.record(order, figures, save)
        if save:
            with coordinator.saving(order) if coordinator else nullcontext():
                learner.save(checkpoints(config), order.work.step, order.state)
            if coordinator:
                coordinator.saved(order)
