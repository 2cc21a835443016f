"""Training on trajectory trees with Megatron. Importing this package loads no torch; never imports gyre_proxy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["load_config", "teach", "train", "verify_training"]

_HOME = {"load_config": "config", "teach": "teacher", "train": "loop", "verify_training": "exactness"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
