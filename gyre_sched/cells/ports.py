"""Ports for programs that are told theirs before they listen."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

_PORTS = range(10_000, 32_000)
"""Below those that systems give to outgoing connections, any of which could take it before the program listens."""
_TRIES = 100


def free_port(host: str) -> int:
    """One that nobody listens on now; OSError when none is found."""
    # From the system's own source: seeded processes would draw the same ones.
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                failure = error
            else:
                return port
    raise failure
