"""A model folder on the trainer's Megatron parts, for the exactness oracle, in one rank or several."""

from pathlib import Path

import torch
from transformers import AutoConfig

from gyre_train.exactness import recorded_trees
from gyre_train.megatron.gradients import SimpleDataParallel, finish_gradients, gradient_of
from gyre_train.megatron.model import TreeGPTModel, build_model, edge_logprobs
from gyre_train.megatron.weights import export_tensors, load_hf
from gyre_train.pack import Pack
from gyre_train.plan import plan
from tests.support.exactness import assert_exact

__all__ = ["FolderModel", "RankModel", "check_recorded"]

F32, F64 = torch.float32, torch.float64


class RankModel:
    """What the oracle asks for, over this rank's model; gradients are whole and under Hugging Face names."""

    def __init__(self, model: TreeGPTModel, dtype: torch.dtype, backend: str) -> None:
        self.dtype, self.backend, self.model = dtype, backend, model
        self.wrapped = SimpleDataParallel(model.config, model)

    def edge_logprobs(self, pack: Pack) -> torch.Tensor:
        return edge_logprobs(self.wrapped, pack, backend=self.backend)[0]

    def zero_grad(self) -> None:
        self.wrapped.zero_grad_buffer()

    def gradients(self) -> dict[str, torch.Tensor]:
        finish_gradients(self.wrapped, 1.0)
        grads = {name: gradient_of(p) for name, p in self.model.named_parameters()}
        return {name: whole.clone() for name, whole in export_tensors(self.model, grads)}


class FolderModel(RankModel):
    """The same for a Hugging Face folder."""

    def __init__(self, folder: Path, dtype: torch.dtype, backend: str) -> None:
        model = build_model(AutoConfig.from_pretrained(folder), dtype=dtype)
        load_hf(model, folder)
        super().__init__(model, dtype, backend)


def check_recorded(run: str, model: str) -> None:
    """The contract on a recorded run's own trees, for both backends and dtypes; ranks find it by name."""
    trees = recorded_trees(run, model, kind="sequence")
    # 4096 tokens hold the run in few packs; 700 make many, with replayed prefixes.
    for dtype, backend, tokens in ((F64, "segments", 4096), (F64, "reference", 700), (F32, "segments", 700)):
        assert_exact(FolderModel(Path(model), dtype, backend), trees, plan(trees, tokens=tokens).packs)
