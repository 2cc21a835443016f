"""Cells on a Ray cluster: for each cell one placement group and one actor on it, which runs the cell's process.

Both are detached and named, so they outlive the controller and the next one finds them. A placement group cannot be
resized, so a cell's place is made and given back as a whole. The actor does on its machine what `local` does on this
one; when it is lost, another takes its place there and finds the process, or finds nothing on another machine.
Not run on several machines, nor with GPUs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .local import LocalProcesses
from .processes import Program, Slot

__all__ = ["RayProcesses"]

_PLACE_S = 600.0
"""How long a cell may wait for a place in the cluster."""
_CALL_S = 30.0


class _Keeper:
    """Lives on a cell's machine."""

    def __init__(self, folder: str) -> None:
        self._place = LocalProcesses(Path(folder), ray.util.get_node_ip_address())

    def slot(self, cell: str) -> Slot | None:
        return self._place.slot(cell)

    def start(self, cell: str, program: Program) -> Slot:
        return self._place.start(cell, program)

    def end(self, cell: str, grace_s: float) -> bool:
        return self._place.end(cell, grace_s=grace_s)


class RayProcesses:
    """The cluster that `address` names, or the one of this machine; `folder` is made on each cell's machine."""

    def __init__(self, folder: Path, resources: Mapping[str, float], address: str | None = None) -> None:
        self._folder, self._resources = str(folder.resolve()), dict(resources) or {"CPU": 1.0}
        self._name = f"gyre-{hashlib.sha256(self._folder.encode()).hexdigest()[:12]}"
        if not ray.is_initialized():
            ray.init(address=address or "auto", namespace="gyre", log_to_driver=False)
        self._keepers: dict[str, Any] = {}

    def slot(self, cell: str) -> Slot | None:
        """What is there; None too when the cell's machine is gone."""
        if not self._has_place(cell):
            return None
        found: Slot | None = self._call(cell, "slot", _CALL_S, cell)
        return found

    def start(self, cell: str, program: Program) -> Slot:
        """Start it, on a place of its own."""
        found: Slot = self._call(cell, "start", _CALL_S, cell, program)
        return found

    def end(self, cell: str, *, grace_s: float) -> bool:
        """End it; its place is kept."""
        if not self._has_place(cell):
            return True
        return bool(self._call(cell, "end", _CALL_S + grace_s, cell, grace_s))

    def release(self, cell: str) -> None:
        """End it and give its place back to the cluster."""
        if self._has_place(cell):
            with contextlib.suppress(OSError):
                self.end(cell, grace_s=0.0)
            ray.kill(self._keeper(cell))
            self._keepers.pop(cell, None)
            remove_placement_group(get_placement_group(f"{self._name}-{cell}"))

    def _has_place(self, cell: str) -> bool:
        try:
            get_placement_group(f"{self._name}-{cell}")
        except ValueError:
            return False
        return True

    def _call(self, cell: str, method: str, timeout_s: float, *arguments: Any) -> Any:
        """An answer of the cell's keeper; one that was lost is replaced, and asked the next time."""
        try:
            return ray.get(getattr(self._keeper(cell), method).remote(*arguments), timeout=timeout_s)
        except (RayActorError, GetTimeoutError) as error:
            self._keepers.pop(cell, None)
            raise ConnectionError(f"wanted an answer of cell {cell}'s actor, got {error!r}") from error

    def _keeper(self, cell: str) -> Any:
        if cell not in self._keepers:
            name = f"{self._name}-{cell}"
            if not self._has_place(cell):
                made = placement_group([self._resources], name=name, lifetime="detached")
                if not made.wait(_PLACE_S):
                    remove_placement_group(made)
                    raise TimeoutError(f"wanted {self._resources} for cell {cell} within {_PLACE_S:g} s, got no place")
            group = get_placement_group(name)
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            # Several calls at a time: one that waits for a process's end must not hide whether it lives.
            remote = ray.remote(num_cpus=0, max_concurrency=4)(_Keeper)
            self._keepers[cell] = remote.options(
                name=name, lifetime="detached", get_if_exists=True, scheduling_strategy=strategy
            ).remote(self._folder)
        return self._keepers[cell]
