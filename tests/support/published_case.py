"""A run of the published case's shape: 636 calls, 1,347 message nodes, ten candidate trajectories, 1,716 occurrences.

The ten trajectories share 369 message nodes in all: a main conversation that is compacted and goes on, three forks of
it, three sub-agents of which one is compacted and goes on, and a fork of one. Four calls fail and are tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.support.forest import ExecutionBuilder, Forest, Made

__all__ = ["CALLS", "MESSAGE_NODES", "OCCURRENCES", "TRAJECTORIES", "published_case"]

CALLS, MESSAGE_NODES, TRAJECTORIES, OCCURRENCES = 636, 1347, 10, 1716

_FAILED = 4
# Messages that the lists below add beyond one a call: three roots' system nodes, two of the kept tail.
_EXTRA_IN_MAIN = MESSAGE_NODES - 2 * (CALLS - _FAILED) - 5


@dataclass
class _Conversation:
    """A chain of calls; `messages` are its message nodes from the root on."""

    e: ExecutionBuilder
    made: list[Made] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def grow(self, new: list[Any], *, fail: bool = False, **more: Any) -> Made:
        known = set(self.e.nodes)
        after = more.pop("after", self.made[-1] if self.made else None)
        if fail:
            failed = self.e.call(
                after=after, new=new, output=None, delivery=None, status="failed", error="engine lost", **more
            )
            made = self.e.retry(failed, output=12, agent_id=failed.call.agent_id)
        else:
            made = self.e.call(after=after, new=new, output=12, **more)
        fresh = [n for n in self.e.nodes.values() if n.node_id not in known and n.kind != "generation_prompt"]
        self.messages += [n.node_id for n in fresh]
        self.made.append(made)
        return made

    def fork(self, shared: int, **more: Any) -> _Conversation:
        """A conversation that leaves this one after its first `shared` message nodes."""
        other = _Conversation(self.e, messages=self.messages[:shared])
        lost = {"extension": "fork", "tokens_lost": 100, "first_difference_message": shared}
        other.grow([("user", 20)], after=self.messages[shared - 1], **(lost | more))
        return other

    def turns(self, number: int, *, extra: int = 0, failing: tuple[int, ...] = (), **more: Any) -> None:
        for turn in range(number):
            new = [("tool", 60)] + ([("user", 8)] if turn < extra else [])
            self.grow(new, fail=turn in failing, **more)


@cache
def published_case() -> Forest:
    """The run; the same object each time, so change nothing in it."""
    run = Forest()
    e = run.execution(
        "e_e7f3a0b1c2d3", group="swe-412", sample_index=3, end=None, harness="claude-code", harness_version="2.1.220"
    )
    first = _Conversation(e)
    first.grow([("system", 900), ("user", 120)])
    first.turns(128, extra=_EXTRA_IN_MAIN - 1, failing=(30, 60))
    summary = first.grow([("user", 300)], role="main_summary")

    second = _Conversation(e, messages=first.messages[:1])
    tail = first.made[-2].output
    second.grow(
        [("user", 210), ("assistant", 12, {"copy_of": tail}), ("tool", 60)],
        after=first.messages[0],
        extension="fork",
        branch_reason="compaction",
        continues_from=summary.id,
        tokens_lost=9000,
    )
    second.turns(139)
    rewound = second.fork(120, branch_reason="rewind")
    rewound.turns(59)
    first.fork(200, branch_reason="context_rewrite").turns(39)
    second.fork(45, branch_reason="context_rewrite").turns(29)
    _sub_agents(e, first)
    e.end("harness_timeout")
    e.score(0.5, evaluator="pytest", version="3", partial=True)
    return run


def _sub_agents(e: ExecutionBuilder, parent: _Conversation) -> None:
    def start(name: str, turns: int, **more: Any) -> _Conversation:
        spawn = {"spawned_by_node": parent.made[40].output, "branch_reason": "sub_agent"}
        agent = _Conversation(e)
        agent.grow([("system", 400), ("user", 50)], role="sub_agent", agent_id=name, **spawn)
        agent.turns(turns - 1, role="sub_agent", agent_id=name, **more)
        return agent

    start("a91", 52, failing=(7,))
    long = start("b20", 69)
    summary = long.grow([("user", 300)], role="sub_agent_summary", agent_id="b20")
    third = start("c33", 50, failing=(20,))
    rest = _Conversation(e, messages=long.messages[:1])
    rest.grow(
        [("user", 150)],
        after=long.messages[0],
        role="sub_agent",
        agent_id="b20",
        extension="fork",
        branch_reason="compaction",
        continues_from=summary.id,
        tokens_lost=4000,
    )
    rest.turns(39, role="sub_agent", agent_id="b20")
    third.fork(2, role="sub_agent", agent_id="c33", branch_reason="rewind").turns(19, role="sub_agent", agent_id="c33")
