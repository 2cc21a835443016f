"""AdamW over a TreeGPTModel, with float32 master copies of weights below float32.

Decay never touches norm gains and biases. State is given out and taken back by Megatron parameter name, so that a
checkpoint can store it under Hugging Face names and load it at another tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .gradients import gradient_of
from .model import TreeGPTModel

__all__ = ["MASTER", "Optimizer"]

MASTER = "master"
"""What `Optimizer.tensors` calls the float32 copies of weights below float32."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """One AdamW step on the gradients that `finish_gradients` and `clip_gradients` left behind."""

    def __init__(
        self,
        model: TreeGPTModel,
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
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
        """Return {"exp_avg": {name: tensor}, "exp_avg_sq": ..., "master": ...}; moments are zero before any step."""
        out: dict[str, dict[str, torch.Tensor]] = {}
        for moment in _MOMENTS:
            out[moment] = {
                name: self._adam.state[master].get(moment, torch.zeros_like(master))
                for name, master in self._masters.items()
            }
        copies = {name: m.detach() for name, m in self._masters.items() if m is not self._parameters[name]}
        if copies:
            out[MASTER] = copies
        return out

    def load(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], num_steps: int) -> None:
        """Take back what `tensors` gave after `num_steps` steps."""
        with torch.no_grad():
            for name, master in self._masters.items():
                if MASTER in tensors:
                    master.copy_(tensors[MASTER][name])
                if num_steps:
                    state = {moment: tensors[moment][name].clone() for moment in _MOMENTS}
                    self._adam.state[master] = {"step": torch.tensor(float(num_steps)), **state}
        self.refresh_model()
