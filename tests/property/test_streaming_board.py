"""Each micro-step is counted exactly once: claims, joins, leaves, leases that end, lost answers, late copies, restarts.

The machine plays processes that add up what they computed, as a multiset of micro-steps, over a network that loses
answers and delivers old requests again. Whatever happened, a step that closes has each of its micro-steps once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre_train.streaming.board import Board, Gone, Key

NAMES = ("a", "b", "c")
LEASE_S = 10.0


@dataclass(kw_only=True, slots=True, eq=False)
class Process:
    """What a satellite's process knows; its messages may arrive late, and after its death."""

    name: str
    epoch: int | None = None
    sum: Counter[Key] = field(default_factory=Counter)
    running: Key | None = None
    pulled: int | None = None


class Stream(RuleBasedStateMachine):
    """A board, the processes that work for it, and everything that can go wrong between them."""

    def __init__(self) -> None:
        super().__init__()
        self.board, self.now_s, self.steps = Board(LEASE_S), 0.0, 0
        self.offered: list[Key] = []
        self.core: Counter[Key] = Counter()
        self.processes: dict[str, Process] = {}
        self.sent: list[Callable[[], Any]] = []

    # The core.

    @precondition(lambda self: self.board.step is None)
    @rule()
    def open(self) -> None:
        self.steps += 1
        self.board.open(self.steps)
        self.offered, self.core = [], Counter()

    @precondition(lambda self: self.board.step is not None and not self.board.sealed)
    @rule(parts=st.integers(1, 4), last=st.booleans())
    def offer(self, parts: int, last: bool) -> None:
        group = f"g{len(self.offered)}"
        keys = [(self.steps, group, part) for part in range(parts)]
        self.board.offer(keys)
        self.offered += keys
        if last:
            self.board.seal()

    @precondition(lambda self: self.board.step is not None and self.board.mine is None)
    @rule(one_of=st.one_of(st.none(), st.integers(0, 3)))
    def take(self, one_of: int | None) -> None:
        self.board.take(self.among(one_of))

    def among(self, part: int | None) -> list[Key] | None:
        """Micro-steps that a controller told somebody; None: there is no controller."""
        return None if part is None else [key for key in self.offered if key[2] == part]

    @precondition(lambda self: self.board.mine is not None)
    @rule()
    def took(self) -> None:
        self.core[self.board.mine] += 1
        self.board.took()

    @precondition(lambda self: self.board.step is not None and self.board.complete)
    @rule()
    def close(self) -> None:
        assert self.core == Counter(self.offered)
        assert set(self.core.values()) <= {1}
        self.board.close()

    @precondition(lambda self: self.board.step is not None)
    @rule(really=st.integers(0, 7))
    def give_up(self, really: int) -> None:
        if really == 7:
            self.board.close()

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.board.expire(self.now_s)

    # Satellites.

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        """A process under this name; one that had it is thought dead, and what it sent may still arrive."""
        worker, _ = self.board.join(name, self.now_s)
        self.processes[name] = Process(name=name, epoch=worker.epoch)

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), told=st.booleans())
    def kill(self, data: st.DataObject, told: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        del self.processes[name]
        if told:
            self.board.lost(name)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        process = self.processes[data.draw(st.sampled_from(sorted(self.processes)))]
        if process.epoch is not None:
            self.board.leave(process.epoch)
            del self.processes[process.name]

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), lost=st.integers(0, 2), early=st.booleans(), one_of=st.one_of(st.none(), st.integers(0, 3)))
    def turn(self, data: st.DataObject, lost: int, early: bool, one_of: int | None) -> None:
        """What a satellite does next; `lost` answers do not reach it, and `early` it hands in before it must."""
        process = self.processes[data.draw(st.sampled_from(sorted(self.processes)))]
        step = self.board.step
        if process.epoch is None:
            process.epoch = self.board.join(process.name, self.now_s)[0].epoch
        elif process.running:
            key, process.running = process.running, None
            process.sum[key] += 1
            self.until_answered(process, lambda epoch: self.board.done(epoch, key, self.now_s), lost)
        elif process.sum and early:
            self.hand_in(process, lost)
        elif step is None:
            return
        elif process.pulled != step:
            process.sum.clear()
            process.pulled = step
            self.until_answered(process, lambda epoch: self.board.pulled(epoch, step, self.now_s), lost)
        else:
            among = self.among(one_of)
            key = self.until_answered(process, lambda epoch: self.board.claim(epoch, self.now_s, among), lost)
            if key is not None:
                process.running = key
            elif process.sum:
                self.hand_in(process, lost)

    def hand_in(self, process: Process, lost: int) -> None:
        gradient = Counter(process.sum)

        def request(epoch: int) -> None:
            if self.board.hand_in(epoch, list(gradient), self.now_s):
                self.core.update(gradient)

        self.until_answered(process, request, lost)
        process.sum.clear()

    def until_answered(self, process: Process, request: Callable[[int], Any], lost: int) -> Any:
        """Carry a request out as often as it takes until an answer arrives; whoever is told Gone begins anew."""
        epoch = process.epoch
        assert epoch is not None
        self.sent.append(lambda: request(epoch))
        answer = None
        for _ in range(lost + 1):
            try:
                answer = request(epoch)
            except Gone:
                answer = None
                gone = True
            else:
                gone = False
        if gone:
            process.epoch = process.running = process.pulled = None
            process.sum.clear()
        return answer

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.sent))
        try:
            request()
        except Gone:
            return

    # What holds always.

    @invariant()
    def each_is_in_one_place(self) -> None:
        board = self.board
        if board.step is None:
            return
        places = [*board.pending, *board.reduced]
        places += [board.mine] if board.mine else []
        for worker in board.workers.values():
            places += worker.held + ([worker.running] if worker.running else [])
        assert sorted(places) == sorted(self.offered)
        assert Counter(board.reduced.keys()) == self.core

    def teardown(self) -> None:
        """Whatever the state: with the satellites gone, the core alone ends the step."""
        board = self.board
        if board.step is None:
            return
        if not board.sealed:
            board.seal()
        board.expire(self.now_s + 1000)
        while board.mine or board.take():
            self.took()
        assert board.complete
        self.close()


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_a_sum_of_something_else_is_refused_and_its_worker_must_join_again() -> None:
    board = Board(LEASE_S)
    board.open(1)
    board.offer([(1, "g", 0), (1, "g", 1)])
    worker, _ = board.join("a", 0)
    board.pulled(worker.epoch, 1, 0)
    key = board.claim(worker.epoch, 0)
    assert key == (1, "g", 0)
    with pytest.raises(Gone, match="join again"):
        board.hand_in(worker.epoch, [key], 0)  # it never said that it was done with it
    assert board.pending == [(1, "g", 0), (1, "g", 1)]
    with pytest.raises(Gone, match="join again"):
        board.claim(worker.epoch, 0)


def test_a_worker_with_old_weights_gets_nothing() -> None:
    board = Board(LEASE_S)
    worker, _ = board.join("a", 0)
    board.open(1)
    board.pulled(worker.epoch, 1, 0)
    board.seal()
    board.close()
    board.open(2)
    board.offer([(2, "g", 0)])
    assert board.claim(worker.epoch, 0) is None
    board.pulled(worker.epoch, 2, 0)
    assert board.claim(worker.epoch, 0) == (2, "g", 0)
