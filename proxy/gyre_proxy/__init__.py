"""Recording proxy between agent harnesses and inference engines. Speaks HTTP to engines; never imports gyre_train."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["ProxyClient"]

_HOME = {"ProxyClient": "launch.client"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
