"""A run, and the training beside it, as they move on under a page that watches.

One `Run` is shared behind a lock and moved on a few times a second while somebody watches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from gyre_data.errors import DataError, GyreError
from gyre_data.execution import Execution, executions, find
from gyre_data.lock import LOCK, is_locked
from gyre_data.reader import Run

from .changes import History
from .data import Kept, execution_model, node_tokens, run_figures, run_model
from .texts import Texts
from .training import Training
from .vocabulary import Vocabulary

__all__ = ["Following"]

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_TRAINING_POLL_S = 0.3
_LOOK_S = 2.0
_MOST_KEPT = 8


class Following:
    """A run that moves on: every answer is of one snapshot, `wait` returns when there is another."""

    def __init__(
        self,
        run: Run,
        *,
        j_max: int | None = 5,
        evaluators: Mapping[str, float] | None = None,
        training: Training | None = None,
        look: Callable[[], Training | None] | None = None,
    ) -> None:
        """`look` finds training that begins later; it is asked now and then while there is none."""
        self._run, self._j_max, self._evaluators = run, j_max, evaluators
        self._lock, self._counting = threading.RLock(), threading.Lock()
        self._writing = is_locked(run.path / LOCK)
        self._second: Run | None = None
        self._counted: tuple[int, Any] = (0, None)
        self._changed = threading.Condition()
        self._texts = Texts(run)
        self._rows: dict[str, Kept] = {}
        self._vocabulary: Vocabulary | None = None
        self._kept: dict[tuple[str, str | None], tuple[int, Any]] = {}
        self._told: dict[tuple[str, str | None], History] = {}
        self._watchers = 0
        # No version of an earlier server is one of ours: a page that outlived it must not take our changes for its own.
        self.version = time.time_ns() // 1_000_000
        self._training, self._training_lock, self._training_told = training, threading.Lock(), History()
        self._look = look
        self._training_version = self.version if training else 0

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return str(self._run.path).rsplit("/", 1)[-1]

    def refresh(self) -> bool:
        """Take a new snapshot; True and a new version if anything was added, or the writer came or went."""
        with self._lock:
            writing = is_locked(self._run.path / LOCK)
            moved = self._run.refresh() or writing != self._writing  # a writer that was killed adds nothing
            self._writing = writing
            if moved:
                self.version += 1
        if moved:
            self._tell()
        return moved

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def versions(self) -> tuple[int, int]:
        """Of the run and of the training beside it, 0 where there is none."""
        return self.version, self._training_version

    def wait(self, told: tuple[int, int], timeout_s: float) -> tuple[int, int]:
        """The versions once they are others than those `told`, or after the timeout the same."""
        with self._changed:
            self._changed.wait_for(lambda: self.versions != told, timeout_s)
        return self.versions

    def watch(self, stop: threading.Event) -> None:
        """Refresh until `stop`, while somebody waits; what cannot be read now is tried again."""
        told = ""
        while not stop.wait(_POLL_S):
            try:
                if self._watchers:
                    self.refresh()
            except (GyreError, OSError) as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("%s cannot be followed: %s", self._run.path, told)

    def watch_training(self, stop: threading.Event) -> None:
        """The same for training, apart: it may wait a second for a proxy's word, and a run's news must not."""
        while not stop.wait(_TRAINING_POLL_S if self._training else _LOOK_S) and (self._training or self._look):
            try:
                if self._watchers and self._training is not None:
                    self._refresh_training()
                elif self._watchers and self._look is not None and (found := self._look()) is not None:
                    with self._training_lock:
                        self._training, self._training_version = found, self.version
                    self._tell()
            except (GyreError, OSError) as error:
                _log.debug("the training of %s cannot be followed now: %s", self._run.path, error)

    def _refresh_training(self) -> None:
        assert self._training is not None
        with self._training_lock:
            moved = self._training.refresh()
            if moved:
                self._training_version += 1
        if moved:
            self._tell()

    def training_model(self, since: int = 0) -> dict[str, Any]:
        """`training.Training.model`: the whole, or what changed; the value is None without training."""
        if self._training is None:
            return {"version": 0, "whole": None}
        if not self._watchers:
            self._refresh_training()
        with self._training_lock:
            if self._training_told.version != self._training_version:
                self._training_told.move(self._training_version, self._training.model())
            return self._training_told.since(since)

    def step(self, step: int) -> dict[str, Any]:
        """See `training.step_model`."""
        if self._training is None:
            raise KeyError("no training")
        with self._training_lock:
            return self._training.step(step)

    def watching(self, change: int) -> None:
        """Note that somebody began (1) or ceased (-1) to wait for news."""
        with self._changed:
            self._watchers += change

    def run_model(self, since: int = 0) -> dict[str, Any]:
        """`data.run_model`: the whole, or what changed `since` a version of it; see `changes.History`."""
        if not self._watchers:  # nobody moves it on meanwhile
            self.refresh()
        return self._since("run", None, since, lambda: run_model(self._run))

    def figures(self) -> Any:
        """See `data.run_figures`. Counted on a snapshot of its own: who asks for calls does not wait for it."""
        with self._counting:
            version, found = self._counted
            if version != self.version:
                version = self.version
                self._second = self._second or Run(self._run.path)
                self._second.refresh()
                found = run_figures(self._second, j_max=self._j_max, evaluators=self._evaluators)
                self._counted = version, found
            return found

    def execution(self, execution_id: str, since: int = 0) -> dict[str, Any]:
        """`data.execution_model`: the whole, or what changed `since` a version of it; see `changes.History`."""

        def make() -> Any:
            loaded = self._load(execution_id)
            kept = self._rows.setdefault(loaded.execution_id, Kept(self._texts))
            _drop(self._rows, _MOST_KEPT)
            return execution_model(loaded, kept, j_max=self._j_max)

        return self._since("execution", execution_id, since, make)

    def tokens(self, execution_id: str, node_ids: list[str]) -> bytes:
        """Ids, then log-probs, of these nodes end to end."""
        with self._lock:
            tree = self._of_version("tree", execution_id, lambda: self._load(execution_id)).tree
            if unknown := [name for name in node_ids if name not in tree.index]:
                raise DataError(f"wanted nodes of {execution_id}, got {unknown[0]!r}; load the page anew")
            return b"".join(node_tokens(tree, (tree.index[name] for name in node_ids)))

    def texts(self, blob_ids: list[str]) -> dict[str, str | None]:
        """Blobs as text; None for one that cannot be read."""
        with self._lock:
            return {name: self._texts.plain(name) for name in blob_ids}

    def vocabulary(self, ids: list[int]) -> dict[str, Any]:
        """Texts of token ids, or why there are none."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._run)
            return {"problem": self._vocabulary.problem, "texts": self._vocabulary.texts(ids)}

    def _load(self, execution_id: str) -> Execution:
        known = executions(self._run)
        loaded = self._of_version("tree", execution_id, lambda: Execution(self._run, known[find(known, execution_id)]))
        assert isinstance(loaded, Execution)
        return loaded

    def _since(self, kind: str, name: str | None, since: int, make: Callable[[], Any]) -> dict[str, Any]:
        with self._lock:
            told = self._told.setdefault((kind, name), History())
            _drop(self._told, _MOST_KEPT)
            if told.version != self.version:
                told.move(self.version, make())
            return told.since(since)

    def _of_version(self, kind: str, name: str | None, make: Callable[[], Any]) -> Any:
        """What `make` gives for the present snapshot, made once."""
        with self._lock:
            version, found = self._kept.get((kind, name), (0, None))
            if version != self.version:
                found = make()
                stale = [key for key, (of, _) in self._kept.items() if of != self.version]
                for key in stale:
                    del self._kept[key]
                self._kept[kind, name] = (self.version, found)
                _drop(self._kept, _MOST_KEPT)
            return found


def _drop(kept: dict[Any, Any], most: int) -> None:
    """Forget the oldest entries, so that looking at a thousand executions does not keep a thousand."""
    while len(kept) > most:
        del kept[next(iter(kept))]
