"""Checkpoints: weights, optimiser, anchor and the trainer's state, all or nothing.

A checkpoint is a folder `step-N` that transformers and SGLang load as a model, with `state.json` and a folder `trainer`
from which training resumes: Megatron's distributed checkpoint (`torch_dist`) of the optimiser with the exact weights,
and of the anchor inside a burst. Every rank writes its own parts of it and reads those of its own layout, whatever the
layout was. The folder is written under another name, synced, and renamed: one with the final name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist

from gyre_data.errors import CorruptError
from gyre_train.folder import read_state, saved_checkpoints

from .model import TreeGPTModel
from .parallel import is_first_rank
from .stock import AnyOptimizer
from .weights import load_hf, save_hf

__all__ = ["load_checkpoint", "save_checkpoint"]

_TRAINER = "trainer"


class _PlainSave(torch_dist.TorchDistSaveShardedStrategy):
    """Writes the stock layout without what the stock strategy needs a GPU for: pinned copies and forked writers."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str) -> None:
        """Write this rank's parts; returns in every rank once all are on disk."""
        renamed, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        dcp.save(
            torch_dist.mcore_to_pyt_state_dict(renamed, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=torch_dist.MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def save_checkpoint(
    root: Path,
    *,
    step: int,
    model: TreeGPTModel,
    optimizer: AnyOptimizer,
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
    dist.barrier()
    save_hf(model, unfinished, source)
    shards = _shards(model)
    content = {"optimizer": optimizer.sharded_state(shards, loading=False)}
    if anchor is not None:
        content["anchor"] = _sharded_anchor(shards, anchor)
    with _quiet():
        dist_checkpointing.save(content, str(unfinished / _TRAINER), _PlainSave("torch_dist", 1))
    if first:
        text = json.dumps({**state, "anchor": anchor is not None}, indent=1, sort_keys=True)
        (unfinished / "state.json").write_text(text, encoding="utf-8")
        for path in (*unfinished.rglob("*"), unfinished):
            _sync(path)
        _remove(final)
        unfinished.rename(final)
        _sync(root)
        complete = saved_checkpoints(root)
        for old in complete[:-keep]:
            _remove(old)
        for left in root.glob(".step-*.removed"):  # by a trainer that was killed while it removed it
            shutil.rmtree(left)
    dist.barrier()
    return final


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to ourselves what torch is going to deprecate of what Megatron uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _shards(model: TreeGPTModel) -> dict[str, Any]:
    """Which part of the whole model each parameter of this rank is, by name."""
    whole = model.sharded_state_dict()
    return {name: whole[name] for name, _ in model.named_parameters()}


def _sharded_anchor(shards: Mapping[str, Any], anchor: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: make_sharded_optimizer_tensor(shards[name], tensor, "anchor") for name, tensor in anchor.items()}


def _remove(folder: Path) -> None:
    """Delete a checkpoint; it loses its name first, since a folder with a checkpoint's name must be complete."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_checkpoint(folder: Path, model: TreeGPTModel, optimizer: AnyOptimizer) -> dict[str, torch.Tensor] | None:
    """Restore weights and optimiser in any layout and dtype; return the anchor weights when a burst was open."""
    state = read_state(folder)
    load_hf(model, folder)
    shards = _shards(model)
    wanted = {"optimizer": optimizer.sharded_state(shards, loading=True)}
    if state.get("anchor"):
        empty = {name: torch.empty_like(p, device="cpu") for name, p in model.named_parameters()}
        wanted["anchor"] = _sharded_anchor(shards, empty)
    with _complaining(folder, RuntimeError, ValueError):  # torch.load and json say it so
        (folder / _TRAINER / "common.pt").stat()
        dist_checkpointing.load_common_state_dict(str(folder / _TRAINER))
    with _complaining(folder), _quiet():
        found = dist_checkpointing.load(wanted, str(folder / _TRAINER))
    optimizer.load(found["optimizer"], int(state["step"]))
    anchor: dict[str, torch.Tensor] | None = found.get("anchor")
    return anchor


@contextmanager
def _complaining(folder: Path, *more: type[Exception]) -> Iterator[None]:
    """Say of a file that cannot be read what can be done."""
    kinds = (dcp.api.CheckpointException, CheckpointingException, UnpicklingError, OSError, EOFError, *more)
    try:
        yield
    except kinds as error:
        told = str(error).strip().splitlines() or [repr(error)]
        raise CorruptError(
            f"checkpoint {folder}: wanted the optimiser in {_TRAINER}, got {told[-1]:.200}; delete the checkpoint to "
            "resume from the one before"
        ) from error
