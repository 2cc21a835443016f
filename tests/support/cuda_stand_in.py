"""CUDA by name only: code written for a GPU runs on CPU, as far as names and types go.

Tests only, and no evidence that the GPU path works there: nothing is asynchronous, nothing lies in another memory. A
mode rewrites devices in calls to torch, and a few functions of `torch.cuda` are replaced; all comes back on exit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["cuda_stand_in"]

_CPU = torch.device("cpu")
_NAMES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}


def _on_cpu(value: Any) -> Any:
    if (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    ):
        return _CPU
    return value


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return f"torch.cuda.{_NAMES[args[0].dtype]}Tensor" if args[0].dtype in _NAMES else func(*args)
        return func(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


class _Stream:
    """Everything on it is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


@contextmanager
def cuda_stand_in() -> Iterator[None]:
    """Run what is inside as if CPU memory were a GPU's."""
    names = {
        "current_device": lambda: _CPU,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
    }
    with patch.multiple(torch.cuda, **names), _CudaIsCpu():
        yield
