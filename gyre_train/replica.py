"""One copy of the model in training: packs in, gradients and figures added up; who applies them is not its business.

    L = 1/E sum_e 1/N_e sum_{t owned by e} w_t l_t            (gyre_train.loss has w_t and l_t)

Packs are micro-steps: their gradients add up un-normalised and 1/E is applied when the step closes, so how a step was
cut into packs, and which replica computed which, changes nothing. logp_old comes from the anchor: the recorded values
(behaviour), this very forward (step, and the first step of a burst), or a forward under a host copy of the burst's
first weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig

from .config import TrainingConfig
from .edges import Anchor, Edges, Ratio, edges_of
from .figures import Figures, Mean, Sum, plain, total
from .loss import SequenceRatios, SequenceSums, policy_loss, sequence_ratios, sequence_sums, sft_loss
from .megatron.model import build_model
from .megatron.parallel import from_data_parallel
from .megatron.schedule import dealt, forward_packs, train_packs
from .megatron.stock import gradient_wrapper
from .megatron.weights import TensorSource, import_tensors
from .mismatch import mismatch
from .pack import Pack

__all__ = ["Replica"]


class Replica:
    """The model with its gradients, anchor and reference, in one rank. Whoever makes it puts weights into it."""

    def __init__(self, config: TrainingConfig, anchor: Anchor | None, folder: Path) -> None:
        """Build the model that `folder` describes, without its weights. `anchor` None is SFT."""
        self._config, self._anchor = config, anchor
        dtype = getattr(torch, config.model.dtype)
        self.model = build_model(
            AutoConfig.from_pretrained(folder), dtype=dtype, device=config.model.device,
            recompute=config.parallel.recompute == "full",
        )  # fmt: skip
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.burst: Mapping[str, torch.Tensor] | None = None
        """Host copy of the weights at the start of the open burst, where the anchor is these."""
        self._under_burst = False
        self._reference: Mapping[str, torch.Tensor] | None = None
        if config.loss.kl:
            self._reference = {name: torch.empty_like(p, device="cpu") for name, p in self.model.named_parameters()}
            source = TensorSource(Path(config.loss.reference or config.model.path))
            import_tensors(self.model, source, self._reference)
        self.wrapped = gradient_wrapper(self.model, config.model)

    def begin(self) -> None:
        """Start a step: no gradients, and where the anchor is the burst's first weights and none is open, it opens."""
        self.wrapped.zero_grad_buffer()
        self._under_burst = self.burst is not None
        if self._anchor is Anchor.BURST and self._config.train.steps_per_burst > 1 and self.burst is None:
            self.burst = self.weights()

    @property
    def anchor_weights(self) -> Mapping[str, torch.Tensor] | None:
        """The burst's first weights, in its later steps."""
        return self.burst if self._under_burst else None

    def weights(self) -> dict[str, torch.Tensor]:
        """A host copy of this rank's weights, by parameter."""
        return {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over what `weights` of a replica of the same layout gave."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def accumulate(self, packs: Sequence[Pack], *, step: int) -> Figures:
        """Add the gradients of packs that hold their sequences whole between them; returns this rank's figures.

        Every rank of the replica gets the same packs; the data-parallel copies share them out.
        """
        own = dealt(packs)
        mine = [packs[i] for i in own]
        edges = self._edges(mine)
        ratios = self._spread_ratios(own, mine, edges)
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
            gaps = mismatch(edges[index], logp_E.detach(), version=step - 1)
            figures = total(figures, seen, out.figures, gaps)
            return out.loss

        train_packs(self.wrapped, mine, loss_of, backend=self._config.pack.attention)
        return plain(figures)

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
        if self.burst is None or not self._under_burst:  # in the burst's first step this forward is the anchor's own
            return edges
        logps = self._under(self.burst, packs)
        return [replace(e, logp_old_E=logp_E) for e, logp_E in zip(edges, logps, strict=True)]

    def _under(self, weights: Mapping[str, torch.Tensor], packs: Sequence[Pack]) -> list[torch.Tensor]:
        """Log-probs of every pack's edges under other weights, without gradient."""
        with self._weights(weights):
            return self._logprobs(packs)

    @contextmanager
    def _weights(self, other: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Hold other weights in the model; the present ones come back bit for bit."""
        present = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.set_weights(other)
        try:
            yield
        finally:
            self.set_weights(present)

    def _spread_ratios(
        self, own: Sequence[int], packs: Sequence[Pack], edges: Sequence[Edges]
    ) -> list[SequenceRatios | None]:
        """Ratios of packs that hold a part of a sequence: a no-grad forward over these packs comes first.

        The other parts may be another rank's, so the sums of all are put together, in the order of the step's packs.
        """
        out: list[SequenceRatios | None] = [None] * len(packs)
        if self._anchor is None or self._config.loss.kind == "token":
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
