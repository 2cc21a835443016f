"""What a proxy does for other processes that serve the same run: nothing, where it is the only one."""

from __future__ import annotations

from .executions import Execution

__all__ = ["SingleProcess"]


class SingleProcess:
    """The places at which a proxy of several processes hears from the others, or tells them something."""

    async def learn(self, execution_id: str) -> None:
        """Before a call: have in `executions` what is known of this one."""

    async def changed(self, execution: Execution) -> None:
        """After the API changed an execution and before it says so: whoever serves its calls goes by the change."""

    async def engine_changed(self, action: str, url: str, version: str | None) -> None:
        """The same for an engine."""

    async def refresh(self) -> None:
        """Before figures are shown: bring in those of other processes."""
