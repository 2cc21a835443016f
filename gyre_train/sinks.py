"""Where a training run's figures go beside metrics.jsonl: TensorBoard files, Weights & Biases, Trackio, Prometheus.

A sink takes one row of numbers a step. What a tracker does wrong is logged and ends that tracker only: training, and
metrics.jsonl, which holds everything, go on.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gyre_data.errors import ConfigError

__all__ = ["SINKS", "Sink", "SinkSettings", "Sinks", "open_sinks"]

_LOG = logging.getLogger(__name__)


class Sink(Protocol):
    """One tracker."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Take the figures of one step; steps ascend."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkSettings:
    """What a tracker is opened with; a resumed run opens the same one again at a later `step`."""

    folder: Path
    project: str
    run: str
    step: int
    config: Mapping[str, Any]


class _TensorBoard:
    """Event files under `folder/tensorboard`; those of steps that will be computed again are purged."""

    def __init__(self, settings: SinkSettings) -> None:
        module = _module("torch.utils.tensorboard", "tensorboard", "tensorboard")
        folder = str(settings.folder / "tensorboard")
        self._writer = module.SummaryWriter(folder, purge_step=settings.step + 1 if settings.step else None)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases; its own environment (WANDB_MODE, WANDB_DIR, ...) applies."""

    def __init__(self, settings: SinkSettings) -> None:
        wandb = _module("wandb", "wandb", "wandb")
        self._run = wandb.init(
            project=settings.project, id=settings.run, name=settings.run, resume="allow",
            config=dict(settings.config), dir=str(settings.folder), settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of Trackio; its own environment (TRACKIO_DIR, ...) applies."""

    def __init__(self, settings: SinkSettings) -> None:
        trackio = _module("trackio", "trackio", "trackio")
        with contextlib.redirect_stdout(sys.stderr):  # it prints, and stdout may be JSON
            self._run = trackio.init(
                project=settings.project, name=settings.run, config=dict(settings.config), resume="allow", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


class _Prometheus:
    """The newest step as Prometheus text in `folder/metrics.prom`, for node_exporter's textfile collector."""

    def __init__(self, settings: SinkSettings) -> None:
        self._file = settings.folder / "metrics.prom"
        escaped = settings.run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._labels = f'{{run="{escaped}"}}'

    def write(self, step: int, row: Mapping[str, float]) -> None:
        figures = {"step": float(step), "step_time_seconds": time.time(), **row}
        lines = []
        for name, value in figures.items():
            known = "gyre_train_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            lines += [f"# TYPE {known} gauge", f"{known}{self._labels} {value!r}"]
        partial = self._file.with_suffix(".prom.partial")
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.replace(self._file)

    def close(self) -> None:
        """The file stays: whoever scrapes it sees by its time that no step came since."""


SINKS: Mapping[str, Callable[[SinkSettings], Sink]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
    "prometheus": _Prometheus,
}


def _module(name: str, package: str, setting: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"output.log: wanted {package} for {setting!r}, it is not installed ({error}); pip install {package}, or "
            "leave it out"
        ) from None


class Sinks:
    """All trackers of a run as one."""

    def __init__(self, named: Mapping[str, Sink]) -> None:
        self._named = dict(named)

    def write(self, row: Mapping[str, Any]) -> None:
        """Give every tracker the numbers of a row of metrics.jsonl."""
        numbers = {name: float(x) for name, x in row.items() if isinstance(x, int | float) and name != "step"}
        for name in list(self._named):
            self._attempt(name, lambda sink: sink.write(int(row["step"]), numbers))

    def close(self) -> None:
        """Close every tracker."""
        for name in list(self._named):
            self._attempt(name, lambda sink: sink.close())
        self._named.clear()

    def _attempt(self, name: str, act: Any) -> None:
        try:
            act(self._named[name])
        except Exception as error:  # noqa: BLE001 - third-party code with its own network and threads
            _LOG.warning("%s failed and gets no more figures: %s; metrics.jsonl goes on", name, error)
            del self._named[name]


def open_sinks(names: Sequence[str], settings: SinkSettings) -> Sinks:
    """Open the named trackers; ConfigError for a name that is none, or a package that is not installed."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"output.log: wanted some of {', '.join(SINKS)}, got {name!r}; pick one")
    return Sinks({name: SINKS[name](settings) for name in dict.fromkeys(names)})
