"""A step's packs over ranks: which copy of the model takes which, and in what order its stages work (1F1B).

Packs have different lengths, so every message has its pack's own shape, which both ends know. Sends never block: a
stage only ever waits for what it needs next, so the order below cannot deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from gyre_train.pack import Pack

from .context import own_rows, padded
from .model import stage_forward
from .parallel import tp_size

__all__ = ["dealt", "forward_packs", "train_packs"]


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


class _Links:
    """The neighbours of this pipeline stage."""

    def __init__(self, model: nn.Module) -> None:
        self.stages = int(parallel_state.get_pipeline_model_parallel_world_size())
        self.stage = int(parallel_state.get_pipeline_model_parallel_rank())
        self.first, self.last = self.stage == 0, self.stage == self.stages - 1
        parameter = next(model.parameters())
        self._dtype, self._device = parameter.dtype, parameter.device
        config: Any = getattr(model, "module", model).config
        self._width, self._sequence_parallel = config.hidden_size, config.sequence_parallel
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def receive_hidden(self, pack: Pack) -> torch.Tensor | None:
        """The stage before's output for this pack; None in the first stage."""
        if self.first:
            return None
        rows = padded(len(own_rows(pack.num_tokens)), sequence_parallel=self._sequence_parallel)
        rows //= tp_size() if self._sequence_parallel else 1
        hidden = torch.empty(rows, 1, self._width, dtype=self._dtype, device=self._device)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank(), self._group())
        return hidden

    def receive_gradient(self, output: torch.Tensor) -> torch.Tensor | None:
        """The gradient of an output that went on to the next stage; None in the last stage, which has a loss."""
        if self.last:
            return None
        gradient = torch.empty_like(output)
        dist.recv(gradient, parallel_state.get_pipeline_model_parallel_next_rank(), self._group())
        return gradient

    def send_hidden(self, output: torch.Tensor) -> None:
        """Pass an output on; nothing in the last stage."""
        if not self.last:
            self._send(output.detach(), parallel_state.get_pipeline_model_parallel_next_rank())

    def send_gradient(self, hidden: torch.Tensor | None) -> None:
        """Pass the gradient of a received input back; nothing in the first stage."""
        if hidden is not None and hidden.grad is not None:
            self._send(hidden.grad, parallel_state.get_pipeline_model_parallel_prev_rank())

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        work = dist.isend(tensor.contiguous(), to, self._group())
        assert work is not None
        self._sent.append((work, tensor))
        # No neighbour is that many messages behind, so this wait ends at once; it lets go of what was sent.
        if len(self._sent) > 4 * self.stages:
            self._sent.popleft()[0].wait()

    @staticmethod
    def _group() -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()


def train_packs(
    model: nn.Module,
    packs: Sequence[Pack],
    loss_of: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    backend: str = "segments",
) -> None:
    """Forward and backward of every pack: one forward, one backward as soon as the stage has its share in flight.

    `loss_of(index, logp_E, entropy_E)` is called in the last stage only; gradients add up un-normalised.
    """
    links = _Links(model)
    in_flight: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()

    def forward(index: int) -> None:
        hidden = links.receive_hidden(packs[index])
        if hidden is not None:
            hidden.requires_grad_()
        output = stage_forward(model, packs[index], hidden, backend=backend)
        if links.last:
            output = loss_of(index, output[0], output[1].detach())
        in_flight.append((hidden, output))
        links.send_hidden(output)

    def backward() -> None:
        hidden, output = in_flight.popleft()
        torch.autograd.backward(output, links.receive_gradient(output))
        links.send_gradient(hidden)

    warm_up = min(links.stages - 1 - links.stage, len(packs))
    for index in range(len(packs)):
        forward(index)
        if index >= warm_up:
            backward()
    while in_flight:
        backward()
    links.finish()


@torch.no_grad()
def forward_packs(
    model: nn.Module, packs: Sequence[Pack], *, backend: str = "segments"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs and entropies of every pack's edges, without gradient; the same in all stages."""
    links = _Links(model)
    outputs = []
    for pack in packs:
        output = stage_forward(model, pack, links.receive_hidden(pack), backend=backend)
        links.send_hidden(output)
        outputs.append(output)
    links.finish()
    if links.stages > 1:
        parameter = next(model.parameters())
        wide = torch.promote_types(parameter.dtype, torch.float32)
        for index, pack in enumerate(packs):
            if not links.last:
                outputs[index] = torch.empty(2, pack.num_edges, dtype=wide, device=parameter.device)
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(outputs[index], source, group=parallel_state.get_pipeline_model_parallel_group())
    return [(logp_E, entropy_E) for logp_E, entropy_E in outputs]
