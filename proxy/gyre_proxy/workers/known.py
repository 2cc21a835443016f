"""What a worker is told of an execution."""

from __future__ import annotations

from dataclasses import dataclass

from gyre_data.types import EnvironmentState
from gyre_proxy.executions import Execution

__all__ = ["Known"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The part of an execution that its calls depend on."""

    execution_id: str
    key_hashes: frozenset[str]
    state: str
    end_reason: str | None
    environment: EnvironmentState | None
    num_calls: int

    @classmethod
    def of(cls, execution: Execution) -> Known:
        """As the supervisor has it."""
        return cls(
            execution_id=execution.execution_id,
            key_hashes=frozenset(execution.key_hashes),
            state=execution.state,
            end_reason=execution.end_reason,
            environment=execution.environment,
            num_calls=execution.num_calls,
        )

    def apply(self, execution: Execution) -> None:
        """Make the worker's own agree. Once it has a history, it counts its calls itself."""
        execution.key_hashes = set(self.key_hashes)
        execution.state, execution.end_reason, execution.environment = self.state, self.end_reason, self.environment
        if execution.history is None:
            execution.num_calls = max(execution.num_calls, self.num_calls)
