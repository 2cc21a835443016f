"""Live training on cells that move between rollout and training: one command over the scheduler's controller.

`gyre train` with `scheduler.cells` trains nothing itself: it keeps proxy, launcher and controller up (`command`),
tells the controller what the same config says (`fleet`), has held-out tasks run (`passes`), and says who waits for
whom (`watch`). The controller starts the core, which is `gyre train` with `stream.controlled`, and everything else.
Nothing of `gyre_sched` is imported before a config asks for cells.
"""

from __future__ import annotations

__all__: list[str] = []
