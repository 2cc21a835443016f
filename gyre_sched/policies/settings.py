"""Checks of a policy's settings."""

from __future__ import annotations

from gyre_sched.errors import ScenarioError

__all__ = ["checked"]


def checked(policy: object, **least: float) -> None:
    """ScenarioError for the first setting below its least value."""
    for name, value in least.items():
        if getattr(policy, name) < value:
            kind = type(policy).__name__.lower()
            raise ScenarioError(f"wanted {kind}.{name} of at least {value}, got {getattr(policy, name)}; raise it")
