"""Checkpoints: weights, optimiser, anchor and the trainer's state, all or nothing.

A checkpoint is a folder `step-N` that transformers and SGLang load as a model, with `state.json` and a folder `trainer`
that holds the optimiser (and the anchor inside a burst) under Hugging Face names and whole, so that it resumes at any
tensor-parallel size. They lie apart because engines load every safetensors file beside the weights. It is written
under another name, synced, and renamed: a folder with the final name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre_data.errors import CorruptError

from .model import TreeGPTModel
from .optimizer import Optimizer
from .parallel import is_first_rank
from .weights import TensorSource, export_tensors, import_tensors, load_hf, save_hf, write_tensors

__all__ = ["latest_checkpoint", "load_checkpoint", "read_state", "save_checkpoint"]

_NAME = re.compile(r"step-(\d{8})")
_RNG = "torch_rng"
_TRAINER = "trainer"


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint of a folder, if any."""
    found = sorted(path for path in root.glob("step-*") if _NAME.fullmatch(path.name)) if root.is_dir() else []
    return found[-1] if found else None


def read_state(folder: Path) -> dict[str, Any]:
    """Return the trainer's state of a checkpoint."""
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptError(
            f"checkpoint {folder}: wanted its state.json, got {error}; delete the folder to resume from the one before"
        ) from error
    return state


def save_checkpoint(
    root: Path,
    *,
    step: int,
    model: TreeGPTModel,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    source: Path,
    anchor: Mapping[str, torch.Tensor] | None = None,
    keep: int = 2,
) -> Path:
    """Write `root/step-N` from all ranks and return it once it is durable; older ones beyond `keep` are deleted.

    `source` is the folder that config and tokenizer files are copied from; `state` must be JSON.
    """
    final = root / f"step-{step:08d}"
    partial = root / f".step-{step:08d}.partial"
    first = is_first_rank()
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / _TRAINER).mkdir(parents=True)
    save_hf(model, partial, source)
    write_tensors(_optimizer_tensors(model, optimizer), partial / _TRAINER, "optimizer", enabled=first)
    if anchor is not None:
        write_tensors(export_tensors(model, anchor), partial / _TRAINER, "anchor", enabled=first)
    if first:
        (partial / "state.json").write_text(json.dumps(dict(state), indent=1, sort_keys=True), encoding="utf-8")
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(root)
        complete = sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))
        for old in complete[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def _optimizer_tensors(model: TreeGPTModel, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for part, tensors in optimizer.tensors().items():
        for name, whole in export_tensors(model, tensors):
            yield f"{part}/{name}", whole
    yield _RNG, torch.get_rng_state()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_checkpoint(folder: Path, model: TreeGPTModel, optimizer: Optimizer) -> dict[str, torch.Tensor] | None:
    """Restore weights, optimiser and random state; return the anchor weights when a burst was open."""
    state = read_state(folder)
    load_hf(model, folder)
    source = TensorSource(folder / _TRAINER, "optimizer*.safetensors")
    restored = {part: _read_part(model, source, part, like) for part, like in optimizer.tensors().items()}
    optimizer.load(restored, int(state["step"]))
    torch.set_rng_state(source(_RNG))
    if not any((folder / _TRAINER).glob("anchor*.safetensors")):
        return None
    anchor = {name: torch.empty_like(p, device="cpu") for name, p in model.named_parameters()}
    import_tensors(model, TensorSource(folder / _TRAINER, "anchor*.safetensors"), anchor)
    return anchor


def _read_part(
    model: TreeGPTModel, source: TensorSource, part: str, like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    into = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    import_tensors(model, lambda name: source(f"{part}/{name}"), into)
    return into
