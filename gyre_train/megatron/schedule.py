"""The order of a step's packs over ranks: which data-parallel copy takes which."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core import parallel_state

from gyre_train.pack import Pack

__all__ = ["dealt"]


def dealt(packs: Sequence[Pack]) -> tuple[int, ...]:
    """Which packs, by index, are this rank's: the largest first, each to the copy of the model with fewest tokens."""
    load = [0] * int(parallel_state.get_data_parallel_world_size())
    mine = []
    for index in sorted(range(len(packs)), key=lambda i: (-packs[i].num_tokens, i)):
        copy = load.index(min(load))
        load[copy] += packs[index].num_tokens
        if copy == int(parallel_state.get_data_parallel_rank()):
            mine.append(index)
    return tuple(sorted(mine))
