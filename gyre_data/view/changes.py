"""What changed between two JSON values, so that a page that follows a run is told that and not everything again.

A patch is None where nothing changed, `[value]` where another value came, `{"of": {name: patch}, "gone": [names]}` for
an object, and `{"parts": [{"old": [start, end]} or {"new": [values]}], "at": {place: patch}}` for a list: its parts end
to end, and what changed in place. `patched` in changes.js is the counterpart.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

__all__ = ["History", "patch"]

_IDS = ("node_id", "call_id", "execution_id")
_MOST_STEPS = 64
"""A page that is further behind is told the whole value."""


def patch(old: Any, new: Any) -> Any:
    """How to make `new` of `old`; both are plain JSON values."""
    if old is new or (type(old) is type(new) and old == new):
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        of = {name: patch(old[name], value) if name in old else [value] for name, value in new.items()}
        return {"of": {name: change for name, change in of.items() if change is not None}, "gone": [*old.keys() - new]}
    if isinstance(old, list) and isinstance(new, list):
        return _list(old, new)
    return [new]


def _list(old: list[Any], new: list[Any]) -> dict[str, Any]:
    place_of = {key: place for place, key in enumerate(_keys(old))}
    parts: list[dict[str, Any]] = []
    at: dict[int, Any] = {}
    for place, (key, value) in enumerate(zip(_keys(new), new, strict=True)):
        before = place_of.get(key)
        last = parts[-1] if parts else {}
        if before is None:
            if "new" not in last:
                parts.append(last := {"new": []})
            last["new"].append(value)
            continue
        if "old" not in last or last["old"][1] != before:
            parts.append(last := {"old": [before, before]})
        last["old"][1] = before + 1
        if (change := patch(old[before], value)) is not None:
            at[place] = change
    return {"parts": parts, "at": at}


def _keys(values: list[Any]) -> list[Any]:
    """What each value of a list is known by, wherever it stands: a row its id, a text itself; others their place."""
    keys: list[Any] = [*range(len(values))]
    kinds = set(map(type, values))
    if kinds == {str}:
        keys = values
    elif kinds == {dict} and (name := next((n for n in _IDS if n in values[0]), None)):
        keys = [value.get(name) for value in values]
    return keys if len(set(keys)) == len(keys) else [*range(len(keys))]


@dataclass(kw_only=True, slots=True)
class History:
    """One value as it moves on, and the last steps that led to it."""

    version: int = 0
    value: Any = None
    _steps: deque[tuple[int, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    """Version before a step, and its patch."""

    def move(self, version: int, value: Any) -> None:
        """Take the value of a later version."""
        if self.version:
            self._steps.append((self.version, patch(self.value, value)))
        self.version, self.value = version, value

    def since(self, version: int) -> dict[str, Any]:
        """The patches from `version` on, or the whole value when it was never told or is too long ago."""
        places = [place for place, (before, _) in enumerate(self._steps) if before == version]
        if version != self.version and not places:
            return {"version": self.version, "whole": self.value}
        steps = [] if version == self.version else [step for _, step in list(self._steps)[places[0] :]]
        return {"version": self.version, "steps": [step for step in steps if step is not None]}
