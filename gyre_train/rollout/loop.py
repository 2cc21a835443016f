"""Rollouts as the coordinator sees them: what is out, what the next step may be, when an evaluation is due."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gyre_data.child import run_gyre
from gyre_data.errors import ConfigError
from gyre_data.execution import executions
from gyre_data.show.numbers import plural
from gyre_data.store import open as open_run
from gyre_train.config import TrainingConfig

from .dispatch import Dispatcher, ProxyApi
from .evaluation import EvalLog, score_groups
from .pace import Out, arriving, budget, choose

if TYPE_CHECKING:
    from gyre_train.lineage import Lineage
    from gyre_train.source import Example, Source

    from .settings import RolloutConfig

__all__ = ["Rollouts", "split_tasks", "staleness", "task_names", "waited_for"]

_LOG = logging.getLogger(__name__)
_NAMED = 3
"""Groups that are waited for by name; of more, their number."""


class Rollouts:
    """Dispatches, paces and evaluates; `step` is everywhere the number of steps taken."""

    def __init__(self, config: TrainingConfig, held_out: Callable[[str], bool], step: int) -> None:
        self._config, rollout = config, config.rollout
        trained, self.held_out = split_tasks(config, held_out)
        self._api = ProxyApi(str(config.publish.proxy))
        self._dispatcher = Dispatcher(self._api, trained, attempts=rollout.attempts, seed=config.train.seed)
        self._evals = EvalLog(Path(config.output.dir), step)
        self.out: list[Out] = []
        self.told = ""

    def dispatch(self, source: Source, trained: Mapping[str, int], step: int, served: int) -> None:
        """Queue what may be out by now; `served` is the step whose weights the engines have."""
        config, rollout = self._config, self._config.rollout
        left = {e.group_id for e in source.examples if not trained.get(e.execution_id, 0)}
        self.out = self._dispatcher.out(source.complete, lambda group: group not in left)
        ahead = min(rollout.max_staleness, config.train.steps - step - 1)
        per_step, share = config.train.executions_per_step, config.data.live_share
        limit = budget(per_step, rollout.attempts, ahead, share) if ahead >= 0 else 0
        self.out = self._dispatcher.fill(self.out, limit, served)

    def choose(self, due: Sequence[Example], step: int) -> list[Example] | None:
        """The executions of the next step; None while it has to wait, and then `told` says for whom."""
        config, rollout = self._config, self._config.rollout
        chosen = choose(
            due, self.out, step=step, per_step=config.train.executions_per_step, attempts=rollout.attempts,
            max_staleness=rollout.max_staleness,
        )  # fmt: skip
        self.told = waited_for(self.out, step, rollout)
        return chosen

    def arriving(self, due: Sequence[Example], taken: Sequence[Example], step: int) -> tuple[list[Example], bool]:
        """The executions that an open step with `taken` in it has by now, and whether these are all that it gets."""
        config, rollout = self._config, self._config.rollout
        found = arriving(
            due, self.out, taken, step=step, per_step=config.train.executions_per_step, attempts=rollout.attempts,
            max_staleness=rollout.max_staleness,
        )  # fmt: skip
        self.told = waited_for(self.out, step, rollout)
        return found

    def is_evaluating(self, source: Source, step: int, version: str) -> bool:
        """Whether the pass over held-out tasks that is due after `step` is still running; writes its result if not."""
        rollout = self._config.rollout
        if not rollout.eval_every or step % rollout.eval_every or step in self._evals:
            return False
        number = int(version.rpartition(":")[2]) if step else 0
        groups = self._dispatcher.evaluate(self.held_out, number, rollout.eval_attempts)
        missing = [name for name in groups if name not in source.complete]
        if missing:
            self.told = f"evaluating {version}: waiting for {len(missing)} of {plural(len(groups), 'held-out task')}"
            return True
        found = score_groups(open_run(rollout.run), groups, self._config.data.evaluators)
        self._evals.write({"step": step, "version": version, "at": time.time(), **found})
        score = "no score" if found["score"] is None else f"score {found['score']:.3f}"
        _LOG.info(
            "evaluation after step %d (%s): %s over %s, %s without a score", step, version, score,
            plural(len(found["by_task"]), "task"), plural(found["unscored"], "execution"),
        )  # fmt: skip
        return False

    def close(self) -> None:
        """Release the connection."""
        self._api.close()


def waited_for(out: Sequence[Out], step: int, rollout: RolloutConfig) -> str:
    """For people: how far the groups are, and whom the step after `step` waits for."""
    complete = sum(one.complete for one in out)
    late = [one for one in out if not one.complete and one.step <= step - rollout.max_staleness]
    names = ", ".join(f"{one.task} (group {one.group})" for one in late[:_NAMED])
    names += f" and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
    whom = f"task{'s' if len(late) > 1 else ''} {names}, too old for any later step" if late else "the others"
    return (
        f"step {step + 1}: {complete} of {plural(len(out), 'group')} of executions complete; waiting for {whom}; "
        f"`gyre run` works at {'it' if len(late) == 1 else 'them'}: gyre ls {rollout.run}"
    )


def split_tasks(config: TrainingConfig, held_out: Callable[[str], bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tasks to train on, and those that are held out; ConfigError where there are not enough."""
    rollout, names = config.rollout, task_names(config)
    kept = tuple(name for name in names if held_out(name))
    trained = tuple(name for name in names if not held_out(name))
    if not trained or (rollout.eval_every and not kept):
        raise ConfigError(
            f"rollout.tasks: wanted tasks to train on and held-out ones, {rollout.tasks} has {len(trained)} and "
            f"{len(kept)}; see data.eval_tasks and data.eval_share"
        )
    return trained, kept


def staleness(chosen: Sequence[Example], runs: Sequence[str], step: int, own: Lineage) -> dict[str, float]:
    """How many steps old the weights were that executions of `runs` in step `step` + 1 were dispatched under.

    Empty where no execution has weights of its dispatch on record that are known.
    """
    infos = {name: info for run in runs for name, info in executions(open_run(run)).items()}
    ages = []
    for example in chosen:
        info = infos.get(example.execution_id)
        if info is None or info.dispatch_version is None:
            continue
        known = own.steps.get(info.dispatch_version) if info.dispatch_policy_id == own.version.policy_id else 0
        if known is not None:
            ages.append(step - known)
    return {"staleness_mean": sum(ages) / len(ages), "staleness_max": max(ages)} if ages else {}


def task_names(config: TrainingConfig) -> list[str]:
    """Ids of the task file, as `gyre run` reads it."""
    rollout = config.rollout
    told = run_gyre(["run", "-p", rollout.tasks, "--dry-run", "--json"], Path(config.output.dir) / "run-tasks.log")
    return [task["id"] for task in json.loads(told)["tasks"]]
