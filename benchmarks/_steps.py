"""A training step of a real Megatron model, its trees packed or one row per trajectory, and what a step takes.

Both sides are one model object: the same weights, positions, loss edges and loss. Rows attend by the library's own
causal attention, at full speed and without a mask (SDPA on a CPU, flash-attn's varlen kernel on a GPU); trees by
Gyre's. A step is planned, run forward and backward, and its gradients are finished; the optimiser is left out.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config

from gyre_data.model_shapes import ModelShape, shape_from_config
from gyre_train.edges import edges_of
from gyre_train.loss import policy_loss
from gyre_train.megatron.gradients import SimpleDataParallel, finish_gradients, gradient_of
from gyre_train.megatron.model import build_model
from gyre_train.megatron.parallel import groups
from gyre_train.megatron.schedule import train_packs
from gyre_train.memory import keep_memory
from gyre_train.plan import Plan, Sharing, plan
from gyre_train.tree_input import TreeInput

__all__ = ["HEAD_DIM", "Bench", "Width", "clock", "in_own_process", "opened", "peak_mib", "seconds", "whole_budget"]

HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """Qwen3 with the proportions of its 8B model: feed-forward of three times the width, half as many KV heads here.

    The vocabulary gives the output layer the share of the work that it has there (a twelfth).
    """

    hidden: int
    layers: int

    @property
    def heads(self) -> int:
        """Query heads; key-value heads are half as many."""
        return self.hidden // HEAD_DIM

    @property
    def vocab(self) -> int:
        """Ids."""
        return self.hidden * self.layers

    def config(self) -> Qwen3Config:
        """As Hugging Face spells it."""
        return Qwen3Config(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.heads // 2,
            head_dim=HEAD_DIM, max_position_embeddings=1 << 20, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )  # fmt: skip


class _RowAttention(nn.Module):
    """What a trainer of independent rows calls: each row alone, causal, no mask."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        """[T, 1, heads, dim] in, [T, 1, heads * dim] out; the table's segments are the rows."""
        rows = packed_seq_params.segments
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        if q.is_cuda:
            from flash_attn import flash_attn_varlen_func

            bounds = torch.tensor([0, *map(int, rows.end_S)], dtype=torch.int32, device=q.device)
            longest = int((rows.end_S - rows.start_S).max())
            out = flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True)
            return out.reshape(len(q), 1, -1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        parts = [
            F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, enable_gqa=True)
            for a, b in zip(map(int, rows.start_S), map(int, rows.end_S), strict=True)
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return whole[0].transpose(0, 1).reshape(whole.shape[2], 1, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The model of one process."""

    width: Width
    device: str
    shape: ModelShape
    model: nn.Module
    wrapped: nn.Module
    own_attention: list[nn.Module]
    row_attention: _RowAttention = field(default_factory=_RowAttention)

    def step(self, trees: Sequence[TreeInput], side: Sharing, budget: int) -> tuple[float, Plan]:
        """One step's loss, and its plan; gradients stay in the model."""
        for layer, own in zip(self.model.decoder.layers, self.own_attention, strict=True):
            layer.self_attention.core_attention = own if side is Sharing.TREE else self.row_attention
        self.wrapped.zero_grad_buffer()
        made = plan(trees, tokens=budget, sharing=side)
        edges = [edges_of(pack, device=self.device) for pack in made.packs]
        losses: list[Tensor] = []

        def loss_of(index: int, logp_E: Tensor, _: Tensor) -> Tensor:
            out = policy_loss(edges[index], logp_E).loss
            losses.append(out.detach())
            return out

        train_packs(self.wrapped, made.packs, loss_of)
        finish_gradients(self.wrapped, 1 / made.num_executions)
        return float(torch.stack(losses).sum()) / made.num_executions, made

    def gradients(self) -> list[Tensor]:
        """Copies, in the order of the parameters."""
        return [g.clone() for p in self.model.parameters() if (g := gradient_of(p)) is not None]


@contextmanager
def opened(width: Width, device: str) -> Iterator[Bench]:
    """A model with random weights, the same ones each time; one thread on a CPU, whose time is then a core's."""
    if device == "cpu":
        torch.set_num_threads(1)
        keep_memory()
    with groups(device=device):
        torch.manual_seed(0)
        hf = width.config()
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = build_model(hf, dtype=dtype, device=device, initialize=True)
        own = [layer.self_attention.core_attention for layer in model.decoder.layers]
        yield Bench(
            width=width, device=device, shape=shape_from_config(hf.to_dict()), model=model,
            wrapped=SimpleDataParallel(model.config, model), own_attention=own,
        )  # fmt: skip


def whole_budget(trees: Sequence[TreeInput]) -> int:
    """Rows of these trees in one pack."""
    return sum(int(tree.num_tokens_N.sum()) for tree in trees)


def clock(device: str) -> float:
    """CPU seconds of this process; on a GPU, time by the clock once the device has done everything."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work: Callable[[], object], device: str) -> float:
    """What one run of `work` takes."""
    started = clock(device)
    work()
    return clock(device) - started


def in_own_process(work: Callable[..., float], *arguments: Any) -> float:
    """The result of `work` in a process forked from this one, which must not have touched a GPU or opened a model."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, work, arguments))
    process.start()
    there.close()
    try:
        return float(here.recv())
    except EOFError:
        raise RuntimeError(f"{work.__name__}{arguments} ended without a result; its error is above") from None
    finally:
        process.join()


def _send(pipe: Any, work: Callable[..., float], arguments: tuple[Any, ...]) -> None:
    pipe.send(work(*arguments))


def peak_mib(work: Callable[[], object], device: str) -> float:
    """MiB that `work` needed at its peak beyond what was there before, in a process that has not run it yet."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return float(torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status_kib("VmRSS")
    work()
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(name)))
