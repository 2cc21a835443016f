"""Random conversations x random rewrites x random faults never yield a wrong record.

`make test` runs a few short worlds; GYRE_TEST_WORLDS=SECONDS runs new ones for that long.
"""

import os
import re
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from gyre_data.schema import Author, NodeKind
from tests.support import toy_tokenizer as toy
from tests.support.fault_world import World
from tests.support.proxy_server import check_run, deliveries_of, nodes_of
from tests.support.telling_engine import told

SEEDS = (1, 2, 3)


def check(world: World) -> None:
    """The record holds every acknowledged call, every prompt is its path, every token is there once."""
    calls = {call.call_id: call for call in check_run(world.run, *world.engines)}
    nodes = nodes_of(world.run)
    engines = {engine.url: engine for engine in world.engines}
    for call in calls.values():
        if call.output_node is None:
            continue
        output = nodes[call.output_node]
        assert output.token_ids.tolist() == world.policy.whole[call.call_id][1][: call.output_tokens]
        spans = [(engines[a.engine], a.start, a.end) for a in call.attempts if a.end > a.start]
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
        wanted = [told(engine.number, at) for engine, start, end in spans for at in range(start, end)]
        assert output.logprobs.tolist() == pytest.approx(wanted, abs=1e-6)
        versions = [
            f"{span.policy_id}:{span.n}" for span in output.policy_versions for _ in range(span.start, span.end)
        ]
        assert versions == [engine.version for engine, start, end in spans for _ in range(start, end)]
    sampled = Counter(node.call_id for node in nodes.values() if node.author is Author.POLICY)
    assert all(count == 1 for count in sampled.values())
    assert all((node.author is Author.POLICY) == (node.kind is NodeKind.OUTPUT) for node in nodes.values())

    states = {row.call_id: row.state for row in deliveries_of(world.run)}
    for seen in world.acknowledged:
        assert calls[seen.call_id].status == "ok"
        assert states.get(seen.call_id, "delivered") == "delivered"
        if seen.after is not None:
            after, ancestors = calls[seen.after], ancestors_of(nodes, calls[seen.call_id].prompt_node)
            # Replies to one prompt that read the same cannot be told apart: the newest is taken.
            same = [
                other.output_node
                for other in calls.values()
                if other.prompt_node == after.prompt_node and shown(nodes, other) == shown(nodes, after)
            ]
            assert set(same) & set(ancestors), (seen, calls[seen.call_id].fork_check, shown(nodes, after))


def shown(nodes, call):
    """What a client sees of a reply."""
    text = toy.decode(nodes[call.output_node].token_ids.tolist()) if call.output_node else ""
    return re.sub("<think>.*?(</think>|$)", "", text, flags=re.DOTALL).replace("<|im_end|>", "").strip()


def ancestors_of(nodes, leaf):
    found = []
    while leaf is not None:
        found.append(leaf)
        leaf = nodes[leaf].parent_id
    return found


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_fault_makes_a_wrong_record(tmp_path: Path, seed: int) -> None:
    world = World(folder=tmp_path, random=Random(seed))
    await world.live(2, 8)
    check(world)


@pytest.mark.skipif("GYRE_TEST_WORLDS" not in os.environ, reason="long: set GYRE_TEST_WORLDS to seconds")
@pytest.mark.timeout(7200)
async def test_no_fault_makes_a_wrong_record_for_long(tmp_path: Path) -> None:
    until, total, seed = time.monotonic() + float(os.environ["GYRE_TEST_WORLDS"]), Counter(), time.time_ns()
    while time.monotonic() < until:
        seed += 1
        world = World(folder=tmp_path / str(seed), random=Random(seed), num_kills=4)
        world.folder.mkdir()
        await world.live(3, 20)
        check(world)
        total.update(world.faults | {"calls": len(world.acknowledged), "worlds": 1})
    print(dict(total))
