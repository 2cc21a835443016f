"""Weights that a trainer broadcasts: SGLang's distributed update, over gloo.

As in SGLang, an update replaces tensors as they come, between `begin` and `end`; a sender that stops halfway leaves a
mix, and it is the sender's to say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    GroupName,
    _new_process_group_helper,
    _world,
    default_pg_timeout,
    rendezvous,
)

from gyre_data.errors import ConfigError

__all__ = ["WeightGroups"]


class WeightGroups:
    """The groups this engine has joined. Its methods wait for the other side; call them in threads."""

    def __init__(self) -> None:
        self._groups: dict[str, dist.ProcessGroup] = {}
        self.is_open = False
        """Between begin_weight_update and end_weight_update."""

    def join(self, body: dict[str, Any]) -> None:
        """Meet the trainer at its address and become rank `rank_offset` of its group."""
        try:
            name, world, rank = str(body["group_name"]), int(body["world_size"]), int(body["rank_offset"])
            where = f"tcp://{body['master_address']}:{int(body['master_port'])}"
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a weight group's name, address, port, rank and size were wanted, got {body}") from error
        if body.get("backend") != "gloo":
            raise ConfigError(f"this engine runs on a CPU: backend should be 'gloo', got {body.get('backend')!r}")
        store, rank, world = next(rendezvous(where, rank, world))
        group, _ = _new_process_group_helper(
            world,
            rank,
            [],
            dist.Backend("gloo"),
            dist.PrefixStore(name, store),
            group_name=GroupName(name),
            timeout=default_pg_timeout,
        )
        _world.pg_group_ranks[group] = {i: i for i in range(world)}
        self._groups[name] = group

    def receive(self, body: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Take the named tensors of one broadcast."""
        group = self._groups.get(str(body.get("group_name")))
        if group is None or not self.is_open:
            raise ConfigError("update_weights_from_distributed must run between begin_weight_update() and "
                              "end_weight_update(), in a group that was joined")  # fmt: skip
        received = []
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(_shape(shape), dtype=getattr(torch, dtype))
            dist.broadcast(tensor, src=0, group=group)
            received.append((name, tensor))
        return received

    def leave(self, name: str) -> None:
        """Take a group down."""
        group = self._groups.pop(name, None)
        if group is None:
            raise ConfigError("The group to be destroyed does not exist.")
        dist.destroy_process_group(group)


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in shape)
