"""How exact training is on given data: packed trees against independent rows, and trainer against sampled log-probs.

    relative difference of a tensor = max |tree - rows| / max |rows|

Compared are the loss, the log-prob of each trained token, the loss's derivative by that log-prob, and the gradient of
each parameter tensor. The contract (docs/training.md) is 1e-9 in float64 and 1e-5 in float32. A loss may cancel to
zero, so its difference is relative to the sum of |derivative| over the tokens where that is larger.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig

from gyre_data.errors import ConfigError, DataError

from .config import DataConfig, LossConfig, ModelConfig, TrainingConfig
from .edges import edges_of
from .loss import policy_loss, sft_loss
from .megatron.gradients import SimpleDataParallel, finish_gradients, gradient_of
from .megatron.model import build_model, edge_logprobs
from .megatron.parallel import groups
from .megatron.weights import export_tensors, load_hf
from .pack import Pack
from .plan import Sharing, plan
from .source import Example, Source, load_source
from .tree_input import TreeInput

__all__ = [
    "BOUND",
    "Difference",
    "Exactness",
    "TrainingReport",
    "logprob_gap",
    "recorded_trees",
    "sharing_gap",
    "verify_training",
]

BOUND = {"float32": 1e-5, "float64": 1e-9}
"""Largest relative difference that the contract allows."""

_TOGETHER = 4
"""Executions that are compared at a time: enough to share packs, few enough to hold."""

LossKind = Literal["sequence", "execution", "token", "sft"]
_Place = tuple[int, int, int]  # tree, node, offset of a trained token


@dataclass(frozen=True, kw_only=True, slots=True)
class Exactness:
    """Largest differences between the packed tree and independent rows, and the tokens each computes."""

    gradient: float
    """Largest relative gradient difference over the parameter tensors."""
    logprob: float
    """Largest difference of a trained token's log-prob."""
    tree_tokens: int
    row_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One quantity as the packed tree and as the rows gave it, where they differ most."""

    name: str
    """`execution:call:offset` of a token, the Hugging Face name of a parameter, or the executions of a loss."""
    tree: float
    rows: float
    relative: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingReport:
    """What `verify_training` saw: the largest differences of each kind, largest first."""

    run: str
    model: str
    dtype: str
    bound: float
    kind: str
    """Loss that was compared: `sequence`, or `sft` where the run's scores give a policy loss nothing to learn."""
    executions: int
    of_executions: int
    trained_tokens: int
    tree_tokens: int
    row_tokens: int
    parameters: int
    """Tensors whose gradients were compared."""
    loss: tuple[Difference, ...]
    logprob: tuple[Difference, ...]
    derivative: tuple[Difference, ...]
    """Of the loss by each trained token's log-prob."""
    gradient: tuple[Difference, ...]

    @property
    def worst(self) -> float:
        """The largest relative difference of all; NaN counts as infinite."""
        every = (d.relative for kind in (self.loss, self.logprob, self.derivative, self.gradient) for d in kind)
        return max((x if x == x else float("inf") for x in every), default=0.0)

    @property
    def exact(self) -> bool:
        """Whether everything is within the bound."""
        return self.worst <= self.bound


def recorded_trees(
    run: str | Path,
    model: str | Path,
    *,
    kind: LossKind = "sft",
    executions: Sequence[str] | None = None,
) -> list[TreeInput]:
    """Trees of the executions that the loss may train ("sft" needs no score); `executions` picks some by id."""
    examples = load_source(_config(run, model, kind)).examples
    chosen = [e for e in examples if executions is None or e.execution_id in executions]
    return [example.tree(number) for number, example in enumerate(chosen)]


def _config(run: str | Path, model: str | Path, kind: LossKind) -> TrainingConfig:
    return TrainingConfig(
        model=ModelConfig(path=str(model)), data=DataConfig(runs=(str(run),)), loss=LossConfig(kind=kind)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """One way of laying trees out, computed: the loss's sum, values by trained token, gradients by parameter."""

    loss: float
    logps: Mapping[_Place, float]
    derivatives: Mapping[_Place, float]
    gradients: Mapping[str, torch.Tensor]
    tokens: int


class _Comparer:
    """A model whose gradients are computed twice, on packed trees and on one row per trajectory."""

    def __init__(self, model: str | Path, dtype: str, attention: str, *, policy: bool) -> None:
        self._dtype, self._attention, self._policy = getattr(torch, dtype), attention, policy
        self._model = build_model(AutoConfig.from_pretrained(model), dtype=self._dtype)
        load_hf(self._model, model)
        self._wrapped = SimpleDataParallel(self._model.config, self._model)

    def seen(self, trees: Sequence[TreeInput], tokens: int, sharing: Sharing) -> _Seen:
        """Loss, log-probs and gradients of these trees laid out in this way."""
        self._wrapped.zero_grad_buffer()
        made = plan(trees, tokens=tokens, sharing=sharing)
        loss = 0.0
        logps: dict[_Place, float] = {}
        derivatives: dict[_Place, float] = {}
        for pack in made.packs:
            edges = edges_of(pack, anchor="step", dtype=self._dtype)
            logp_E, _ = edge_logprobs(self._wrapped, pack, backend=self._attention)
            logp_E.retain_grad()
            out = (policy_loss if self._policy else sft_loss)(edges, logp_E).loss
            out.backward()
            loss += float(out.detach())
            names = list(_places(pack))
            logps |= dict(zip(names, logp_E.detach().numpy(), strict=True))
            assert logp_E.grad is not None
            derivatives |= dict(zip(names, logp_E.grad.numpy(), strict=True))
        finish_gradients(self._wrapped, 1.0)
        own = {name: g for name, p in self._model.named_parameters() if (g := gradient_of(p)) is not None}
        gradients = {name: whole.clone() for name, whole in export_tensors(self._model, own)}
        return _Seen(
            loss=loss, logps=logps, derivatives=derivatives, gradients=gradients,
            tokens=sum(len(pack.ids_T) for pack in made.packs),
        )  # fmt: skip


def _places(pack: Pack) -> Iterator[_Place]:
    columns = (pack.tree_E, pack.node_E, pack.offset_E)
    return ((int(tree), int(node), int(offset)) for tree, node, offset in zip(*columns, strict=True))


def sharing_gap(
    model: str | Path, trees: Sequence[TreeInput], *, tokens: int, dtype: str = "float64", attention: str = "segments"
) -> Exactness:
    """Compare one step's gradients and log-probs on packed trees with those on one row per trajectory.

    The loss is the policy loss when the trees carry advantages, else the SFT loss.
    """
    with groups():
        comparer = _Comparer(model, dtype, attention, policy=any(t.advantage for e in trees for t in e.trajectories))
        tree, rows = (comparer.seen(trees, tokens, sharing) for sharing in (Sharing.TREE, Sharing.ROWS))
    return Exactness(
        gradient=max(d.relative for d in _gradient_differences(tree, rows)),
        logprob=max(abs(tree.logps[place] - rows.logps[place]) for place in rows.logps),
        tree_tokens=tree.tokens,
        row_tokens=rows.tokens,
    )


def verify_training(
    run: str | Path,
    model: str | Path,
    *,
    dtype: str = "float32",
    limit: int | None = 16,
    tokens: int = 8192,
    attention: str = "segments",
    shown: int = 5,
) -> TrainingReport:
    """Compare packed trees with one row per trajectory on a run's own executions and this model's weights.

    The first `limit` executions in training order are taken (None: all), a few at a time, in packs of `tokens` or as
    long as the longest trajectory asks. The `shown` largest differences of each kind are kept. The loss is the default
    policy loss, or SFT where scores are missing or equal.
    """
    if dtype not in BOUND:
        raise ConfigError(f"dtype: wanted one of {', '.join(BOUND)}, got {dtype}; bfloat16 has no such bound")
    source, kind = _any_source(run, model)
    chosen = source.due({}, limit)
    tokens = max([tokens, *(t.needed_tokens for e in chosen for t in e.trajectories)])
    found: dict[str, dict[str, Difference]] = {"loss": {}, "logprob": {}, "derivative": {}, "gradient": {}}
    sizes = np.zeros(3, np.int64)
    with groups():
        comparer = _Comparer(model, dtype, attention, policy=kind != "sft")
        for first in range(0, len(chosen), _TOGETHER):
            some = chosen[first : first + _TOGETHER]
            trees = [example.tree(number) for number, example in enumerate(some)]
            tree, rows = (comparer.seen(trees, tokens, sharing) for sharing in (Sharing.TREE, Sharing.ROWS))
            sizes += len(rows.logps), tree.tokens, rows.tokens
            for kind_of, differences in _differences(some, tree, rows, shown).items():
                known = found[kind_of]
                for one in differences:
                    known[one.name] = max(known.get(one.name, one), one, key=_by_size)
    return TrainingReport(
        run=str(run), model=str(model), dtype=dtype, bound=BOUND[dtype], kind=kind, executions=len(chosen),
        of_executions=len(source.examples), trained_tokens=int(sizes[0]), tree_tokens=int(sizes[1]),
        row_tokens=int(sizes[2]), parameters=len(found["gradient"]),
        **{name: tuple(heapq.nlargest(shown, known.values(), key=_by_size)) for name, known in found.items()},
    )  # fmt: skip


def _any_source(run: str | Path, model: str | Path) -> tuple[Source, str]:
    """The run under the default policy loss, or under SFT where that has nothing to learn from."""
    try:
        return load_source(_config(run, model, "sequence")), "sequence"
    except DataError:
        return load_source(_config(run, model, "sft")), "sft"


def _by_size(difference: Difference) -> float:
    return difference.relative if difference.relative == difference.relative else float("inf")


def _differences(examples: Sequence[Example], tree: _Seen, rows: _Seen, shown: int) -> dict[str, list[Difference]]:
    scale = max(abs(rows.loss), sum(abs(float(x)) for x in rows.derivatives.values())) or 1.0
    loss = Difference(
        name=f"{examples[0].execution_id}..{examples[-1].execution_id}", tree=tree.loss, rows=rows.loss,
        relative=abs(tree.loss - rows.loss) / scale,
    )  # fmt: skip
    return {
        "loss": [loss],
        "logprob": _token_differences(examples, tree.logps, rows.logps, shown),
        "derivative": _token_differences(examples, tree.derivatives, rows.derivatives, shown),
        "gradient": _gradient_differences(tree, rows),
    }


def _token_differences(
    examples: Sequence[Example], tree: Mapping[_Place, float], rows: Mapping[_Place, float], shown: int
) -> list[Difference]:
    """The tokens that differ most, relative to the largest value of any."""
    if tree.keys() != rows.keys():
        raise AssertionError("trees and rows train the same tokens")
    places = list(rows)
    tree_E, rows_E = (np.array([values[place] for place in places], np.float64) for values in (tree, rows))
    gap_E = np.abs(tree_E - rows_E) / (np.abs(rows_E).max(initial=0.0) or 1.0)
    worst = np.argsort(-np.where(np.isnan(gap_E), np.inf, gap_E), kind="stable")[:shown]
    names = _token_names(examples, [places[i] for i in worst])
    return [
        Difference(name=name, tree=float(tree_E[i]), rows=float(rows_E[i]), relative=float(gap_E[i]))
        for name, i in zip(names, worst, strict=True)
    ]


def _token_names(examples: Sequence[Example], places: Sequence[_Place]) -> list[str]:
    """`execution:call:offset`, as `gyre explain` takes it."""
    trees = {number: read() for number in {p[0] for p in places} if (read := examples[number].recorded) is not None}
    return [
        f"{examples[number].execution_id}:{trees[number].call_of_N[node]}:{offset}" for number, node, offset in places
    ]


def _gradient_differences(tree: _Seen, rows: _Seen) -> list[Difference]:
    """Each parameter where it differs most, relative to its largest gradient."""
    out = []
    for name, whole in rows.gradients.items():
        gap, largest = (tree.gradients[name] - whole).abs().reshape(-1), float(whole.abs().max())
        at = int(gap.argmax())
        pair: tuple[Any, Any] = (tree.gradients[name].reshape(-1)[at], whole.reshape(-1)[at])
        relative = float(gap[at]) / largest if largest else float(gap[at])
        out.append(Difference(name=name, tree=float(pair[0]), rows=float(pair[1]), relative=relative))
    return out


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
