"""The oracle of the trainer: a packed forest against its trajectories run one by one, for any model that runs packs.

The independent side is written from the definitions (one causal row per trajectory, the loss formula per token) and
shares no code with planner, layout or loss. Use `assert_exact`; it raises ExactnessError with the figure that is off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gyre_train.config import LossConfig
from gyre_train.edges import edges_of
from gyre_train.loss import policy_loss, sequence_ratios, sequence_sums, sft_loss, step_scale
from gyre_train.pack import Pack, SegmentTable
from gyre_train.tree_input import TreeInput

BOUND = {torch.float64: 1e-9, torch.float32: 1e-5}
Key = tuple[int, int, int, int]  # tree, trajectory number, node, offset


class ExactnessError(AssertionError):
    """Packed and independent results differ, or one of them is not a number, or nothing was compared."""


class PackModel(Protocol):
    """What the check needs of a model; gradients are those of the whole model by parameter name."""

    dtype: torch.dtype

    def edge_logprobs(self, pack: Pack) -> Tensor: ...
    def zero_grad(self) -> None: ...
    def gradients(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One way of computing a step."""

    loss: float
    logp: dict[Key, float]
    gradients: dict[str, Tensor]


def assert_exact(
    model: PackModel,
    trees: Sequence[TreeInput],
    packs: Sequence[Pack],
    *,
    objective: str = "sequence",
    anchor: str = "behaviour",
    bound: float | None = None,
) -> dict[str, float]:
    """Raise unless loss, log-probabilities and every gradient agree; returns the largest differences."""
    bound = BOUND[model.dtype] if bound is None else bound
    packed = packed_step(model, packs, objective=objective, anchor=anchor)
    alone = independent_step(model, trees, objective=objective, anchor=anchor)
    if packed.logp.keys() != alone.logp.keys() or not alone.logp:
        raise ExactnessError(f"targets: {len(packed.logp)} packed, {len(alone.logp)} independent, or other ones")
    logp = [torch.tensor([side.logp[key] for key in alone.logp], dtype=torch.float64) for side in (packed, alone)]
    figures = {
        "loss": _difference("loss", torch.tensor([packed.loss]), torch.tensor([alone.loss]), 1.0),
        "logp": _difference("logp", logp[0], logp[1], 1.0),
    }
    gradient = {
        name: _difference(name, packed.gradients[name], value, 0.0)
        for name, value in alone.gradients.items()
        if not _idle_expert(name, packed.gradients[name], value)
    }
    figures["gradient"] = max(gradient.values())
    worst = max(gradient, key=lambda name: gradient[name])
    for name, figure in figures.items():
        if figure > bound:
            where = f" in {worst}" if name == "gradient" else ""
            raise ExactnessError(f"{name}: relative difference {figure:.3g}{where} is above {bound:.3g}")
    return figures


def _idle_expert(name: str, packed: Tensor, alone: Tensor) -> bool:
    """True for an expert that no token went to, either way."""
    return ".experts." in name and not bool(alone.any() or packed.any())


def _difference(name: str, packed: Tensor, alone: Tensor, floor: float) -> float:
    """max |packed - alone| / max(|alone|, floor); a value that is not finite or a gradient of zeros is no evidence."""
    if not bool(packed.isfinite().all() and alone.isfinite().all()):
        raise ExactnessError(f"{name}: not finite")
    scale = max(float(alone.abs().max()), floor)
    if scale == 0.0:
        raise ExactnessError(f"{name}: zero everywhere, so nothing was compared")
    return float((packed - alone).abs().max()) / scale


def packed_step(model: PackModel, packs: Sequence[Pack], *, objective: str, anchor: str) -> Outcome:
    """The step as the trainer takes it: packs are micro-steps, 1/E when it closes."""
    model.zero_grad()
    total = 0.0
    logp: dict[Key, float] = {}
    settings = LossConfig(kind=objective)
    ratio = "sequence" if objective == "sft" else objective
    edges = [edges_of(pack, anchor=anchor, ratio=ratio, dtype=model.dtype) for pack in packs]
    ratios = None
    if objective in ("sequence", "execution"):
        with torch.no_grad():
            ratios = sequence_ratios(
                [sequence_sums(e, model.edge_logprobs(pack)) for e, pack in zip(edges, packs, strict=True)]
            )
    executions: set[int] = set()
    for pack, e in zip(packs, edges, strict=True):
        logp_E = model.edge_logprobs(pack)
        policy = objective != "sft"
        result = policy_loss(e, logp_E, ratios, settings=settings) if policy else sft_loss(e, logp_E)
        result.loss.backward()
        total += float(result.loss.detach())
        executions |= {int(x) for x in pack.execution_E}
        keys = np.stack([pack.tree_E, pack.trajectory_E, pack.node_E, pack.offset_E], 1)
        for (tree, trajectory, node, offset), value in zip(keys, logp_E.detach(), strict=True):
            key = (int(tree), int(trajectory), int(node), int(offset))
            if key in logp:
                raise ExactnessError(f"target {key} is trained twice")
            logp[key] = float(value)
    scale = step_scale(len(executions))
    return Outcome(loss=total * scale, logp=logp, gradients={n: g * scale for n, g in model.gradients().items()})


def independent_step(model: PackModel, trees: Sequence[TreeInput], *, objective: str, anchor: str) -> Outcome:
    """The step by its definition: each trajectory alone, token by token."""
    model.zero_grad()
    total = 0.0
    logp: dict[Key, float] = {}
    num_executions = sum(any(_owned(tree, t) for t in range(len(tree.trajectories))) for tree in trees)
    number = -1
    for index, tree in enumerate(trees):
        num_owned = sum(len(_owned(tree, t)) for t in range(len(tree.trajectories)))
        rows = []
        for t, trajectory in enumerate(tree.trajectories):
            number += 1
            owned = _owned(tree, t)
            if not owned:
                continue
            value_O = model.edge_logprobs(_row(tree, t, owned))
            logp |= {(index, number, n, o): float(x) for (n, o, _), x in zip(owned, value_O.detach(), strict=True)}
            rows.append((trajectory.advantage, owned, value_O, _old(tree, owned, value_O, anchor)))
        # The log-ratios that are averaged: a trajectory's own, or those of all of the execution's.
        logratio = [[float(x) - y for x, y in zip(value_O.detach(), old, strict=True)] for _, _, value_O, old in rows]
        whole = [x for row in logratio for x in row]
        for (advantage, owned, value_O, old), own in zip(rows, logratio, strict=True):
            if objective == "sft":
                loss = -value_O.sum()
            else:
                averaged = {"sequence": own, "execution": whole, "token": None}[objective]
                loss = _policy_row(tree, owned, value_O, old, advantage, averaged)
            loss = loss / num_owned / num_executions
            loss.backward()
            total += float(loss.detach())
    return Outcome(loss=total, logp=logp, gradients=model.gradients())


def _old(tree: TreeInput, owned: list[tuple[int, int, int]], value_O: Tensor, anchor: str) -> list[float]:
    stored = tree.logp_behaviour if anchor == "behaviour" else tree.logp_old
    return [float(x) for x in value_O.detach()] if stored is None else [float(stored[n][o]) for n, o, _ in owned]


def _policy_row(
    tree: TreeInput,
    owned: list[tuple[int, int, int]],
    value_O: Tensor,
    old: list[float],
    advantage: float,
    averaged: list[float] | None,
) -> Tensor:
    assert tree.logp_behaviour is not None
    low, high = (0.995, 1.005) if averaged is not None else (0.8, 1.2)
    terms = []
    for (n, o, _), logp, y in zip(owned, value_O, old, strict=True):
        s_t = torch.exp(logp - y)
        if averaged is not None:
            s_t = math.exp(sum(averaged) / len(averaged)) * torch.exp(logp - logp.detach())
        inner = torch.minimum(s_t * advantage, s_t.clamp(low, high) * advantage)
        terms.append(-min(math.exp(y - float(tree.logp_behaviour[n][o])), 5.0) * inner)
    return torch.stack(terms).sum()


def _owned(tree: TreeInput, trajectory: int) -> list[tuple[int, int, int]]:
    """(node, offset, index in the trajectory's own token sequence) of its owned tokens."""
    out, start = [], 0
    for node in tree.trajectories[trajectory].path_P:
        n = len(tree.ids[node])
        if node in tree.trajectories[trajectory].owned_O:
            out += [(int(node), offset, start + offset) for offset in range(n)]
        start += n
    return out


def _row(tree: TreeInput, trajectory: int, owned: list[tuple[int, int, int]]) -> Pack:
    """One causal row whose loss edges are the owned tokens; token i is scored by row i - 1."""
    path_P = tree.trajectories[trajectory].path_P
    ids_T = np.concatenate([tree.ids[node] for node in path_P]).astype(np.int64)
    num, place_O = len(owned), np.array([i for _, _, i in owned])
    zeros = np.zeros(num, np.int64)
    one = np.array([0], np.int32)
    return Pack(
        ids_T=ids_T,
        position_T=np.arange(len(ids_T)),
        segments=SegmentTable(start_S=one, end_S=one + np.int32(len(ids_T)), parent_S=one - np.int32(1)),
        source_row_E=place_O - 1,
        target_id_E=ids_T[place_O],
        trajectory_E=zeros,
        execution_E=zeros,
        temperature_E=np.array([tree.temperature_N[n] for n, _, _ in owned], np.float64),
        advantage_E=np.zeros(num),
        logp_behaviour_E=np.zeros(num),
        logp_old_E=None,
        weight_E=np.zeros(num),
        trajectory_tokens_E=zeros + num,
        execution_tokens_E=zeros + num,
        logp_teacher_E=np.zeros(num),
        role_E=zeros,
        version_E=zeros,
        tree_E=zeros,
        node_E=np.array([n for n, _, _ in owned]),
        offset_E=np.array([o for _, o, _ in owned]),
        routes_TLK=None if tree.routes is None else np.concatenate([tree.routes[n] for n in path_P]),
    )
