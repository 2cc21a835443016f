"""Megatron's own wrapper, optimiser and sequence parallelism take the steps that ours take, as far as CPU can tell.

`model.device = "cuda"` is the switch; a stand-in for the device lets its call paths run here. That they fit and that
numbers agree is all this shows: no GPU has run them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from gyre_data.errors import ConfigError
from gyre_train.config import ParallelConfig, TrainingConfig
from gyre_train.edges import Anchor
from gyre_train.megatron.parallel import groups, is_first_rank, model_parallel
from gyre_train.megatron.stock import StockOptimizer, gradient_wrapper
from gyre_train.megatron.weights import export_tensors
from gyre_train.step import Learner, StepWork
from tests.property.test_layouts import packs
from tests.support.cuda_stand_in import cuda_stand_in
from tests.support.ranks import fork_ranks
from tests.support.training import config, tiny_model

LAYOUTS = {"dp2": ParallelConfig(dp=2), "tp2": ParallelConfig(tp=2), "pp2": ParallelConfig(pp=2)}
STEPS = 3
SAVED = 2


def settings(root: Path, device: str) -> TrainingConfig:
    return config(
        root / "model", root / "out", f"--model.device={device}", "--train.clip_grad=0.05",
        "--train.weight_decay=0.1", "--loss.kind=token", "--pack.attention=reference", runs=root,
    )  # fmt: skip


def steps(root: Path, device: str, folder: Path, resumes: Path | None = None) -> dict[str, Any]:
    """Loss and norm of each step and the weights after the last, float32; step 2 is saved."""
    learner = Learner(settings(root, device), Anchor.BEHAVIOUR, resumes)
    stock = isinstance(learner.optimizer, StockOptimizer)
    assert stock == isinstance(learner.wrapped, DistributedDataParallel) == (device == "cuda")
    assert learner.model.config.sequence_parallel == (
        stock and parallel_state.get_tensor_model_parallel_world_size() > 1
    )
    out: dict[str, Any] = {}
    for step in range(SAVED + 1 if resumes else 1, STEPS + 1):
        figures = learner.step(StepWork(step=step, packs=packs(), num_executions=3, lr=1e-3))
        out |= {f"loss {step}": figures["loss"], f"norm {step}": figures["grad_norm"]}
        if step == SAVED and not resumes:
            learner.save(folder, step, {"step": step})
    return out | {name: tensor.clone() for name, tensor in export_tensors(learner.model)}


def in_every_layout(root: str) -> None:
    parallel_state.destroy_model_parallel()
    for name, parallel in LAYOUTS.items():
        folder = Path(root) / name
        ours, theirs = (folder / kind / f"step-{SAVED:08d}" for kind in ("ours", "theirs"))
        with model_parallel(parallel):
            found = {"ours": steps(Path(root), "cpu", folder / "ours")}
            with cuda_stand_in():
                found["theirs"] = steps(Path(root), "cuda", folder / "theirs")
                found["theirs again"] = steps(Path(root), "cuda", folder, theirs)
                found["theirs from ours"] = steps(Path(root), "cuda", folder, ours)
            assert torch.empty(1).type() == "torch.FloatTensor"
            found["ours from theirs"] = steps(Path(root), "cpu", folder, theirs)
            if is_first_rank():
                torch.save(found, folder / "found.pt")
    parallel_state.initialize_model_parallel()


def test_both_ways_of_training_take_the_same_steps(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model", arch="qwen3", layers=2)
    with groups():
        alone = steps(tmp_path, "cpu", tmp_path / "alone")
    assert alone["norm 1"] > 0.05
    fork_ranks(in_every_layout, ParallelConfig(dp=2), tmp_path, str(tmp_path))
    for name in LAYOUTS:
        for way, found in torch.load(tmp_path / name / "found.pt").items():
            for key, value in found.items():
                wanted = torch.as_tensor(alone[key])
                assert wanted.isfinite().all(), (name, way, key)
                # Two float32 sums in another order, which Adam then divides by a gradient's own size.
                bound = 2e-6 if key.startswith("loss") else 2e-5
                assert (torch.as_tensor(value) - wanted).abs().max() <= bound, (name, way, key)


def test_the_stock_optimiser_has_no_float64(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    wide = config(
        tmp_path / "model",
        tmp_path,
        "--model.dtype=float64",
        "--model.device=cuda",
        "--pack.attention=reference",
        runs=tmp_path,
    )
    with groups(), pytest.raises(ConfigError, match=r"float32 at most; set model.dtype = float32, or model.device"):
        gradient_wrapper(Learner(settings(tmp_path, "cpu"), Anchor.STEP, None).model, wide.model)
