"""Live training on fixed pools: `gyre train` itself has tasks run, and trains on what comes.

`services` keeps engine, proxy and launcher up, `dispatch` queues groups at the proxy, `pace` bounds how old the data of
a step may be, `evaluation` has held-out tasks run between steps. Only this package talks to the proxy's API.
"""

from __future__ import annotations

__all__: list[str] = []
