"""What a training run would do, without torch: `gyre train --dry-run`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gyre_data.forecast import activation_bytes
from gyre_data.model_shapes import ModelShape, shape_of

from .config import TrainingConfig, to_toml
from .pack import Pack
from .plan import flops
from .source import load_source, plan_examples

__all__ = ["Forecast", "Memory", "device_bytes", "forecast"]

_STATE_BYTES = {"bfloat16": 18, "float32": 16, "float64": 32}
"""Per parameter: weights, gradients, two moments; below float32 also float32 gradients and master weights."""
_WIDTH = {"bfloat16": 1, "float32": 2, "float64": 4}
"""Activations relative to the 16 bit of `gyre_data.forecast`, whose formula this is."""
_ROUND = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What one device would hold, by formula; activations as if no parallel rank took a part of them."""

    state_bytes: int
    """Weights, gradients, optimiser, and copies of the weights for a burst's anchor or a KL reference."""
    pack_tokens: int
    """Tokens of the largest pack."""
    activation_bytes: int
    """Activations and logits of that pack; with `parallel.recompute = full` layers' inputs and one layer."""
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
        largest = max([largest, *((_held(shape, config, p), p.num_tokens) for p in made.packs)])
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


def _held(shape: ModelShape, config: TrainingConfig, pack: Pack) -> int:
    rows = len(pack.logit_row_U)
    recompute = config.parallel.recompute == "full"
    return _WIDTH[config.model.dtype] * activation_bytes(shape, pack.num_tokens, recompute=recompute, logit_rows=rows)


def _memory(config: TrainingConfig, shape: ModelShape, held: int, tokens: int) -> Memory:
    copies = (2 if config.train.steps_per_burst > 1 else 0) + bool(config.loss.kl)
    per_parameter = _STATE_BYTES[config.model.dtype] + copies * 2 * _WIDTH[config.model.dtype]
    state = per_parameter * shape.num_parameters() // (config.parallel.tp * config.parallel.pp)
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
