"""What training on a run would cost on a chosen model, with shared prefixes laid out once and without.

Counts of tokens and of query-key pairs are exact for the trees as they are; operations and bytes are by the formulas
below. Nothing is timed: what a device makes of these operations is for a benchmark to say.

Operations (a multiplication and an addition are two), forward:
- 2 per weight and token for the projections and the feed-forward layers that a token passes (of a mixture: its
  experts and the router), as in Kaplan et al., arXiv:2001.08361, section 2.1;
- 2 (d_qk + d_v) per query head and query-key pair for attention (QK^T and PV), over the pairs that a causal mask leaves
  alive; a sliding-window layer has those inside its window;
- 2 h V per row whose logits are needed: only rows that predict a trained token.
Forward and backward are three forwards (the same source); recomputation would add up to one more and is left out.

Bytes, of all devices together, before any is sharded:
- 18 per parameter: bfloat16 weights, float32 gradients, float32 master weights and two Adam moments (Megatron Core,
  "Distributed Optimizer": 18, or 6 + 12/d with d data-parallel ranks);
- activations per token and layer, 16 bit, attention fused: 2 (4 h + a (d_qk + d_v) + kv (d_qk + d_v) + 3 f), which is
  Korthikanti et al., arXiv:2205.05198, section 4.1, without its dropout masks and its quadratic term, for gated layers
  and grouped queries; of a mixture, f is that of the experts passed and each of these gets a copy of its input;
- with full recomputation only a layer's input stays, 2 h per token and layer, and one layer is alive at a time;
- logits of at most 4,096 rows at a time: 10 bytes each (bfloat16, float32 copy, float32 gradient).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .eligible import eligibility
from .errors import ConfigError
from .model_shapes import ModelShape, named_shape
from .ownership import AdmittedTrajectory, kept_trajectories
from .tree import Forest, Tables, Tree

__all__ = [
    "J_MAX",
    "WORTH",
    "CapForecast",
    "Forecast",
    "activation_bytes",
    "causal_pairs",
    "forecast",
    "training_flops",
]

J_MAX = (1, 2, 3, 4, 5)
WORTH = 1.2
"""A rule of thumb, not a law: below 1.2 times fewer operations, what tree attention and planning cost on top can eat
the gain. Published: 1.26x of the update became 1.14x of the whole step (verl pull request 4368); tree attention gave
1.2x over plain variable-length attention (ART pull request 586)."""

_STATE_BYTES = 18
_LOGIT_ROWS, _LOGIT_BYTES = 4096, 10

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class CapForecast:
    """Cost with at most `j_max` trajectories per execution; `rows` lays each out alone, `tree` shares prefixes."""

    j_max: int | None
    trajectories: int
    trained_tokens: int
    rows_tokens: int
    tree_tokens: int
    rows_flops: int
    """Forward and backward over the whole data, once."""
    tree_flops: int
    longest_row_tokens: int
    """The longest trajectory: the least a device must hold."""
    largest_rows_tokens: int
    """Trajectories of the largest execution, added up: held at once when an execution is one micro-step."""
    largest_tree_tokens: int
    """The largest execution's tree, whole. The planner cuts it where `pack.tokens` is smaller, and replays prefixes."""
    rows_alone_bytes: int
    """Activations and logits of the longest trajectory, all else recomputed."""
    rows_together_bytes: int
    """The same of the largest execution's trajectories side by side."""
    tree_bytes: int
    """The same of the largest tree."""
    tree_bytes_without_recomputation: int

    @property
    def flops_ratio(self) -> float | None:
        """Operations of rows over those of trees; None when nothing is trained."""
        return self.rows_flops / self.tree_flops if self.tree_flops else None

    @property
    def worth_packing(self) -> bool | None:
        """Whether sharing saves at least the limit; None when nothing is trained."""
        return None if self.flops_ratio is None else self.flops_ratio >= WORTH


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Cost of one pass over the data, per cap on trajectories."""

    model: str
    parameters: int
    active_parameters: int
    state_bytes: int
    """Weights, gradients and optimiser, before sharding."""
    basis: str
    """`trainable`: the tokens an RL loss may take. `eligible`: nothing is trainable (a hosted API sampled it, or no
    log-probs were recorded), so every eligible output counts as if a policy of yours had sampled it."""
    executions: int
    """With at least one such token; scores are not looked at."""
    limit: float
    caps: tuple[CapForecast, ...]

    def cap(self, j_max: int | None) -> CapForecast:
        """The forecast for this cap; ConfigError for one that was not computed."""
        for one in self.caps:
            if one.j_max == j_max:
                return one
        told = ", ".join(str(one.j_max) for one in self.caps)
        raise ConfigError(f"wanted the forecast for J_max {j_max}, it was made for {told}; name it in caps")

    def to_json(self) -> dict[str, Any]:
        """Plain values, the derived ones too."""
        caps = [
            {**asdict(cap), "flops_ratio": cap.flops_ratio, "worth_packing": cap.worth_packing} for cap in self.caps
        ]
        return {**asdict(self), "caps": caps}


def training_flops(shape: ModelShape, *, tokens: int, pairs: int, logit_rows: int, window_pairs: int = 0) -> int:
    """Operations of one forward and backward; `pairs` are live query-key pairs of a layer that sees everything."""
    wide = shape.head_dim + (shape.latent.rope_dim + shape.latent.v_dim if shape.latent else shape.head_dim)
    full = shape.num_layers - shape.window_layers
    forward = (
        2 * tokens * shape.linear_weights()
        + 2 * shape.num_heads * wide * (full * pairs + shape.window_layers * window_pairs)
        + 2 * logit_rows * shape.hidden * shape.vocab
    )
    return 3 * forward


def causal_pairs(length: Counts | int, window: int | None = None) -> Any:
    """Live query-key pairs of a causal row of `length` tokens, each seeing itself and at most `window` - 1 before."""
    if window is None:
        return length * (length + 1) // 2
    inside = np.minimum(length, window)
    return inside * (inside + 1) // 2 + (length - inside) * window


def activation_bytes(shape: ModelShape, tokens: int, *, recompute: bool, logit_rows: int = 0) -> int:
    """Bytes that a forward over `tokens` rows keeps for the backward, with the logits alive at a time."""
    layer = _layer_bytes(shape)
    kept = (2 * shape.hidden * shape.num_layers + layer) if recompute else layer * shape.num_layers
    return tokens * kept + min(logit_rows, _LOGIT_ROWS) * shape.vocab * _LOGIT_BYTES


def _layer_bytes(shape: ModelShape) -> int:
    """Per token, of one layer; of a mixture with dense layers the larger kind."""
    qk = shape.head_dim + (shape.latent.rope_dim if shape.latent else 0)
    v = shape.latent.v_dim if shape.latent else shape.head_dim
    kept = 3 if shape.gated else 2
    inner = kept * shape.ffn if not shape.num_experts or shape.dense_layers else 0
    if shape.num_experts:
        sparse = kept * (shape.experts_per_token * shape.expert_ffn + shape.shared_ffn)
        inner = max(inner, sparse + shape.experts_per_token * shape.hidden)
    # Queries are as wide as keys, outputs of attention as values: the sum is the same as in the docstring above.
    return 2 * (4 * shape.hidden + (shape.num_heads + shape.num_kv_heads) * (qk + v) + inner)


def forecast(runs: Tables | Sequence[Tables], model: str | Path, *, caps: Sequence[int] = J_MAX) -> Forecast:
    """Forecast the cost of training on runs. `model` is a name of the table, a folder with config.json or that file.

    `caps` are the J_max to compute, smallest first; no cap comes last in any case.
    """
    name, shape = named_shape(model)
    forests = [Forest(run) for run in ([cast(Tables, runs)] if hasattr(runs, "table") else runs)]
    basis = "trainable"
    shared = list(_executions(forests, as_trainable=False))
    if not shared and (shared := list(_executions(forests, as_trainable=True))):
        basis = "eligible"
    return Forecast(
        model=name,
        parameters=shape.num_parameters(),
        active_parameters=shape.num_parameters(active=True),
        state_bytes=_STATE_BYTES * shape.num_parameters(),
        basis=basis,
        executions=len(shared),
        limit=WORTH,
        caps=tuple(_cap(shape, shared, j_max) for j_max in (*caps, None)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Execution:
    """What a forecast needs of one tree: per kept trajectory the path down to its last owned node, and these nodes."""

    parent_N: Counts
    num_tokens_N: Counts
    end_N: Counts
    """Tokens on the path down to and with each node."""
    needed: tuple[tuple[int, ...], ...]
    owned: tuple[tuple[int, ...], ...]


def _executions(forests: Iterable[Forest], *, as_trainable: bool) -> Iterable[_Execution]:
    for forest in forests:
        for execution_id in forest.execution_ids:
            if (tree := forest.consistent(execution_id)) is None:
                continue
            judged = eligibility(tree)
            if as_trainable:
                judged = replace(judged, trainable_N=judged.eligible_N)
            if kept := kept_trajectories(tree, judged, j_max=None):
                yield _execution(tree, kept)


def _execution(tree: Tree, kept: Sequence[AdmittedTrajectory]) -> _Execution:
    tokens_N = np.asarray(tree.num_tokens_N, np.int64)
    return _Execution(
        parent_N=np.asarray(tree.parent_N, np.int64),
        num_tokens_N=tokens_N,
        end_N=np.asarray(tree.start_pos_N, np.int64) + tokens_N,
        needed=tuple(t.path[: t.path.index(t.owned[-1]) + 1] for t in kept),
        owned=tuple(t.owned for t in kept),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Laid:
    """One execution's trajectories under a cap, as rows and as a tree."""

    rows_P: Counts
    """Tokens of each row."""
    tree_tokens: int
    tree_pairs: int
    tree_window_pairs: int
    targets: int
    tree_logit_rows: int


def _lay(one: _Execution, j_max: int | None, window: int | None) -> _Laid:
    needed, owned = one.needed[:j_max], one.owned[:j_max]
    union = np.unique(np.concatenate([np.array(path, np.int64) for path in needed]))
    below, above = one.end_N[union], one.end_N[union] - one.num_tokens_N[union]
    trained = np.concatenate([np.array(nodes, np.int64) for nodes in owned])
    targets = int(one.num_tokens_N[trained].sum())
    # The first target of a node is predicted by the last token above it, which siblings share: one row of logits.
    heads = {_last_filled(one, int(one.parent_N[node])) for node in trained}
    return _Laid(
        rows_P=np.array([one.end_N[path[-1]] for path in needed], np.int64),
        tree_tokens=int(one.num_tokens_N[union].sum()),
        tree_pairs=int((causal_pairs(below) - causal_pairs(above)).sum()),
        tree_window_pairs=int((causal_pairs(below, window) - causal_pairs(above, window)).sum()) if window else 0,
        targets=targets,
        tree_logit_rows=targets - len(trained) + len(heads),
    )


def _last_filled(one: _Execution, node: int) -> int:
    while node >= 0 and not one.num_tokens_N[node]:
        node = int(one.parent_N[node])
    return node


def _cap(shape: ModelShape, shared: Sequence[_Execution], j_max: int | None) -> CapForecast:
    window = shape.window if shape.window_layers else None
    laid = [_lay(one, j_max, window) for one in shared]
    rows_P = np.concatenate([np.zeros(0, np.int64), *(one.rows_P for one in laid)])
    targets = sum(one.targets for one in laid)
    longest = int(rows_P.max(initial=0))
    together = max((int(one.rows_P.sum()) for one in laid), default=0)
    largest = max((one.tree_tokens for one in laid), default=0)

    def held(tokens: int, *, recompute: bool = True) -> int:
        return activation_bytes(shape, tokens, recompute=recompute, logit_rows=min(targets, tokens)) if tokens else 0

    return CapForecast(
        j_max=j_max,
        trajectories=len(rows_P),
        trained_tokens=targets,
        rows_tokens=int(rows_P.sum()),
        tree_tokens=sum(one.tree_tokens for one in laid),
        rows_flops=training_flops(
            shape, tokens=int(rows_P.sum()), pairs=int(causal_pairs(rows_P).sum()), logit_rows=targets,
            window_pairs=int(causal_pairs(rows_P, window).sum()) if window else 0,
        ),
        tree_flops=training_flops(
            shape, tokens=sum(one.tree_tokens for one in laid), pairs=sum(one.tree_pairs for one in laid),
            logit_rows=sum(one.tree_logit_rows for one in laid),
            window_pairs=sum(one.tree_window_pairs for one in laid),
        ),
        longest_row_tokens=longest,
        largest_rows_tokens=together,
        largest_tree_tokens=largest,
        rows_alone_bytes=held(longest),
        rows_together_bytes=held(together),
        tree_bytes=held(largest),
        tree_bytes_without_recomputation=held(largest, recompute=False),
    )  # fmt: skip
