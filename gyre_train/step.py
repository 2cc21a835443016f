"""One optimiser step on packs: forward, loss, backward, 1/E, clip, AdamW. The same code in every rank.

    L = 1/E sum_e 1/N_e sum_{t owned by e} w_t l_t            (gyre_train.loss has w_t and l_t)

Packs are micro-steps: their gradients add up un-normalised and 1/E is applied when the step closes, so how a step was
cut into packs, and which rank computed which, changes nothing. logp_old comes from the anchor: the recorded values
(behaviour), this very forward (step, and the first step of a burst), or a forward under a host copy of the burst's
first weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig

from gyre_data.errors import DataError

from .config import TrainingConfig
from .edges import Anchor, Edges, Ratio, edges_of
from .figures import Figures, Mean, Sum, plain, total, values
from .loss import SequenceRatios, SequenceSums, policy_loss, sequence_ratios, sequence_sums, sft_loss, step_scale
from .megatron.checkpoint import load_checkpoint, save_checkpoint
from .megatron.gradients import finish_gradients
from .megatron.model import build_model
from .megatron.parallel import counts_figures, from_all_ranks, from_data_parallel
from .megatron.schedule import dealt, forward_packs, train_packs
from .megatron.stock import training_parts
from .megatron.weights import TensorSource, import_tensors, load_hf
from .mismatch import mismatch
from .pack import Pack

__all__ = ["Learner", "StepWork"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What one optimiser step computes on; rank 0 makes it and every rank gets the same."""

    step: int
    packs: tuple[Pack, ...]
    num_executions: int
    lr: float


class Learner:
    """The weights in training with their optimiser and anchor, in one rank."""

    def __init__(self, config: TrainingConfig, anchor: Anchor | None, checkpoint: Path | None) -> None:
        """Load the model, from the checkpoint when there is one. `anchor` None is SFT."""
        self._config, self._anchor = config, anchor
        dtype = getattr(torch, config.model.dtype)
        self.model = build_model(
            AutoConfig.from_pretrained(checkpoint or config.model.path), dtype=dtype, device=config.model.device,
            recompute=config.parallel.recompute == "full",
        )  # fmt: skip
        self.dtype = torch.promote_types(dtype, torch.float32)
        self._burst: Mapping[str, torch.Tensor] | None = None
        self._reference: Mapping[str, torch.Tensor] | None = None
        if config.loss.kl:
            self._reference = {name: torch.empty_like(p, device="cpu") for name, p in self.model.named_parameters()}
            source = TensorSource(Path(config.loss.reference or config.model.path))
            import_tensors(self.model, source, self._reference)
        if checkpoint is None:
            load_hf(self.model, config.model.path)
        self.wrapped, self.optimizer = training_parts(self.model, config.train, config.model)
        if checkpoint is not None:
            self._burst = load_checkpoint(checkpoint, self.model, self.optimizer)

    def step(self, work: StepWork) -> dict[str, float]:
        """Apply one optimiser step and return its figures."""
        started = time.monotonic()
        self.wrapped.zero_grad_buffer()
        own = dealt(work.packs)
        packs = [work.packs[i] for i in own]
        edges = self._edges(packs)
        ratios = self._spread_ratios(own, packs, edges)
        figures: Figures = {"loss": Sum(amount=0.0), "extra_forwards": Sum(amount=sum(r is not None for r in ratios))}

        def loss_of(index: int, logp_E: torch.Tensor, entropy_E: torch.Tensor) -> torch.Tensor:
            nonlocal figures
            if self._anchor is None:
                out = sft_loss(edges[index], logp_E)
            else:
                out = policy_loss(edges[index], logp_E, ratios[index], settings=self._config.loss)
            seen: Figures = {
                "loss": Sum(amount=out.loss.detach()),
                "entropy": Mean(amount=entropy_E.sum(), count=len(entropy_E)),
            }
            gaps = mismatch(edges[index], logp_E.detach(), version=work.step - 1)
            figures = total(figures, seen, out.figures, gaps)
            return out.loss

        train_packs(self.wrapped, packs, loss_of, backend=self._config.pack.attention)
        finish_gradients(self.wrapped, step_scale(work.num_executions))
        norm = self.optimizer.clip(self._config.train.clip_grad)
        found = values(total(*from_all_ranks(plain(figures) if counts_figures() else {})))
        loss = found.pop("loss")
        if not math.isfinite(norm) or not math.isfinite(loss):
            raise DataError(
                f"step {work.step}: wanted a finite loss and gradient, got loss {loss} and gradient norm {norm}; the "
                "weights were not touched, resume with a smaller train.lr or look at the model and data of this step"
            )
        self.optimizer.step(work.lr)
        if self._burst is not None and work.step % self._config.train.steps_per_burst == 0:
            self._burst = None
        return {
            "loss": loss * step_scale(work.num_executions),
            "grad_norm": norm,
            "lr": work.lr,
            **found,
            "seconds": time.monotonic() - started,
        }

    def save(self, root: Path, step: int, state: Mapping[str, object]) -> Path:
        """Write a checkpoint from all ranks and return its folder."""
        return save_checkpoint(
            root, step=step, model=self.model, optimizer=self.optimizer, state=state,
            source=Path(self._config.model.path), anchor=self._burst, keep=self._config.output.keep,
        )  # fmt: skip

    def _logprobs(self, packs: Sequence[Pack]) -> list[torch.Tensor]:
        """Log-probs of every pack's edges under the present weights, without gradient."""
        return [logp_E for logp_E, _ in forward_packs(self.wrapped, packs, backend=self._config.pack.attention)]

    def _edges(self, packs: Sequence[Pack]) -> list[Edges]:
        """The edges of these packs, with log-probs under the anchor's and the reference's weights."""
        anchor, device = self._anchor or Anchor.STEP, self._config.model.device
        ratio = Ratio.SEQUENCE if self._anchor is None else Ratio(self._config.loss.kind)
        edges = [edges_of(p, anchor=anchor, ratio=ratio, device=device, dtype=self.dtype) for p in packs]
        if self._reference is not None:
            logps = self._under(self._reference, packs)
            edges = [replace(e, logp_reference_E=logp_E) for e, logp_E in zip(edges, logps, strict=True)]
        if anchor is not Anchor.BURST or self._config.train.steps_per_burst == 1:
            return edges
        if self._burst is None:  # the burst opens: this forward is under the anchor's own weights
            self._burst = {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}
            return edges
        logps = self._under(self._burst, packs)
        return [replace(e, logp_old_E=logp_E) for e, logp_E in zip(edges, logps, strict=True)]

    def _under(self, weights: Mapping[str, torch.Tensor], packs: Sequence[Pack]) -> list[torch.Tensor]:
        """Log-probs of every pack's edges under other weights, without gradient."""
        with self._weights(weights):
            return self._logprobs(packs)

    @contextmanager
    def _weights(self, other: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Hold other weights in the model; the present ones come back bit for bit."""
        present = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._copy(other)
        try:
            yield
        finally:
            self._copy(present)

    def _copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def _spread_ratios(
        self, own: Sequence[int], packs: Sequence[Pack], edges: Sequence[Edges]
    ) -> list[SequenceRatios | None]:
        """Ratios of packs that hold a part of a sequence: a no-grad forward over these packs comes first.

        The other parts may be another rank's, so the sums of all are put together, in the order of the step's packs.
        """
        out: list[SequenceRatios | None] = [None] * len(packs)
        if self._anchor is None or self._config.loss.kind == Ratio.TOKEN:
            return out
        spread = [i for i, e in enumerate(edges) if _holds_a_part(e)]
        sums: dict[int, SequenceSums] = {}
        for i in spread:
            if edges[i].logp_old_E is None:  # the anchor is the forward itself: every log-ratio is zero
                logp_E = torch.zeros_like(edges[i].weight_E)
            else:
                (logp_E,) = self._logprobs([packs[i]])
            sums[own[i]] = _on(sequence_sums(edges[i], logp_E), "cpu")
        everywhere: dict[int, SequenceSums] = {}
        for part in from_data_parallel(sums):
            everywhere |= part
        if spread:
            device = self._config.model.device
            ratios = sequence_ratios([_on(everywhere[index], device) for index in sorted(everywhere)])
            for i in spread:
                out[i] = ratios
        return out


def _on(sums: SequenceSums, device: str) -> SequenceSums:
    return SequenceSums(
        sequence_J=sums.sequence_J.to(device),
        sum_J=sums.sum_J.to(device),
        count_J=sums.count_J.to(device),
        total_J=sums.total_J.to(device),
    )


def _holds_a_part(edges: Edges) -> bool:
    """True when some sequence has more owned tokens than these edges hold."""
    _, index_E, count_J = edges.sequence_E.unique(return_inverse=True, return_counts=True)
    return bool((count_J[index_E] < edges.sequence_tokens_E).any())
