"""The open step: each of its micro-steps is pending, running, held or reduced, and in exactly one of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .api import Key, StepView

__all__ = ["OpenStep"]


class OpenStep:
    """The micro-steps of one step. Held is not done: a gradient on a cell that is lost must be computed again."""

    def __init__(self, index: int, microsteps_per_group: int) -> None:
        self.index = index
        self.groups: list[str] = []
        self.pending: list[Key] = []
        self.running: dict[Key, str] = {}
        """Key: the cell that runs it."""
        self.held: dict[Key, str] = {}
        self.reduced: dict[Key, str] = {}
        self.closing = False
        self.generation = 0
        """Attempts begun; an optimiser step of an earlier one is void."""
        self._parts = microsteps_per_group

    def take(self, queries: Iterable[str]) -> None:
        """Ready groups enter."""
        for query in queries:
            self.groups.append(query)
            self.pending.extend((self.index, query, part) for part in range(self._parts))

    def assign(self, key: Key, cell: str) -> None:
        """A cell claims a pending micro-step."""
        self.pending.remove(key)
        self.running[key] = cell

    def done(self, key: Key) -> None:
        """Its cell holds the gradient."""
        self.held[key] = self.running.pop(key)

    def hand_over(self, cell: str, core: str) -> int:
        """The core takes what a leaving cell holds; returns how many."""
        keys = [key for key, holder in self.held.items() if holder == cell]
        for key in keys:
            self.held[key] = core
        return len(keys)

    def lost(self, cell: str) -> None:
        """All that a lost cell ran or held is pending again, before what nobody has claimed."""
        self._back(lambda holder: holder == cell)

    def restart(self) -> None:
        """The core is lost: nothing of this attempt counts, reduced or not."""
        self.held |= self.reduced
        self.reduced = {}
        self._back(lambda holder: True)
        self.closing = False
        self.generation += 1

    def close(self) -> None:
        """Everything is held: it is reduced to the core, and the optimiser begins."""
        self.reduced, self.held = self.held, {}
        self.closing = True

    def view(self) -> StepView:
        """What a policy sees."""
        return StepView(
            index=self.index,
            groups=len(self.groups),
            pending=tuple(self.pending),
            running=len(self.running),
            held=len(self.held),
            closing=self.closing,
        )

    def _back(self, gone: Callable[[str], bool]) -> None:
        returned = []
        for place in (self.held, self.running):
            keys = [key for key, holder in place.items() if gone(holder)]
            returned += keys
            for key in keys:
                del place[key]
        self.pending[:0] = sorted(returned)
