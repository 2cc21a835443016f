"""Errors of the scheduler; each message says what was wanted, what came and what to do.

SchedulerError (ValueError)
├── ScenarioError     a setting, file or policy name the user gave cannot be used
├── CoreError         the core's training program ends again and again: nothing can be trained
├── LedgerError       a ledger holds other bytes than were written, beyond a torn last line
└── PolicyError       a policy broke a rule that keeps runs whole, or did not settle
"""

from __future__ import annotations

__all__ = ["CoreError", "LedgerError", "PolicyError", "ScenarioError", "SchedulerError"]


class SchedulerError(ValueError):
    """Root of every deliberate error of this package."""


class ScenarioError(SchedulerError):
    """A setting, file or policy name the user gave cannot be used."""


class CoreError(SchedulerError):
    """The core's training program ends again and again, with no step in between: another start is no use."""


class LedgerError(SchedulerError):
    """A ledger holds other bytes than were written."""


class PolicyError(SchedulerError):
    """A policy asked for what would lose work or stop the run, or its actions never settled."""
