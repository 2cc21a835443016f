"""A policy by name: one that ships, an entry point of the group `gyre.schedulers`, or a path `package.module:Name`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from .api import Policy
from .errors import ScenarioError
from .policies import Async, CarryOver, Cohort, Colocate, Planner, Waterlevel

__all__ = ["SHIPPED", "policy"]

SHIPPED: dict[str, type[Any]] = {
    "waterlevel": Waterlevel,
    "carryover": CarryOver,
    "cohort": Cohort,
    "planner": Planner,
    "colocate": Colocate,
    "async": Async,
}


def policy(name: str, settings: Mapping[str, Any] | None = None) -> Policy:
    """Make the policy `name` with these settings; ScenarioError names what is known, or the nearest setting."""
    made = _kind(name)
    settings = dict(settings or {})
    known = list(inspect.signature(made).parameters)
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ScenarioError(f"unknown key {name}.{key}; {f'nearest {near[0]}' if near else f'known: {known}'}")
    try:
        policy = made(**settings)
    except TypeError as error:
        raise ScenarioError(f"wanted settings that {name} takes, got {settings}: {error}; correct them") from error
    if not callable(getattr(policy, "decide", None)):
        raise ScenarioError(f"wanted a policy with decide(snapshot), got {name}, which has none; see docs/scheduler.md")
    return policy  # type: ignore[no-any-return]


def _kind(name: str) -> Any:
    if name in SHIPPED:
        return SHIPPED[name]
    found = entry_points(group="gyre.schedulers", name=name)
    if found:
        return next(iter(found)).load()
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ScenarioError(
            f"wanted a policy, got {name!r}; give one of {', '.join(SHIPPED)}, or package.module:Name, "
            "or install a package with the entry point gyre.schedulers"
        )
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ScenarioError(f"wanted a policy at {name}, got: {error}; correct the path") from error
