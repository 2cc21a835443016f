"""Routed experts that an engine recorded, to be replayed (R3): from a run's side table to the rows of a pack.

Every token keeps the routing of the first call that computed it, whoever reads it later, so a shared node has one.
-1 stands where none is recorded; the last token of a reply has none unless a later call goes on from it.
Shapes: N tokens of a node, T rows of a pack, L layers of the model, K experts per token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gyre_data.arrays import list_views
from gyre_data.errors import AlignmentError, ConfigError, DataError
from gyre_data.model_shapes import shape_from_config

from .segment_table import Array

if TYPE_CHECKING:
    from gyre_data.tree import Tables

__all__ = ["RecordedRoutes", "check_routes", "joined_routes", "recorded_routes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Experts:
    """What a model's routing consists of."""

    num_layers: int
    num_experts: int
    top_k: int
    sparse: tuple[int, ...]
    """Layers that have experts; what is recorded of the others means nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRoutes:
    """The routings of a run's nodes; views of its files until a node is asked for."""

    where: str
    experts: _Experts
    parts: Mapping[str, Sequence[tuple[int, Array]]]
    """By node: where in it a row starts, and what it holds, in the order they were written."""

    def of(self, node_id: str, num_tokens: int) -> Array | None:
        """Experts [N, L, K] of a node's tokens; None when nothing is recorded.

        Raises DataError for what cannot be replayed.
        """
        parts = self.parts.get(node_id)
        if not parts or not num_tokens:
            return None
        wanted = (self.experts.num_layers, self.experts.top_k)
        shaped = [(start, flat.reshape(-1, *wanted)) for start, flat in parts]
        for start, experts in shaped:
            if start < 0 or start + len(experts) > num_tokens:
                raise DataError(
                    f"{self.where}: routed experts of node {node_id}: wanted tokens 0 to {num_tokens}, got {start} to "
                    f"{start + len(experts)}; run `gyre verify` on it, or set model.router_replay = none"
                )
            self._check_ids(node_id, experts[:, self.experts.sparse])
        if len(shaped) == 1 and len(shaped[0][1]) == num_tokens:
            return shaped[0][1]
        out = np.full((num_tokens, *wanted), -1, np.int16)
        for start, experts in reversed(shaped):  # what was written first stays
            out[start : start + len(experts)] = experts
        return out

    def _check_ids(self, node_id: str, experts: Array) -> None:
        limit = self.experts.num_experts
        if experts.size and not (experts.min() >= 0 and experts.max() < limit):
            came = f"{experts.min()} to {experts.max()}"
        elif (np.diff(np.sort(experts, axis=-1), axis=-1) == 0).any():
            came = "one expert twice for a token"
        else:
            return
        raise DataError(
            f"{self.where}: routed experts of node {node_id}: wanted {self.experts.top_k} different ones from 0 to "
            f"{limit - 1}, got {came}; it was recorded with another model, set model.path to the one that was served"
        )


def recorded_routes(run: Tables, model: str | Path) -> RecordedRoutes:
    """The run's side table for this model. ConfigError for a dense model, DataError where the table is empty or is of
    another shape."""
    experts = _experts_of(Path(model))
    table = run.table("routed_experts")
    where = str(getattr(run, "path", "the run"))
    if not table.num_rows:
        raise DataError(
            f"model.router_replay = R3: wanted routed experts in {where}, it holds none; record with an engine started "
            "with --enable-return-routed-experts, or set model.router_replay = none"
        )
    names = ("num_layers", "top_k", "start")
    layers_R, k_R, start_R = (table.column(name).fill_null(0).to_numpy() for name in names)
    nodes, views = table.column("node_id").to_pylist(), list_views(table.column("experts"))
    wrong = np.flatnonzero((layers_R != experts.num_layers) | (k_R != experts.top_k))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{where}: routed experts of node {nodes[row]}: wanted {experts.num_layers} layers and {experts.top_k} "
            f"experts per token as in {model}, got {layers_R[row]} and {k_R[row]}; set model.path to the model that "
            "was served"
        )
    parts: dict[str, list[tuple[int, Array]]] = {}
    for node, start, view in zip(nodes, map(int, start_R), views, strict=True):
        if view is None or len(view) % (experts.num_layers * experts.top_k):
            came = "nothing" if view is None else f"{len(view)} values"
            raise DataError(
                f"{where}: routed experts of node {node}: wanted {experts.num_layers} x {experts.top_k} values for "
                f"each token, got {came}; run `gyre verify` on it, or set model.router_replay = none"
            )
        parts.setdefault(node, []).append((start, view))
    return RecordedRoutes(where=where, experts=experts, parts=parts)


def _experts_of(model: Path) -> _Experts:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    shape = shape_from_config(config, where=str(model / "config.json"))
    if not shape.num_experts:
        raise ConfigError(
            f"model.router_replay = R3 has no effect on {model}, a dense model ({config.get('model_type')}); remove it"
        )
    layers, every = shape.num_layers, int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    return _Experts(
        num_layers=layers,
        num_experts=shape.num_experts,
        top_k=shape.experts_per_token,
        sparse=tuple(i for i in range(layers) if i not in dense and (i + 1) % every == 0),
    )


def check_routes(routes: Sequence[Array | None], num_tokens_N: Array) -> None:
    """Refuse anything but, per node, None or integers [N, L, K] with one L and K for all."""
    shapes = set()
    for node, value in enumerate(routes):
        if value is None:
            continue
        if value.ndim != 3 or value.dtype.kind != "i" or len(value) != num_tokens_N[node]:
            raise AlignmentError(
                f"routes[{node}]: wanted integers for ({num_tokens_N[node]} tokens, layers, experts per token), got "
                f"{value.dtype} {value.shape}; give None where nothing is recorded"
            )
        shapes.add(value.shape[1:])
    if len(routes) != len(num_tokens_N) or len(shapes) > 1:
        raise AlignmentError(
            f"routes: wanted {len(num_tokens_N)} nodes of one (layers, experts per token), got {len(routes)} of "
            f"{sorted(shapes)}; they are of one model"
        )


def joined_routes(parts: Mapping[int, Array], num_rows: int) -> Array | None:
    """Routes [T, L, K] of a pack from those of its nodes by their first row, -1 where none are; None without any."""
    if not parts:
        return None
    shape = next(iter(parts.values())).shape[1:]
    out = np.full((num_rows, *shape), -1, np.int16)
    for first, routes in parts.items():
        out[first : first + len(routes)] = routes
    return out
