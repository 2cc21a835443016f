"""What a training run would do, without torch: `gyre train --dry-run`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gyre_data.forecast import activation_bytes
from gyre_data.model_shapes import ModelShape, shape_of

from .config import TrainingConfig, to_toml
from .pack import Pack
from .plan import flops
from .source import load_source, plan_examples

__all__ = ["Forecast", "Memory", "device_bytes", "forecast"]

_STATE_BYTES = {"bfloat16": (6, 12), "float32": (8, 8), "float64": (16, 16)}
"""Per parameter: weights and gradients; and two moments, below float32 also master weights. On GPUs the second number
is shared among the data- and context-parallel ranks (Megatron's distributed optimiser)."""
_WIDTH = {"bfloat16": 1, "float32": 2, "float64": 4}
"""Activations relative to the 16 bit of `gyre_data.forecast`, whose formula this is."""
_ROUND = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What the fullest device would hold, by formula."""

    state_bytes: int
    """Weights, gradients, optimiser, and copies of the weights for a burst's anchor or a KL reference."""
    pack_tokens: int
    """Tokens of the largest pack."""
    activation_bytes: int
    """This device's part of that pack's activations and logits, for each pack that its pipeline stage has in flight;
    with `parallel.recompute = full` layers' inputs and one layer."""
    device_bytes: int | None
    """Memory of the device; None when it cannot be asked."""
    fitting_tokens: int | None
    """The largest `pack.tokens` that would fit; 0 when the state alone does not, None when the device is unknown."""

    @property
    def total_bytes(self) -> int:
        """State and the largest pack."""
        return self.state_bytes + self.activation_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the device holds it; None when it cannot be asked."""
        return None if self.device_bytes is None else self.total_bytes <= self.device_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Totals over the steps that would run on the data as it is now, from the start of training."""

    config: str
    """Resolved settings as TOML."""
    steps: int
    executions: int
    excluded: Mapping[str, Mapping[str, int]]
    """Counts by reason, for executions, calls and trajectories."""
    packs: int
    packed_tokens: int
    unpacked_tokens: int
    edges: int
    """Trained tokens."""
    flops: int
    """Forward and backward, by formula; what is recomputed is not counted."""
    parameters: int
    """Of the whole model."""
    active_parameters: int
    """Those that a token passes: fewer only for a mixture of experts."""
    memory: Memory


def forecast(config: TrainingConfig) -> Forecast:
    """Admit, choose and lay out every step as training would, and add up what it costs."""
    source = load_source(config, pack_tokens=config.pack.tokens)
    shape = shape_of(config.model.path)
    trained: Counter[str] = Counter()
    total: Counter[str] = Counter()  # sums only: the packs of all steps would hold every token there is
    largest = (0, 0)
    while not config.train.steps or total["steps"] < config.train.steps:
        due = source.due(trained, config.train.executions_per_step)
        if not due:
            break
        trained.update(example.execution_id for example in due)
        made = plan_examples(due, config)
        total += Counter(
            steps=1, executions=made.num_executions, packs=len(made.packs), packed_tokens=made.num_packed_tokens,
            unpacked_tokens=made.num_unpacked_tokens, edges=made.num_edges, flops=flops(made, shape),
        )  # fmt: skip
        held = ((_held(shape, config, p, len(made.packs)), p.num_tokens) for p in made.packs)
        largest = max([largest, *held])
    return Forecast(
        config=to_toml(config),
        steps=total["steps"],
        executions=total["executions"],
        excluded=source.excluded,
        packs=total["packs"],
        packed_tokens=total["packed_tokens"],
        unpacked_tokens=total["unpacked_tokens"],
        edges=total["edges"],
        flops=total["flops"],
        parameters=shape.num_parameters(),
        active_parameters=shape.num_parameters(active=True),
        memory=_memory(config, shape, *largest),
    )


def _held(shape: ModelShape, config: TrainingConfig, pack: Pack, num_packs: int) -> int:
    """Bytes of the fullest rank: heads, MLP columns and vocabulary over tp, layers over pp, rows over cp.

    What every tensor-parallel rank holds alike (norms, residuals) is divided only under sequence parallelism, on GPUs;
    keys and values are gathered whole from the cp ranks; the first of pp stages has up to pp packs in flight.
    """
    tp, pp, cp = config.parallel.tp, config.parallel.pp, config.parallel.cp
    own = replace(
        shape,
        num_layers=-(-shape.num_layers // pp),
        hidden=shape.hidden // (tp if config.model.on_gpu else 1),
        num_heads=-(-shape.num_heads // tp),
        num_kv_heads=-(-shape.num_kv_heads // tp),
        ffn=-(-shape.ffn // tp),
        expert_ffn=-(-shape.expert_ffn // tp),
        shared_ffn=-(-shape.shared_ffn // tp),
        vocab=-(-shape.vocab // tp),
    )
    tokens, recompute = -(-pack.num_tokens // cp), config.parallel.recompute == "full"
    layers = activation_bytes(own, tokens, recompute=recompute)
    alive = 1 if recompute else own.num_layers
    layers += (pack.num_tokens - tokens) * alive * 2 * own.num_kv_heads * 2 * shape.head_dim
    logits = activation_bytes(own, 0, recompute=False, logit_rows=-(-len(pack.logit_row_U) // cp))
    first, last = layers * min(pp, num_packs), layers + logits
    return _WIDTH[config.model.dtype] * max(first, last)


def _memory(config: TrainingConfig, shape: ModelShape, held: int, tokens: int) -> Memory:
    copies = (2 if config.train.steps_per_burst > 1 else 0) + bool(config.loss.kl)
    kept, shared = _STATE_BYTES[config.model.dtype]
    sharers = config.parallel.dp * config.parallel.cp if config.model.on_gpu else 1
    per_parameter = kept + shared / sharers + copies * 2 * _WIDTH[config.model.dtype]
    state = int(per_parameter * shape.num_parameters()) // (config.parallel.tp * config.parallel.pp)
    device = device_bytes(config.model.device, ranks=config.parallel.ranks)
    fitting = None
    if device is not None:
        room = max(0, device - state)
        # Activations are proportional to the tokens of a pack of this kind, save for a cap on the logits.
        fitting = int(room / held * tokens) // _ROUND * _ROUND if held else 0
    return Memory(
        state_bytes=state, pack_tokens=tokens, activation_bytes=held, device_bytes=device, fitting_tokens=fitting
    )


def device_bytes(device: str, *, ranks: int = 1) -> int | None:
    """Memory of one device: of a GPU as nvidia-smi tells it, of the CPU its share of the machine's; None if untold."""
    if not device.startswith("cuda"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    if shutil.which("nvidia-smi") is None:
        return None
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=False, timeout=30,
    ).stdout.split()  # fmt: skip
    return min((int(mib) << 20 for mib in told if mib.isdecimal()), default=None)
