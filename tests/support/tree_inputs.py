"""Random executions for property tests: empty nodes, several roots, unowned outputs, both count modes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from gyre_train.tree_input import TrajectoryInput, TreeInput

VOCAB = 13


def make_tree(
    parents: list[int],
    lengths: list[int],
    outputs: list[bool],
    *,
    execution: int = 0,
    count: str = "once",
    keep: int = 5,
    advantages: list[float] | None = None,
    seed: int = 0,
) -> TreeInput:
    """A tree whose kept trajectories end in outputs without an output below, owned by `count`."""
    rng = np.random.default_rng(seed)
    num = len(parents)
    ids = [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
    ids[0][:2] = (1, 2)[: lengths[0]]  # two equal first tokens could leave a query without any gradient
    paths: list[list[int]] = []
    for node in range(num):
        paths.append([*(paths[parents[node]] if parents[node] >= 0 else []), node])
    inner = {n for node in range(num) if outputs[node] for n in paths[node][:-1]}
    leaves = [node for node in range(num) if outputs[node] and node not in inner]
    rng.shuffle(leaves)
    taken: set[int] = set()
    trajectories = []
    for j, leaf in enumerate(leaves[:keep]):
        owned = [n for n in paths[leaf] if outputs[n] and (count == "per_row" or n not in taken)]
        taken.update(owned)
        advantage = float(rng.choice([-1.5, -0.5, 0.7, 1.2])) if advantages is None else advantages[j]
        trajectories.append(
            TrajectoryInput(
                path_P=np.array(paths[leaf], np.int32), owned_O=np.array(owned, np.int32), advantage=advantage
            )
        )
    return TreeInput(
        execution=execution,
        parent_N=np.array(parents, np.int32),
        ids=tuple(ids),
        temperature_N=np.where(outputs, rng.choice([0.7, 1.0, 1.3], num), np.nan),
        trajectories=tuple(trajectories),
        logp_behaviour=tuple(-rng.uniform(0.5, 4.5, n) if outputs[i] else None for i, n in enumerate(lengths)),
    )


@st.composite
def trees(draw: st.DrawFn, execution: int = 0, max_nodes: int = 11) -> TreeInput:
    """One execution: node 0 is a prompt, node 1 an output below it, every leaf was sampled.

    The shape comes from a seeded generator rather than from draws, which would be small and so nearly always a chain.
    """
    return random_tree(
        draw(st.integers(2, max_nodes)),
        draw(st.integers(0, 2**16)),
        execution=execution,
        count=draw(st.sampled_from(["once", "per_row"])),
        keep=draw(st.sampled_from([5, 2, 1, 9])),
    )


def random_tree(num: int, seed: int, *, execution: int = 0, count: str = "once", keep: int = 5) -> TreeInput:
    """A tree of `num` nodes."""
    rng = np.random.default_rng(seed)
    parents, outputs = [-1, 0], [False, True]
    for node in range(2, num):
        parents.append(-1 if rng.random() < 0.1 else max(node - int(rng.integers(1, 5)), 0))
        outputs.append(parents[-1] >= 0 and bool(rng.random() < 0.4))
    for node in range(num):
        outputs[node] |= parents[node] >= 0 and node not in parents
    least = [2 if node < 2 else int(parents[node] < 0) for node in range(num)]
    return make_tree(
        parents,
        [int(rng.integers(n, 4)) for n in least],
        outputs,
        execution=execution,
        count=count,
        keep=keep,
        seed=seed,
    )


@st.composite
def forests(draw: st.DrawFn, max_trees: int = 3) -> list[TreeInput]:
    """A step's executions, of which the first trains something."""
    first = draw(trees(execution=10).filter(lambda tree: tree.num_owned > 0))
    return [first, *(draw(trees(execution=10 + e)) for e in range(1, draw(st.integers(1, max_trees))))]
