"""The executions of the open step as they come in, laid out group by group and cut into micro-steps.

A group is a plan of its own, so that it can be computed as soon as it is there: whose weight is 1/N_e is known then,
and 1/E is applied when the step closes. Packs that hold parts of one sequence stay in one micro-step, whose replica
needs the whole of it before the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from gyre_train.config import TrainingConfig
from gyre_train.edges import Ratio
from gyre_train.pack import Pack
from gyre_train.plan import Plan
from gyre_train.source import Example, plan_examples

from .board import Key

__all__ = ["Filling", "micro_steps"]

_LOG = logging.getLogger(__name__)
_RECORDED = "recorded/"
_MISSING_S = 30.0
"""How long a group that was named is looked for: whoever named it may read the run earlier than the trainer."""


class Filling:
    """One step until it closes."""

    def __init__(
        self, step: int, config: TrainingConfig, planning: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`planning` is entered while packs are laid out."""
        self.step, self._config, self._planning = step, config, planning
        self.chosen: list[Example] = []
        self.num_executions = 0
        """E so far: executions that have something to train."""
        self._live = {*config.data.live} or {*config.data.runs}
        """Parts whose groups are named."""
        per_step = config.train.executions_per_step
        self._num_recorded = per_step - round(per_step * config.data.live_share)
        self._plans: list[Plan] = []
        self._names: set[str] = set()
        self._named_at: dict[str, float] = {}

    @property
    def is_full(self) -> bool:
        """Whether it has all executions of a step."""
        return len(self.chosen) >= self._config.train.executions_per_step

    def add(self, due: Sequence[Example]) -> dict[Key, tuple[Pack, ...]]:
        """Take those of the next examples that it has not, as far as there is room, and return their micro-steps."""
        have = {example.execution_id for example in self.chosen}
        room = self._config.train.executions_per_step - len(self.chosen)
        return self._laid_out([example for example in due if example.execution_id not in have][:room])

    def add_all(self, chosen: Sequence[Example]) -> dict[Key, tuple[Pack, ...]]:
        """Take those of these that it has not, whatever room there is, and return their micro-steps."""
        have = {example.execution_id for example in self.chosen}
        return self._laid_out([example for example in chosen if example.execution_id not in have])

    def add_named(self, due: Sequence[Example], named: Iterable[str], now_s: float) -> dict[Key, tuple[Pack, ...]]:
        """Take the groups that were named, with whatever of them can be trained, and return their micro-steps.

        One of which nothing can be trained, as far as is known a while after it was named, has empty ones.
        """
        for group in named:
            self._named_at.setdefault(group, now_s)
        waiting = self._named_at.keys() - self._names
        out = self._laid_out([e for e in due if e.part in self._live and (e.group_id or e.execution_id) in waiting])
        for group in sorted(waiting - self._names):
            if now_s - self._named_at[group] > _MISSING_S:
                _LOG.warning("step %d: nothing to train in group %s; see `gyre explain`", self.step, group)
                self._names.add(group)
                out |= {(self.step, group, part): () for part in range(self._config.stream.parts)}
        return out

    def add_recorded(self, due: Sequence[Example]) -> dict[Key, tuple[Pack, ...]]:
        """Take the recorded executions that belong to the step beside the named groups, and return their micro-steps.

        Nobody names them: their keys bear names that no controller gives.
        """
        have = {example.execution_id for example in self.chosen}
        room = self._num_recorded - sum(example.part not in self._live for example in self.chosen)
        new = [e for e in due if e.part not in self._live and e.execution_id not in have][: max(0, room)]
        return self._laid_out(new, _RECORDED)

    def _laid_out(self, new: Sequence[Example], prefix: str = "") -> dict[Key, tuple[Pack, ...]]:
        groups: dict[tuple[str, str], list[Example]] = {}
        for example in new:
            groups.setdefault((example.part, example.group_id or example.execution_id), []).append(example)
        out: dict[Key, tuple[Pack, ...]] = {}
        for (_, group), members in groups.items():
            with self._planning():
                made = plan_examples(members, self._config)
            self._plans.append(made)
            self.num_executions += made.num_executions
            self.chosen += members
            kind = Ratio.TOKEN if self._config.loss.kind == "sft" else Ratio(self._config.loss.kind)
            cut = micro_steps(made.packs, self._config.stream.parts, kind)
            name = self._fresh(prefix + group)
            out |= {(self.step, name, part): packs for part, packs in enumerate(cut)}
        return out

    def _fresh(self, group: str) -> str:
        """A name for its keys: groups of two runs may have the same."""
        name, number = group, 1
        while name in self._names:
            number += 1
            name = f"{group}#{number}"
        self._names.add(name)
        return name

    def rows(self) -> dict[str, Any]:
        """What the step's row says of its data."""
        packed = sum(made.num_packed_tokens for made in self._plans)
        unpacked = sum(made.num_unpacked_tokens for made in self._plans)
        recorded = sum(example.part not in self._live for example in self.chosen)
        return {
            **({"recorded_executions": recorded} if self._num_recorded else {}),
            "executions": self.num_executions,
            "trained_tokens": sum(made.num_edges for made in self._plans),
            "packs": sum(len(made.packs) for made in self._plans),
            "packed_tokens": packed,
            "unpacked_tokens": unpacked,
            "sharing": unpacked / max(packed, 1),
        }


def micro_steps(packs: Sequence[Pack], parts: int, ratio: Ratio) -> list[tuple[Pack, ...]]:
    """Cut packs into `parts` micro-steps of about as many tokens, with no sequence in two of them; some may be empty.

    `ratio` says over what the policy ratio is averaged; `token` also stands for a loss without one.
    """
    homes = list(range(len(packs)))  # the first pack that each belongs with
    first: dict[int, int] = {}
    for index, pack in enumerate(packs):
        for sequence in _spread(pack, ratio):
            one, other = homes[first.setdefault(sequence, index)], homes[index]
            homes = [min(one, other) if home in (one, other) else home for home in homes]
    units: dict[int, list[Pack]] = {}
    for home, pack in zip(homes, packs, strict=True):
        units.setdefault(home, []).append(pack)
    cut: list[list[Pack]] = [[] for _ in range(parts)]
    load = [0] * parts
    for unit in sorted(units.values(), key=lambda unit: -sum(pack.num_tokens for pack in unit)):
        part = load.index(min(load))
        cut[part] += unit
        load[part] += sum(pack.num_tokens for pack in unit)
    return [tuple(part) for part in cut]


def _spread(pack: Pack, ratio: Ratio) -> set[int]:
    """Sequences of which this pack holds only some owned tokens."""
    if ratio is Ratio.TOKEN:
        return set()
    whole = ratio is Ratio.EXECUTION
    sequence_E, tokens_E = (
        (pack.execution_E, pack.execution_tokens_E) if whole else (pack.trajectory_E, pack.trajectory_tokens_E)
    )
    sequence_J, at_J, count_J = np.unique(sequence_E, return_index=True, return_counts=True)
    return {int(one) for one in sequence_J[count_J < tokens_E[at_J]]}
