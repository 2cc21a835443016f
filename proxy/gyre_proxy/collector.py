"""How a serving process collects garbage: what start-up made stays out of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["start_up_kept"]

_YOUNG = 20_000
"""New containers before the youngest are looked through. Python's 700 are a hundred tokens with their log-probs."""


@contextmanager
def start_up_kept() -> Iterator[None]:
    """Leave out of every collection what is alive now: modules, models of the wires, the tokenizer.

    They are some hundred thousand objects that live as long as the process, and walking them again and again was a
    sixth of what an engine's event cost. Workers are forked after it, so that their shared pages stay shared.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
