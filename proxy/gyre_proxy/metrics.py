"""Prometheus figures of one proxy, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

__all__ = ["Family", "Metrics"]

Family = tuple[str, str, str, Sequence[tuple[str, Mapping[str, str], float]]]
"""Name, documentation, type, and samples (name, labels, value) of one figure: plain values that can be sent."""

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """Counters and timings; `expose` renders them as text."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.calls = Counter(
            "gyre_calls",
            "calls by wire, role, extension and status",
            ["wire", "role", "extension", "status"],
            registry=self._registry,
        )
        self.refused = Counter(
            "gyre_refused_requests", "requests refused before sampling", ["kind"], registry=self._registry
        )
        self.forks = Counter(
            "gyre_forks", "calls that left the recorded path, by reason", ["reason"], registry=self._registry
        )
        self.false_forks = Counter(
            "gyre_false_forks", "calls rendered anew since a check failed, by check", ["check"], registry=self._registry
        )
        self.prompt_tokens = Counter("gyre_prompt_tokens", "prompt tokens sent to engines", registry=self._registry)
        self.output_tokens = Counter("gyre_output_tokens", "tokens sampled", registry=self._registry)
        self.in_flight = Gauge("gyre_calls_in_flight", "calls being sampled", registry=self._registry)
        self.plan_s = Histogram(
            "gyre_plan_seconds", "matching, rendering, tokenising", buckets=_SECONDS, registry=self._registry
        )
        self.first_token_s = Histogram(
            "gyre_first_token_seconds", "request to first token", buckets=_SECONDS, registry=self._registry
        )
        self.commit_s = Histogram(
            "gyre_commit_wait_seconds", "wait for durability", buckets=_SECONDS, registry=self._registry
        )
        self.engine_in_flight = Gauge(
            "gyre_engine_calls_in_flight", "calls on an engine", ["engine"], registry=self._registry
        )
        self.engine_up = Gauge("gyre_engine_up", "1 while an engine takes calls", ["engine"], registry=self._registry)

    def families(self) -> list[Family]:
        """Every figure as plain values."""
        return [
            (one.name, one.documentation, one.type, [(s.name, dict(s.labels), s.value) for s in one.samples])
            for one in self._registry.collect()
        ]

    def expose(self, workers: Mapping[str, Sequence[Family]] | None = None) -> bytes:
        """The text that a Prometheus server scrapes; with `workers`, the figures of several processes."""
        return generate_latest(self._registry if workers is None else _Merged(workers))


class _Merged(CollectorRegistry):
    """Figures of several processes under one name each, told apart by the label `worker`."""

    def __init__(self, workers: Mapping[str, Sequence[Family]]) -> None:
        super().__init__()
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for worker, families in self._workers.items():
            for name, documentation, kind, samples in families:
                metric = merged.setdefault(name, Metric(name, documentation, kind))
                for sample, labels, value in samples:
                    metric.add_sample(sample, {**labels, "worker": worker}, value)
        yield from merged.values()
