"""Passes over held-out tasks while cells train: queued when engines have the weights, written down when they are whole.

No step waits for one. What is sampled late is sampled by whatever weights there are then; the pass's line says how many
tokens are of which.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gyre_data.show.numbers import plural
from gyre_data.store import open as open_run
from gyre_data.types import PolicyVersion
from gyre_train.config import TrainingConfig
from gyre_train.rollout.dispatch import Dispatcher
from gyre_train.rollout.evaluation import EvalLog, sampled_by, score_groups

__all__ = ["Passes"]

_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0


class Passes:
    """Those that are under way, and those that are done. `step` is the newest that is saved."""

    def __init__(
        self,
        config: TrainingConfig,
        dispatcher: Dispatcher,
        held_out: Sequence[str],
        version_of: Callable[[int], PolicyVersion],
        step: int,
    ) -> None:
        """`version_of` names the weights of a step."""
        self._config, self._dispatcher, self._held_out = config, dispatcher, held_out
        self._version_of = version_of
        self._log = EvalLog(Path(config.output.dir), step)
        begun = dispatcher.passes() if config.rollout.eval_every else []
        self._judged: set[str] = set()
        self._missing, self._look_at = 0, 0.0
        self.open = [one for one in begun if one <= step and one not in self._log]
        """Steps whose passes are under way, an earlier session's too."""

    def is_due(self, step: int) -> bool:
        """Whether the weights of this step are to be looked at: `eval_every` steps were taken since the last pass."""
        every = self._config.rollout.eval_every
        known = [*self.open, *(row["step"] for row in self._log.rows)]
        return bool(every) and (not known or step // every > max(known) // every)

    def begin(self, step: int) -> None:
        """Queue the pass of these weights, which engines have now."""
        self._dispatcher.evaluate(self._held_out, step, self._config.rollout.eval_attempts)
        self.open.append(step)
        self._look_at = 0.0
        queued = plural(len(self._held_out), "held-out task")
        _LOG.info("evaluating %s: queued %s", self._version_of(step), queued)

    def look(self) -> int:
        """Write down the passes that are whole; returns how many held-out tasks are waited for."""
        if time.monotonic() < self._look_at:
            return self._missing
        self._missing = 0
        for step in list(self.open):
            groups = self._dispatcher.evaluate(self._held_out, step, self._config.rollout.eval_attempts)
            left = self._dispatcher.not_judged(groups.keys() - self._judged)
            self._judged |= groups.keys() - set(left)
            self._missing += len(left)
            if not left:
                self._write(step, groups)
                self.open.remove(step)
        self._look_at = time.monotonic() + _LOOK_S
        return self._missing

    def _write(self, step: int, groups: dict[str, str]) -> None:
        run, version = open_run(self._config.rollout.run), self._version_of(step)
        found = score_groups(run, groups, self._config.data.evaluators)
        tokens = sampled_by(run, groups)
        self._log.write({"step": step, "version": str(version), "at": time.time(), **found, "sampled_by": tokens})
        score = "no score" if found["score"] is None else f"score {found['score']:.3f}"
        own = tokens.get(str(version), 0) / max(sum(tokens.values()), 1)
        _LOG.info(
            "evaluation after step %d (%s): %s over %s, %s without a score; %.0f %% of the tokens are of these weights",
            step, version, score, plural(len(found["by_task"]), "task"), plural(found["unscored"], "execution"),
            100 * own,
        )  # fmt: skip
