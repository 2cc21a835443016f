"""SGLang's hierarchical cache as configuration: keys and values of a reply that moves are fetched, not computed again.

Engines share a store. What lies there is named by the request's `extra_key` too, which the proxy sets to the weight
version, so keys and values of other weights are never taken. It needs GPUs: SGLang's CPU build cannot run it, and what
is generated here has not been run. Without it a reply that moves has its prompt and output so far prefilled again; what
is recorded is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gyre_sched.errors import ScenarioError

__all__ = ["HierarchicalCache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HierarchicalCache:
    """What engines are started with, besides their command."""

    storage: Literal["file", "mooncake"]
    folder: str = ""
    """Of a file system that all cells share (file)."""
    master: str = ""
    """host:port of `mooncake_master` (mooncake)."""
    protocol: Literal["tcp", "rdma"] = "rdma"
    """Of Mooncake."""
    device: str = ""
    """RDMA device; empty: Mooncake chooses."""
    segment_bytes: int = 4 << 30
    """Memory that each engine gives to the store (mooncake)."""
    ratio: float = 2.0
    """Host memory for keys and values, in times of the device's."""

    def __post_init__(self) -> None:
        for name, storage in (("folder", "file"), ("master", "mooncake")):
            if bool(getattr(self, name)) != (self.storage == storage):
                asked = "wanted" if self.storage == storage else "has no effect with"
                raise ScenarioError(
                    f'rollout.cache.{name}: {asked} storage = "{self.storage}", got {getattr(self, name)!r}; '
                    f"{'set' if self.storage == storage else 'remove'} it"
                )

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `sglang.launch_server` 0.5.23. Written through, so that it is there when another engine asks for it."""
        return (
            "--enable-hierarchical-cache",
            *("--hicache-ratio", f"{self.ratio:g}"),
            *("--hicache-write-policy", "write_through"),
            *("--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct"),
            *("--hicache-storage-backend", self.storage),
        )

    @property
    def env(self) -> dict[str, str]:
        """What the store reads from the environment."""
        if self.storage == "file":
            return {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": self.folder}
        told = {
            "MOONCAKE_MASTER": self.master,
            "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_PROTOCOL": self.protocol,
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(self.segment_bytes),
        }
        return told | ({"MOONCAKE_DEVICE": self.device} if self.device else {})
