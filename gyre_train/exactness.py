"""How exact training is on given data: packed trees against independent rows, and trainer against sampled log-probs.

    relative gradient difference of a tensor = max |g_tree - g_rows| / max |g_rows|

The contract (docs/training.md) is 1e-9 in float64 and 1e-5 in float32, for each parameter tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig

from .config import DataConfig, LossConfig, ModelConfig, TrainingConfig
from .edges import edges_of
from .loss import policy_loss, sft_loss
from .megatron.model import build_model, edge_logprobs
from .megatron.parallel import finish_gradients, gradient_of, groups, wrap_model
from .megatron.weights import load_hf
from .pack import TreeInput
from .plan import Sharing, plan
from .source import load_source

__all__ = ["Exactness", "logprob_gap", "recorded_trees", "sharing_gap"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exactness:
    """Largest differences between the packed tree and independent rows, and the tokens each computes."""

    gradient: float
    """Largest relative gradient difference over the parameter tensors."""
    logprob: float
    """Largest difference of a trained token's log-prob."""
    tree_tokens: int
    row_tokens: int


def recorded_trees(
    run: str | Path,
    model: str | Path,
    *,
    kind: Literal["sequence", "execution", "token", "sft"] = "sft",
    executions: Sequence[str] | None = None,
) -> list[TreeInput]:
    """Trees of the executions that the loss may train ("sft" needs no score); `executions` picks some by id."""
    config = TrainingConfig(
        model=ModelConfig(path=str(model)), data=DataConfig(runs=(str(run),)), loss=LossConfig(kind=kind)
    )
    examples = load_source(config).examples
    chosen = [e for e in examples if executions is None or e.execution_id in executions]
    return [example.tree(number) for number, example in enumerate(chosen)]


def sharing_gap(
    model: str | Path, trees: Sequence[TreeInput], *, tokens: int, dtype: str = "float64", attention: str = "segments"
) -> Exactness:
    """Compare one step's gradients and log-probs on packed trees with those on one row per trajectory.

    The loss is the policy loss when the trees carry advantages, else the SFT loss.
    """
    has_signal = any(t.advantage for tree in trees for t in tree.trajectories)
    with groups():
        built = build_model(AutoConfig.from_pretrained(model), dtype=getattr(torch, dtype))
        load_hf(built, model)
        wrapped = wrap_model(built)
        seen = []
        for sharing in (Sharing.TREE, Sharing.ROWS):
            wrapped.zero_grad_buffer()
            made = plan(trees, tokens=tokens, sharing=sharing)
            logps: dict[tuple[int, int, int], float] = {}
            for pack in made.packs:
                edges = edges_of(pack, anchor="step", dtype=getattr(torch, dtype))
                logp_E, _ = edge_logprobs(wrapped, pack, backend=attention)
                (policy_loss if has_signal else sft_loss)(edges, logp_E).loss.backward()
                names = zip(pack.tree_E, pack.node_E, pack.offset_E, strict=True)
                logps |= dict(zip(names, logp_E.detach().numpy(), strict=True))
            finish_gradients(wrapped, 1.0)
            gradients = [g.clone() for p in built.parameters() if (g := gradient_of(p)) is not None]
            seen.append((gradients, logps, sum(len(pack.ids_T) for pack in made.packs)))
    (tree_grads, tree_logps, tree_tokens), (row_grads, row_logps, row_tokens) = seen
    pairs = zip(tree_grads, row_grads, strict=True)
    return Exactness(
        gradient=max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if b.abs().max() > 0),
        logprob=max(abs(tree_logps[name] - row_logps[name]) for name in row_logps),
        tree_tokens=tree_tokens,
        row_tokens=row_tokens,
    )


def logprob_gap(model: str | Path, trees: Sequence[TreeInput], *, tokens: int) -> float:
    """Largest |trainer's log-prob - log-prob recorded at sampling| over the trained tokens of `trees`, in float32."""
    worst = 0.0
    with groups(), torch.no_grad():
        built = build_model(AutoConfig.from_pretrained(model))
        load_hf(built, model)
        for pack in plan(trees, tokens=tokens).packs:
            edges = edges_of(pack, anchor="step", dtype=torch.float32)
            gap = (edge_logprobs(built, pack)[0] - edges.logp_behaviour_E).abs()
            worst = max(worst, float(gap[gap.isfinite()].max()))
    return worst
