"""A controller over real cells, from its first turn or from where its ledger ends to the last step."""

from __future__ import annotations

import fcntl
import time

from gyre_sched.choose import policy
from gyre_sched.controller import Controller
from gyre_sched.errors import ScenarioError
from gyre_sched.state import State

from .local import LocalProcesses
from .processes import Processes
from .settings import FleetSettings
from .world import CellWorld, num_offered

__all__ = ["place", "run"]

_LOOK_S = 1.0


def place(settings: FleetSettings) -> Processes:
    """Where the cells run."""
    folder = settings.folder / "cells"
    if settings.backend == "local":
        return LocalProcesses(folder)
    try:
        from .ray import RayProcesses
    except ImportError as error:
        raise ScenarioError(
            f'wanted backend = "ray", got no Ray: {error}; install the extra cluster, for which `gyre doctor` has the '
            'command, or set backend = "local"'
        ) from error
    return RayProcesses(folder, settings.resources)


def run(settings: FleetSettings) -> State:
    """Work until the last step is done or no query is left, then end the cells; returns the state.

    ScenarioError when another controller works on the folder.
    """
    settings.folder.mkdir(parents=True, exist_ok=True)
    with (settings.folder / "controller.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ScenarioError(f"another controller works on {settings.folder}; stop it first") from None
        return _run(settings, place(settings))


def _run(settings: FleetSettings, processes: Processes) -> State:
    state = State(settings.params, settings.fresh_cells())
    chosen = policy(settings.policy, settings.policy_settings)
    scale = 3600 / settings.hour_s
    tick_s = float(getattr(chosen, "tick_s", 0.0)) / scale
    world = CellWorld(state, settings, processes)
    try:
        path = settings.folder / "ledger.jsonl"
        metrics = settings.folder / "metrics.prom"
        controller = Controller(state, chosen, world, path, clock=lambda: time.time() * scale, metrics=metrics)
        if not state.groups.dispatched:
            world.begin()
        while state.version < settings.steps and _can_step(state, settings):
            if not controller.turn():
                world.wait(tick_s or _LOOK_S)
        controller.close()
    finally:
        world.close()
    world.end_cells()
    return state


def _can_step(state: State, settings: FleetSettings) -> bool:
    """Whether there is, or may come, enough for another step."""
    to_offer = len(settings.queries) - num_offered(state)
    return to_offer + len(state.groups.outstanding) + len(state.upcoming) >= state.params.batch_groups
