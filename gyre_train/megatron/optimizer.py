"""AdamW over a TreeGPTModel, with float32 master copies of weights below float32, on any device.

Decay never touches norm gains and biases. Its sharded state has the keys of Megatron's own optimisers, so that either
(`stock`) resumes what the other saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from .gradients import clip_gradients, gradient_of
from .model import TreeGPTModel

__all__ = ["Optimizer"]

_PARAM = "param"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """One AdamW step on the gradients that `finish_gradients` left behind and `clip` bounded."""

    def __init__(
        self,
        model: TreeGPTModel,
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._masters: dict[str, torch.Tensor] = {
            name: torch.nn.Parameter(p.detach().float()) if p.dtype in (torch.bfloat16, torch.float16) else p
            for name, p in self._parameters.items()
        }
        decayed = [m for m in self._masters.values() if m.ndim >= 2]
        plain = [m for m in self._masters.values() if m.ndim < 2]
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=0.0, betas=betas, eps=eps,
        )  # fmt: skip

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that the model's gradient norm is at most `max_norm` (0: only measure). Returns it."""
        return clip_gradients(self._model, max_norm)

    def step(self, lr: float) -> None:
        """Apply one step at this learning rate and write the weights back into the model."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            grad = gradient_of(parameter)
            if master is not parameter or hasattr(parameter, "main_grad"):
                master.grad = None if grad is None else grad.to(master.dtype)
        self._adam.step()
        self.refresh_model()
        for master in self._masters.values():
            master.grad = None

    def refresh_model(self) -> None:
        """Round the master copies into the model's weights."""
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return {"param": {name: tensor}, "exp_avg": ..., "exp_avg_sq": ...}; moments are zero before any step.

        `param` are the exact weights: the float32 copies where there are such.
        """
        out = {_PARAM: {name: master.detach() for name, master in self._masters.items()}}
        for moment in _MOMENTS:
            out[moment] = {
                name: self._adam.state[master].get(moment, torch.zeros_like(master))
                for name, master in self._masters.items()
            }
        return out

    def sharded_state(self, shards: Mapping[str, Any], *, loading: bool) -> dict[str, dict[str, Any]]:
        """Return `tensors` as parts of the whole model's; `shards` says which part of it each parameter is."""
        del loading
        return {
            kind: {n: make_sharded_optimizer_tensor(shards[n], x, f"optimizer.state.{kind}") for n, x in own.items()}
            for kind, own in self.tensors().items()
        }

    def load(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], num_steps: int) -> None:
        """Take back what `tensors` gave after `num_steps` steps."""
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(tensors[_PARAM][name])
                state = {moment: tensors[moment][name].clone() for moment in _MOMENTS}
                self._adam.state[master] = {"step": torch.tensor(float(num_steps)), **state}
        self.refresh_model()
