"""What the C library does with the memory of tensors that are gone; standard library only."""

from __future__ import annotations

import ctypes

__all__ = ["keep_memory"]

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Numbers of glibc's `mallopt`."""


def keep_memory() -> bool:
    """Have this process keep freed memory for its next tensors, as a GPU's allocator does; False without glibc.

    A step's tensors are as large as those of the step before. glibc gives those of 32 MiB and more back to the system
    and has them anew each time, and every page of them is cleared and faults again: a fifth of a step's time on a CPU.
    For processes of our own only: it cannot be taken back.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
