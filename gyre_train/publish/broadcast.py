"""Publish by broadcast: tensors go from the trainer's memory to an engine's ranks by torch.distributed.

gloo on a CPU (tested); nccl on GPUs (written, not yet verified). Each engine gets a group of its own, made for one
publish, so that an engine that fails or hangs cannot hold up another. Nothing authenticates the peers of such a group:
use it on a network that only the cluster reaches.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

from gyre_data.errors import EngineError
from gyre_data.types import PolicyVersion
from gyre_train.megatron.weights import TensorSource

from .control import Deadline, EngineControl, NoSuchRoute

__all__ = ["BroadcastCarrier"]

_LOG = logging.getLogger(__name__)
_BUCKET_BYTES = 512 << 20
"""An engine holds this much beside its weights while it receives."""


class BroadcastCarrier:
    """Sends every tensor of the folder to the engine, which loads it as it comes."""

    whole = False

    def __init__(self, *, host: str = "127.0.0.1", backend: str = "gloo") -> None:
        self._host, self._backend = host, backend

    def stage(self, number: int, folder: Path, version: PolicyVersion, deadline: Deadline) -> str:
        """Nothing to do: tensors are read as they are sent."""
        del number, version, deadline
        return str(folder)

    def swap(self, engine: EngineControl, staged: str, version: PolicyVersion, deadline: Deadline) -> None:
        """Open a group and a weight update, send bucket after bucket, and close both whatever happened."""
        name = f"gyre-{secrets.token_hex(6)}"
        group = self._join(engine, name, deadline)
        try:
            ends = _begin(engine)
            try:
                self._send(engine, group, name, TensorSource(Path(staged)), version, deadline)
            except BaseException:
                with contextlib.suppress(EngineError):
                    ends()
                raise
            ends()
        finally:
            _leave(engine, group, name)

    def _join(self, engine: EngineControl, name: str, deadline: Deadline) -> dist.ProcessGroup:
        ranks = int(engine.info().get("tp_size", 1))
        world, left = ranks + 1, timedelta(seconds=deadline.left())
        listener = socket.create_server((self._host, 0), backlog=world)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            self._host, port, world, is_master=True, timeout=left, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        body = {
            "master_address": self._host, "master_port": port, "rank_offset": 1, "world_size": world,
            "group_name": name, "backend": self._backend,
        }  # fmt: skip

        def join() -> dist.ProcessGroup:
            # The same steps as the engine's own: a group beside the default one, met at a store of its own.
            prefixed = dist.PrefixStore(name, store)
            group, _ = _new_process_group_helper(
                world, 0, [], dist.Backend(self._backend), prefixed, group_name=GroupName(name), timeout=left
            )
            _world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
            return group

        return _both(lambda: engine.post("/init_weights_update_group", body, timeout_s=deadline.left()), join, deadline)

    def _send(
        self,
        engine: EngineControl,
        group: dist.ProcessGroup,
        name: str,
        tensors: TensorSource,
        version: PolicyVersion,
        deadline: Deadline,
    ) -> None:
        device = "cuda" if self._backend == "nccl" else "cpu"
        buckets = list(_buckets(tensors))
        for number, names in enumerate(buckets):
            bucket = [tensors(one).to(device) for one in names]
            last = number == len(buckets) - 1
            body = {
                "names": names, "dtypes": [str(t.dtype).removeprefix("torch.") for t in bucket],
                "shapes": [list(t.shape) for t in bucket], "group_name": name, "flush_cache": last,
                "abort_all_requests": False, "weight_version": str(version) if last else None,
            }  # fmt: skip

            def send(bucket: list[torch.Tensor] = bucket) -> None:
                for tensor in bucket:
                    dist.broadcast(tensor, src=0, group=group)
                if device == "cuda":
                    torch.cuda.synchronize()

            def tell(body: dict[str, Any] = body) -> None:
                engine.post("/update_weights_from_distributed", body, timeout_s=deadline.left())

            _both(tell, send, deadline)


def _begin(engine: EngineControl) -> Callable[[], None]:
    """Open a weight update, where the engine's version knows such a thing; the result closes it."""
    try:
        engine.post("/begin_weight_update", {"selector": "all"})
    except NoSuchRoute:
        return lambda: None
    except EngineError:  # one that an earlier publish could not close
        engine.post("/end_weight_update")
        engine.post("/begin_weight_update", {"selector": "all"})

    def end() -> None:
        engine.post("/end_weight_update")

    return end


def _leave(engine: EngineControl, group: dist.ProcessGroup, name: str) -> None:
    # In a thread: it may wait for a broadcast that is stuck. Closing our end frees an engine that waits for it.
    _started(lambda: dist.destroy_process_group(group))
    try:
        engine.post("/destroy_weights_update_group", {"group_name": name})
    except EngineError as failure:
        _LOG.warning("%s", failure)


def _buckets(tensors: TensorSource) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name in tensors.names:
        tensor = tensors(name)
        size = tensor.numel() * tensor.element_size()
        if names and held + size > _BUCKET_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _both(tell: Callable[[], Any], act: Callable[[], Any], deadline: Deadline) -> Any:
    """Run a command and our side of it at once and return our side's result; a failure or the deadline ends it.

    A collective whose peer refused cannot be called off; its thread stays behind until the group's own time-out.
    """
    futures = [_started(tell), _started(act)]
    wait(futures, timeout=deadline.left(), return_when=FIRST_EXCEPTION)
    for future in futures:
        if future.done() and (failure := future.exception()) is not None:
            if isinstance(failure, EngineError):
                raise failure
            raise EngineError(
                f"broadcast: wanted all ranks to take part, got {failure}; see the engine's log"
            ) from failure
    if not all(future.done() for future in futures):
        raise EngineError("broadcast: wanted all ranks to take part in time, they did not; the engine hangs")
    return futures[1].result()


def _started(body: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(body())
        except Exception as error:  # noqa: BLE001 -- it belongs to whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, name="gyre-broadcast", daemon=True).start()
    return future
