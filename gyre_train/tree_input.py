"""What the packer takes of one execution: its forest, the tokens with what was recorded of each, and who trains what.

Shapes: N nodes of a tree, P nodes on a path, O owned nodes of a trajectory. Numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gyre_data.errors import AlignmentError, DataError
from gyre_train.routes import check_routes
from gyre_train.segment_table import Array, check_array

__all__ = ["TrajectoryInput", "TreeInput"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryInput:
    """One admitted trajectory: a root-to-leaf path and the output nodes on it that this trajectory trains."""

    path_P: Array
    """Node indices from a root to the leaf."""
    owned_O: Array
    """The node indices of the path whose tokens it owns, in path order."""
    advantage: float
    role: str = "main"


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeInput:
    """One execution's forest with its kept trajectories; checked when made, so that later stages trust it."""

    execution: int
    """Identity of the execution in this step; its owned tokens over all trajectories are N_e."""
    parent_N: Array
    """Parent index, -1 for a root; parents come first."""
    ids: tuple[Array, ...]
    """Token ids per node; a node may be empty."""
    temperature_N: Array
    """The used sampling temperature; read at owned nodes only (NaN elsewhere is fine)."""
    trajectories: tuple[TrajectoryInput, ...]
    logp_behaviour: tuple[Array | None, ...] | None = None
    """Recorded log-probabilities per node, aligned with `ids`; None where nothing was recorded (SFT)."""
    logp_old: tuple[Array | None, ...] | None = None
    """Log-probabilities under the anchor weights, aligned with `ids`; None while the anchor is the current weights."""
    logp_teacher: tuple[Array | None, ...] | None = None
    """A teacher's log-probabilities, aligned with `ids`; None where it gave none."""
    version: tuple[Array | None, ...] | None = None
    """Optimiser steps of this training run behind the weights that sampled each token; -1 or None where unknown."""
    routes: tuple[Array | None, ...] | None = None
    """Recorded experts per node, integers [tokens, layers, experts per token], -1 where a token has none."""
    num_tokens_N: Array = field(init=False)
    """Tokens per node."""

    def __post_init__(self) -> None:
        num_nodes = len(self.ids)
        object.__setattr__(self, "num_tokens_N", np.array([len(ids) for ids in self.ids], dtype=np.int64))
        check_array("parent_N", self.parent_N, "iu", num_nodes)
        check_array("temperature_N", self.temperature_N, "f", num_nodes)
        for node, ids in enumerate(self.ids):
            check_array(f"ids[{node}]", ids, "iu")
        if num_nodes and not bool(np.all((self.parent_N < np.arange(num_nodes)) & (self.parent_N >= -1))):
            raise AlignmentError(
                "parent_N: wanted parents before children and -1 for roots, got another order; sort it"
            )
        for name, kind in (("logp_behaviour", "f"), ("logp_old", "f"), ("logp_teacher", "f"), ("version", "i")):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != num_nodes:
                raise AlignmentError(f"{name}: wanted {num_nodes} nodes, got {len(values)}; give None for prompt nodes")
            for node, value in enumerate(values):
                if value is not None:
                    check_array(f"{name}[{node}]", value, kind, len(self.ids[node]))
        if self.routes is not None:
            check_routes(self.routes, self.num_tokens_N)
        for index, trajectory in enumerate(self.trajectories):
            self._check_trajectory(index, trajectory)

    def _check_trajectory(self, index: int, trajectory: TrajectoryInput) -> None:
        where = f"trajectory {index} of execution {self.execution}"
        path_P = check_array(f"path_P of {where}", trajectory.path_P, "iu")
        owned_O = check_array(f"owned_O of {where}", trajectory.owned_O, "iu")
        if not len(path_P) or not np.array_equal(self.parent_N[path_P], np.append(-1, path_P[:-1])):
            raise AlignmentError(f"{where}: wanted a path from a root down, got {path_P}; rebuild it from the parents")
        kept_O = path_P[np.isin(path_P, owned_O)]
        if not np.array_equal(kept_O, owned_O):
            raise AlignmentError(f"{where}: wanted owned nodes in path order, got {owned_O} on {path_P}; sort or drop")
        if not np.isfinite(trajectory.advantage):
            raise DataError(f"{where}: wanted a finite advantage, got {trajectory.advantage}; exclude the execution")
        temperature_O = self.temperature_N[owned_O]
        if not bool(np.all(np.isfinite(temperature_O) & (temperature_O > 0))):
            raise DataError(f"{where}: wanted temperatures above 0, got {temperature_O}; such calls are not trainable")
        filled_P = path_P[self.num_tokens_N[path_P] > 0]
        if len(filled_P) and filled_P[0] in owned_O:
            raise DataError(f"{where}: owned node {filled_P[0]} has no token before it to predict it; exclude the call")

    @property
    def num_owned(self) -> int:
        """N_e: loss edges of the execution. A token that two trajectories own counts twice, as its edges do."""
        num_tokens_N = self.num_tokens_N
        return int(sum(int(num_tokens_N[t.owned_O].sum()) for t in self.trajectories))

    def needed_path(self, trajectory: int, owned_O: Array | None = None) -> Array:
        """The path down to the deepest owned node with tokens; what lies below it predicts nothing that is trained."""
        kept = self.trajectories[trajectory]
        owned_O = kept.owned_O if owned_O is None else owned_O
        owned_O = owned_O[self.num_tokens_N[owned_O] > 0]
        if not len(owned_O):
            return kept.path_P[:0]
        return kept.path_P[: int(np.flatnonzero(kept.path_P == owned_O[-1])[0]) + 1]
