"""The trees that training is timed on, as the trainer gets them: structure and sizes, random ids, one reward each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gyre_train.tree_input import TrajectoryInput, TreeInput

__all__ = ["NODES", "OCCURRENCES", "capped", "published_shape", "thinking_forks", "trunk_and_branches", "unshared"]

NODES, OCCURRENCES = 1347, 1716
_RANKS = ("main", "main_summary", "sub_agent", "sub_agent_summary")


@dataclass
class _Grown:
    """A tree while it grows; a trajectory owns the sampled nodes of its path that none before it has taken."""

    parent: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    paths: list[tuple[str, list[int]]] = field(default_factory=list)

    def chain(self, path: Sequence[int], new: Iterable[tuple[bool, float]]) -> list[int]:
        """Nodes (sampled, tokens) one below the other, under the last of `path`; the longer path."""
        out = list(path)
        for sampled, tokens in new:
            self.parent.append(out[-1] if out else -1)
            self.tokens.append(tokens)
            self.sampled.append(sampled)
            out.append(len(self.parent) - 1)
        return out

    def made(self, *, vocab: int, seed: int, total: int | None = None) -> TreeInput:
        """The tree with `total` tokens (default: as they are), and behaviour log-probs near a fresh model's."""
        rng = np.random.default_rng(seed)
        scale = 1.0 if total is None else total / sum(self.tokens)
        num_tokens = [max(1, round(tokens * scale)) for tokens in self.tokens]
        taken: set[int] = set()
        trajectories = []
        for role, path in self.paths:
            owned = [n for n in path if self.sampled[n] and n not in taken]
            taken.update(owned)
            trajectories.append(
                TrajectoryInput(
                    path_P=np.array(path, np.int32), owned_O=np.array(owned, np.int32), advantage=1.0, role=role
                )
            )
        return TreeInput(
            execution=seed,
            parent_N=np.array(self.parent, np.int32),
            ids=tuple(rng.integers(0, vocab, n).astype(np.int32) for n in num_tokens),
            temperature_N=np.ones(len(self.parent)),
            trajectories=tuple(trajectories),
            logp_behaviour=tuple(rng.normal(-np.log(vocab), 0.1, n) for n in num_tokens),
        )


def trunk_and_branches(trunk: int, branch: int, branches: int, *, vocab: int, seed: int = 0) -> TreeInput:
    """One long prompt and sampled branches below it, as best-of-n or side trajectories leave it."""
    grown = _Grown()
    top = grown.chain([], [(False, trunk)])
    for _ in range(branches):
        grown.paths.append(("main", grown.chain(top, [(True, branch)])))
    return grown.made(vocab=vocab, seed=seed)


def unshared(rows: int, tokens: int, *, vocab: int) -> list[TreeInput]:
    """Executions of one linear trajectory each, an eighth of it sampled: nothing is shared."""
    trees = []
    for seed in range(rows):
        grown = _Grown()
        turns = [(False, tokens * 7 / 64), (True, tokens / 64)] * 8
        grown.paths.append(("main", grown.chain([], turns)))
        trees.append(grown.made(vocab=vocab, seed=seed, total=tokens))
    return trees


def thinking_forks(turns: int, *, vocab: int, total: int, seed: int = 0) -> TreeInput:
    """A template that strips thoughts: each turn's output is a leaf, and the conversation goes on with a copy of it.

    Per turn 400 tokens of thought and 150 of answer are sampled; the history keeps the answer and a result of 250.
    """
    grown = _Grown()
    spine = grown.chain([], [(False, 1500)])
    for _ in range(turns):
        grown.paths.append(("main", grown.chain(spine, [(True, 550)])))
        spine = grown.chain(spine, [(False, 150), (False, 250)])
    return grown.made(vocab=vocab, seed=seed, total=total)


def published_shape(*, vocab: int, total: int, seed: int = 0) -> TreeInput:
    """The published case: 1,347 message nodes, ten trajectories, 1,716 occurrences; messages of uneven length.

    A main conversation that is compacted and goes on, three forks of it, three sub-agents of which one is compacted
    and goes on, and a fork of one. `total` spreads its million tokens over fewer: lengths are scaled, nothing else.
    """
    rng = np.random.default_rng(seed)
    grown = _Grown()

    def turns(number: int, extra: int = 0) -> list[tuple[bool, float]]:
        out = []
        for turn in range(number):
            user = [(False, 150.0)] if turn < extra else []
            out += [(False, float(rng.lognormal(5.9, 1.2))), *user, (True, float(rng.lognormal(5.3, 0.9)))]
        return out

    def opened(system: float, user: float) -> list[tuple[bool, float]]:
        return [(False, system), (False, user), (True, 200.0)]

    def fork(path: Sequence[int], shared: int, number: int) -> list[int]:
        return grown.chain(path[:shared], [(False, 150.0), (True, 200.0), *turns(number)])

    summary = [(False, 400.0), (True, 900.0)]
    first = grown.chain([], [*opened(9000, 400), *turns(128, extra=77), *summary])
    kept_tail = [(False, 900.0), (False, 200.0), (False, 365.0), (True, 200.0)]
    second = grown.chain(first[:1], [*kept_tail, *turns(139)])
    main = [second, fork(second, 120, 59), fork(first, 200, 39), fork(second, 45, 29)]
    a91 = grown.chain([], [*opened(4000, 300), *turns(51)])
    b20 = grown.chain([], [*opened(4000, 300), *turns(68), *summary])
    c33 = grown.chain([], [*opened(4000, 300), *turns(49)])
    sub_agents = [a91, c33, fork(b20, 1, 39), fork(c33, 2, 19)]
    grown.paths = [
        *(("main", path) for path in main),
        ("main_summary", first),
        *(("sub_agent", path) for path in sub_agents),
        ("sub_agent_summary", b20),
    ]
    assert (len(grown.parent), sum(len(path) for _, path in grown.paths)) == (NODES, OCCURRENCES)
    return grown.made(vocab=vocab, seed=seed, total=total)


def capped(tree: TreeInput, j_max: int) -> TreeInput:
    """The same execution with its first `j_max` trajectories, main before summaries before sub-agents."""
    kept = sorted(tree.trajectories, key=lambda t: _RANKS.index(t.role))[:j_max]
    return replace(tree, trajectories=tuple(kept))
