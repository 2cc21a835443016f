"""Checkpoints: weights, optimiser, anchor and the trainer's state, all or nothing.

A checkpoint is a folder `step-N` that transformers and SGLang load as a model, with `state.json` and a folder `trainer`
that holds the optimiser (and the anchor inside a burst) under Hugging Face names and whole, so that it resumes in any
layout of ranks. They lie apart because engines load every safetensors file beside the weights. It is written
under another name, synced, and renamed: a folder with the final name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre_data.errors import CorruptError

from .model import TreeGPTModel
from .optimizer import MASTER, Optimizer
from .parallel import is_first_rank
from .weights import TensorSource, export_tensors, import_tensors, save_hf, write_tensors

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
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise CorruptError(
            f"checkpoint {folder}: wanted its step's number in state.json, got {state!r:.60}; delete the folder "
            "to resume from the one before"
        )
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
    unfinished = root / f".step-{step:08d}.partial"
    first = is_first_rank()
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / _TRAINER).mkdir(parents=True)
    save_hf(model, unfinished, source)
    write_tensors(_optimizer_tensors(model, optimizer), unfinished / _TRAINER, "optimizer", enabled=first)
    if anchor is not None:
        write_tensors(export_tensors(model, anchor), unfinished / _TRAINER, "anchor", enabled=first)
    if first:
        (unfinished / "state.json").write_text(json.dumps(dict(state), indent=1, sort_keys=True), encoding="utf-8")
        for path in (*unfinished.rglob("*"), unfinished):
            _sync(path)
        _remove(final)
        unfinished.rename(final)
        _sync(root)
        complete = sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))
        for old in complete[:-keep]:
            _remove(old)
        for left in root.glob(".step-*.removed"):  # by a trainer that was killed while it removed it
            shutil.rmtree(left)
    dist.barrier()
    return final


def _remove(folder: Path) -> None:
    """Delete a checkpoint; it loses its name first, since a folder with a checkpoint's name must be complete."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


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
    source = TensorSource(folder / _TRAINER, "optimizer*.safetensors")
    exact = _exact_weights(folder, source)
    import_tensors(model, exact)
    restored = {
        part: _read_part(model, exact if part == MASTER else partial(_named, source, part), like)
        for part, like in optimizer.tensors().items()
    }
    optimizer.load(restored, int(state["step"]))
    torch.set_rng_state(source(_RNG))
    if not any((folder / _TRAINER).glob("anchor*.safetensors")):
        return None
    anchor = {name: torch.empty_like(p, device="cpu") for name, p in model.named_parameters()}
    import_tensors(model, TensorSource(folder / _TRAINER, "anchor*.safetensors"), anchor)
    return anchor


def _exact_weights(folder: Path, source: TensorSource) -> Callable[[str], torch.Tensor]:
    """The float32 copies where the checkpoint was trained below float32, else its weights; for a model of any dtype."""
    weights = TensorSource(folder)
    return lambda name: source(f"{MASTER}/{name}") if f"{MASTER}/{name}" in source else weights(name)


def _named(source: TensorSource, part: str, name: str) -> torch.Tensor:
    return source(f"{part}/{name}")


def _read_part(
    model: TreeGPTModel, read: Callable[[str], torch.Tensor], like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    into = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    import_tensors(model, read, into)
    return into
