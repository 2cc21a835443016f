"""What one simulated run measured, gathered while it ran."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .api import Role

__all__ = ["Measured", "Span", "Watch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A cell did one thing for a while: a role, or `busy` with micro-steps, or `optimiser`."""

    cell: str
    what: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run of one policy with one seed."""

    seed: int
    steps: int
    hours: float
    work_bound_h: float
    """What the cells' work alone takes when no cell ever waits."""
    critical_path_h: float
    """Sum over bursts of the time from their dispatch until the last group they need is ready."""
    staleness_groups: float
    """E[d], every group weighing the same."""
    staleness_tokens: float
    """d weighted by executed time, which stands for tokens."""
    staleness_max: int
    train_idle: float
    """Share of the time in the training role without a micro-step or an optimiser step."""
    rollout_idle: float
    """Share of the serving capacity that no execution used."""
    switches: int
    bursts: int
    executions: int
    executions_timed_out: int
    execution_mean_h: float
    query_mean_h: float
    step_ends_h: tuple[float, ...]
    spans: tuple[Span, ...] = ()


@dataclass(kw_only=True, slots=True)
class Watch:
    """Running sums of a simulation."""

    trace: bool
    since: dict[str, tuple[Role, float]] = field(default_factory=dict)
    in_role: dict[Role, float] = field(default_factory=lambda: defaultdict(float))
    busy_s: float = 0.0
    served_s: float = 0.0
    """Capacity-seconds offered."""
    used_s: float = 0.0
    switches: int = 0
    timed_out: int = 0
    ended: int = 0
    execution_s: float = 0.0
    query_s: float = 0.0
    queries: int = 0
    weighted: float = 0.0
    weight: float = 0.0
    critical_s: float = 0.0
    step_ends_s: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    _busy_since: dict[str, Span] = field(default_factory=dict)

    def role(self, cell: str, role: Role, now_s: float) -> None:
        """A cell has this role from now on."""
        old, start_s = self.since.get(cell, (role, now_s))
        self.in_role[old] += now_s - start_s
        if self.trace and now_s > start_s:
            self.spans.append(Span(cell=cell, what=old.value, start_s=start_s, end_s=now_s))
        self.since[cell] = (role, now_s)

    def worked(self, cell: str, what: str, start_s: float, end_s: float) -> None:
        """A cell ran a micro-step or the optimiser."""
        self.busy_s += end_s - start_s
        if not self.trace:
            return
        before = self._busy_since.get(cell)
        if before is not None and before.what == what and start_s - before.end_s < 1e-6:
            start_s = before.start_s
        elif before is not None:
            self.spans.append(before)
        self._busy_since[cell] = Span(cell=cell, what=what, start_s=start_s, end_s=end_s)

    def finish(self, now_s: float) -> None:
        """The run is over."""
        for cell, (role, _) in list(self.since.items()):
            self.role(cell, role, now_s)
        self.spans += self._busy_since.values()
