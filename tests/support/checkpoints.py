"""What a checkpoint's `trainer` folder holds, whole, whichever ranks wrote it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["same_state", "saved_state"]


def saved_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the optimiser and the anchor by its key in the file."""
    reader = dcp.FileSystemReader(checkpoint / "trainer")
    found = {
        name: torch.full(tuple(described.size), torch.nan, dtype=described.properties.dtype)
        for name, described in reader.read_metadata().state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert found
    return found


def same_state(one: Path, two: Path) -> bool:
    """Whether two checkpoints resume from the same numbers, bit for bit."""
    a, b = saved_state(one), saved_state(two)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
