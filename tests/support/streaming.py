"""Real processes of streaming training: a core, satellites, and what the core says of them."""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gyre_train.config import TrainingConfig
from gyre_train.loop import train
from gyre_train.streaming.board import Board, Key
from gyre_train.streaming.satellite import satellite
from tests.support.checkpoints import saved_state

__all__ = ["Processes", "ask", "counted", "events", "farthest", "processes", "until"]

PATIENCE_S = 240.0


def ask(out: Path, path: str, body: dict[str, Any] | None = None) -> Any:
    """An answer of the core that trains into a folder."""
    url = json.loads((out / "stream.json").read_text())["url"] + path
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=30) as answer:
        return json.load(answer)


def events(out: Path, kind: str, worker: str | None = None) -> list[dict[str, Any]]:
    """What the core told of one kind."""
    found = ask(out, "/events")["events"]
    return [one for one in found if one["kind"] == kind and worker in (None, one["worker"])]


def counted(out: Path, step: int) -> Counter[tuple[str, int]]:
    """How often each micro-step of a step entered the core's sum, by what the core told."""
    alone = [one for one in events(out, "done") if one["worker"] is None]
    return Counter(tuple(one["key"][1:]) for one in [*alone, *events(out, "handed_in")] if one["key"][0] == step)


def until(what: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """Wait until it is true of processes that may not answer yet."""
    deadline, found = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            found = what()
        except OSError as error:
            found = error
        if found and not isinstance(found, OSError):
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s in vain; last: {found!r}")


def _run_core(settings: TrainingConfig, fair: bool) -> None:
    torch.multiprocessing.spawn = _fork_ranks
    if fair:
        Board.take = partialmethod(_fairly, Board.take)
        Board.claim = partialmethod(_fairly, Board.claim)
    train(settings)


def _run_satellite(where: str, name: str, listen: str | None) -> None:
    torch.multiprocessing.spawn = _fork_ranks
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    satellite(where, name=name, listen=listen, patience_s=PATIENCE_S)


def _fork_ranks(body: Callable[..., None], args: tuple[Any, ...], nprocs: int, join: bool) -> None:
    """Ranks begin with what this process has loaded: an import is most of what a spawn costs."""
    torch.multiprocessing.start_processes(body, args, nprocs, join, start_method="fork")


def _fairly(board: Board, claims: Callable[..., Key | None], *who: Any) -> Key | None:
    """Nobody gets a second micro-step of a step before every satellite that is ready for it has one."""
    ready = [one for one in board.workers.values() if one.pulled == board.step and not one.leaving]
    without = [one.epoch for one in ready if one.running is None and not one.held]
    epoch = who[0] if len(who) > 1 else None  # a claim tells who and when; the core only among which
    if without and epoch not in without:
        return None if epoch is None else board.beat(*who[:2]).running
    return claims(board, *who)


class Processes:
    """Starts them in fresh processes, forked from one that has loaded torch and done nothing with it."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["gyre_train.loop", "gyre_train.streaming.satellite"])
        self._all: list[BaseProcess] = []

    def core(self, settings: TrainingConfig, *, fair: bool = False) -> BaseProcess:
        """`gyre train`; a fair one sees to it that each satellite computes some of a step."""
        return self._started(self._context.Process(target=_run_core, args=(settings, fair)))

    def satellite(self, out: Path, name: str, listen: str | None = None) -> BaseProcess:
        """One that finds its core in the folder."""
        return self._started(self._context.Process(target=_run_satellite, args=(str(out), name, listen)))

    def _started(self, process: BaseProcess) -> BaseProcess:
        process.start()
        self._all.append(process)
        return process

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.join()


@contextmanager
def processes() -> Iterator[Processes]:
    """None outlives the test."""
    made = Processes()
    try:
        yield made
    finally:
        made.end()


def farthest(one: Path, two: Path) -> float:
    """The largest difference of two checkpoints' weights or moments, relative to the largest entry of each tensor."""
    a, b = saved_state(one), saved_state(two)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / a[name].abs().max().clamp(min=1e-300)) for name in a)
