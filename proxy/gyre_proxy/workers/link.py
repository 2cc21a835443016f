"""Messages and open connections between the supervisor and one worker, over a pair of sockets that only they hold.

A message is a pickle: both ends are the same program, and the pair is inherited, never reachable from outside. An open
connection goes along as its file descriptor, with the bytes that were read from it already.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gyre_data.errors import EngineError, GyreError

__all__ = ["Link"]

log = logging.getLogger(__name__)

_HEAD = struct.Struct(">IB")  # bytes of the pickle, descriptors that go along
_PIECE = 1 << 18
_Handler = Callable[[Any], Any]


class Link:
    """One end. Single-threaded: used from the event loop only. Messages arrive in the order they were sent."""

    def __init__(
        self,
        sock: socket.socket,
        handlers: Mapping[str, _Handler],
        on_connection: Callable[[int, bytes], Awaitable[None]],
        on_lost: Callable[[], None],
    ) -> None:
        """`handlers` answer messages by kind; what one returns, or awaits, is the answer to an `ask`."""
        sock.setblocking(False)
        self._sock, self._handlers, self._on_connection, self._on_lost = sock, handlers, on_connection, on_lost
        self._loop = asyncio.get_running_loop()
        self._out: deque[tuple[memoryview, int | None, bytes]] = deque()
        self._in = bytearray()
        self._descriptors: deque[int] = deque()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost = False
        self.unsent: list[tuple[int, bytes]] = []
        """Open connections that the other end did not live to take; whoever lets go of this end has them."""
        self._loop.add_reader(sock.fileno(), self._readable)

    def push(self, kind: str, value: Any = None) -> None:
        """Send a message that nobody answers."""
        self._send((kind, 0, value))

    def hand_over(self, descriptor: int, data: bytes) -> None:
        """Give an open connection away, with what was read from it. `descriptor` is closed here, or `unsent`."""
        self._send(("connection", 0, data), descriptor, data)

    async def ask(self, kind: str, value: Any = None) -> Any:
        """The other end's answer. Raises what its handler raised; EngineError when the other process is gone."""
        if self.lost:
            raise _gone()
        self._number += 1
        number, future = self._number, self._loop.create_future()
        self._asked[number] = future
        self._send((kind, number, value))
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    def close(self) -> None:
        """Let go of the pair; whoever waits for an answer is told."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self.unsent += [(fd, data) for _, fd, data in self._out if fd is not None]
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._out.clear()
        self._descriptors.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(_gone())

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self, message: tuple[str, int, Any], descriptor: int | None = None, carried: bytes = b"") -> None:
        if self.lost:
            if descriptor is not None:
                self.unsent.append((descriptor, carried))
            return
        data = pickle.dumps(message, protocol=5)
        idle = not self._out
        self._out.append((memoryview(_HEAD.pack(len(data), descriptor is not None) + data), descriptor, carried))
        if idle:
            self._writable()

    def _writable(self) -> None:
        while self._out:
            data, descriptor, _ = self._out[0]
            try:
                sent = socket.send_fds(self._sock, [data], [] if descriptor is None else [descriptor])
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError:
                self._lose()
                return
            if descriptor is not None:  # it went with the first byte
                os.close(descriptor)
            if sent < len(data):
                self._out[0] = (data[sent:], None, b"")
            else:
                self._out.popleft()
        self._loop.remove_writer(self._sock.fileno())

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, _PIECE, 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, descriptors = b"", []
        self._descriptors += descriptors
        if not data:
            self._lose()
            return
        self._in += data
        while len(self._in) >= _HEAD.size:
            size, carries = _HEAD.unpack_from(self._in)
            if len(self._in) < _HEAD.size + size:
                return
            message = pickle.loads(bytes(self._in[_HEAD.size : _HEAD.size + size]))
            del self._in[: _HEAD.size + size]
            self._received(message, self._descriptors.popleft() if carries else None)
            if self.lost:
                return

    def _received(self, message: tuple[str, int, Any], descriptor: int | None) -> None:
        kind, number, value = message
        if descriptor is not None:
            self._spawn(self._on_connection(descriptor, value))
        elif kind == "answer":
            future = self._asked.get(number)
            if future is not None and not future.done():
                good, result = value
                future.set_result(result) if good else future.set_exception(result)
        elif number:
            self._spawn(self._answer(kind, number, value))
        else:
            self._handlers[kind](value)

    async def _answer(self, kind: str, number: int, value: Any) -> None:
        try:
            result = self._handlers[kind](value)
            answer = (True, await result if isinstance(result, Awaitable) else result)
        except GyreError as error:
            answer = (False, error)
        except Exception as error:
            log.exception("a message %r could not be answered", kind)
            answer = (False, GyreError(f"the other process failed on {kind}: {type(error).__name__}; see its log"))
        self._send(("answer", number, answer))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lose(self) -> None:
        if not self.lost:
            self.close()
            self._on_lost()


def _gone() -> EngineError:
    return EngineError("the process that serves this execution ended just now; it is being restarted, try again")
