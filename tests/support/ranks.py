"""Ranks of a test, forked from a server that has imported torch once: an import is most of what a spawn costs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gyre_train.config import ParallelConfig
from gyre_train.megatron import parallel as ranks

__all__ = ["fork_ranks"]


def fork_ranks(body: Callable[..., None], parallel: ParallelConfig, folder: Path, *args: Any) -> None:
    """As `run_ranks`, meeting in `folder`."""
    multiprocessing.set_forkserver_preload(["gyre_train.step", "hypothesis", "pytest"])
    spawn_args = (parallel, str(folder / "rendezvous"), "cpu", None, body, args)
    torch.multiprocessing.start_processes(
        ranks._rank_entry, args=spawn_args, nprocs=parallel.ranks, start_method="forkserver"
    )
