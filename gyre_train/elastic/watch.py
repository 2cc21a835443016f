"""What the controller and its cells do now, read from the controller's figures: who waits for whom, in one line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gyre_data.show.numbers import plural

__all__ = ["Seen", "seen", "told"]

_LINE = re.compile(r"^gyre_sched_(\w+?)(?:\{(?:role|of)=\"(\w+)\"\})? (\S+)$", re.MULTILINE)
_ON_THE_WAY = ("draining", "to_train", "to_rollout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Figures of one moment."""

    serving: int
    training: int
    moving: int
    down: int
    version: int
    served: int
    """Version of the weights that engines have."""
    at_work: int
    """Executions that may still call."""
    ready: int
    """Groups that no step has taken yet."""
    dropped: int
    step_open: bool


def seen(path: Path) -> Seen | None:
    """The figures in the controller's `metrics.prom`; None before it has written any."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    found = {(name, label or ""): float(value) for name, label, value in _LINE.findall(text)}

    def figure(name: str, label: str = "") -> int:
        return int(found.get((name, label), 0))

    return Seen(
        serving=figure("cells", "rollout"),
        training=figure("cells", "train"),
        moving=sum(figure("cells", role) for role in _ON_THE_WAY),
        down=figure("cells", "down"),
        version=figure("version"),
        served=figure("rollout_version"),
        at_work=figure("executions_unfinished"),
        ready=figure("groups_ready"),
        dropped=figure("groups_dropped_total"),
        step_open=bool(figure("step_open")),
    )


def told(now: Seen, steps: int, held_out: int) -> str:
    """One line: the step, what cells do, and what is waited for. `held_out`: tasks of passes that are under way."""
    cells = [
        f"{count} {one if count == 1 else many}"
        for count, one, many in (
            (now.serving, f"serves version {now.served}", f"serve version {now.served}"),
            (now.training, "trains", "train"), (now.moving, "changes", "change"), (now.down, "down", "down"),
        )
        if count
    ]  # fmt: skip
    step = min(now.version + 1, steps)
    line = f"step {step}/{steps}  cells: {', '.join(cells) or 'none yet'}  waiting for {_waits(now)}"
    return line + (f"; {plural(held_out, 'held-out task')}" if held_out else "")


def _waits(now: Seen) -> str:
    if now.down:
        return f"{plural(now.down, 'lost cell')} to come back"
    if now.step_open and now.training and not now.at_work:
        return "cells to compute the step"
    if now.at_work:
        waited = f"{plural(now.at_work, 'execution')} at work"
        return f"{waited}, while cells train" if now.training else waited
    if now.moving:
        return f"{plural(now.moving, 'cell')} to change"
    return "engines to load the weights" if now.served < now.version else "groups to be judged"
