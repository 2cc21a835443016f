"""A wire tap: passes a client's connections on to an address and keeps both directions, to be read as HTTP later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tests.support.observing import Got, read_answer
from tests.support.provider import Sent, read_request
from tests.support.threads import held_in_a_thread

__all__ = ["Tap"]


class Tap:
    """What passed, connection by connection; `url` is where a client is to be pointed."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._passed: list[tuple[bytearray, bytearray]] = []
        self.url = ""

    @contextmanager
    def in_a_thread(self) -> Iterator[Tap]:
        with held_in_a_thread(self._serving()):
            yield self

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.get_running_loop().create_task(self._connection(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._to)
        sent, got = bytearray(), bytearray()
        self._passed.append((sent, got))
        try:
            await asyncio.gather(_pump(reader, back, sent), _pump(there, writer, got))
        finally:
            writer.close()
            back.close()

    def exchanges(self) -> list[tuple[Sent, Got]]:
        """Every request with its answer."""
        return asyncio.run(self._read())

    async def _read(self) -> list[tuple[Sent, Got]]:
        found = []
        for sent, got in self._passed:
            requests, answers = asyncio.StreamReader(limit=1 << 26), asyncio.StreamReader(limit=1 << 26)
            for stream, data in ((requests, sent), (answers, got)):
                stream.feed_data(bytes(data))
                stream.feed_eof()
            while not answers.at_eof() and (request := await read_request(requests)) is not None:
                found.append((request, await read_answer(answers, request.method)))
        return found


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: bytearray) -> None:
    try:
        while data := await source.read(1 << 16):
            kept += data
            sink.write(data)
            await sink.drain()
        sink.write_eof()
    except (ConnectionError, OSError):
        sink.close()
