"""Bodies as they pass, kept for the record: decoded copies without the client's credential."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl

import pyarrow as pa

__all__ = ["CREDENTIAL", "Secrets", "UndecodableError", "decoded"]

CREDENTIAL = b"[credential]"
_PIECE = 1 << 20
_SECRET = re.compile(r"key|token|auth|cookie|secret|password|account")


class UndecodableError(ValueError):
    """A body in an encoding that is not known here, or damaged from its first byte."""


def decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """The plain bytes of `body`, as far as they can be read: a cut body gives its prefix; at most `limit` bytes."""
    for name in reversed([part.strip().lower() for part in encoding.split(",")]):
        match name:
            case "" | "identity":
                continue
            case "gzip" | "x-gzip" | "deflate":
                body = _inflated(body, limit)
            case "br" | "zstd":
                body = _unpacked(body, "brotli" if name == "br" else "zstd", limit)
            case _:
                raise UndecodableError(f"content-encoding {name!r} is not known")
    return body


def _inflated(body: bytes, limit: int) -> bytes:
    plain = bytearray()
    for bits in (47, -15):  # zlib or gzip by its header; some servers send deflate without one
        try:
            rest = body
            while rest and len(plain) < limit:
                unpacker = zlib.decompressobj(bits)
                plain += unpacker.decompress(rest, limit - len(plain))
                rest = unpacker.unused_data
            return bytes(plain)
        except zlib.error:
            if plain:
                return bytes(plain)
    raise UndecodableError("its gzip or deflate data is damaged")


def _unpacked(body: bytes, codec: str, limit: int) -> bytes:
    plain = bytearray()
    try:
        with pa.CompressedInputStream(io.BytesIO(body), codec) as stream:
            while len(plain) < limit and (piece := stream.read(min(_PIECE, limit - len(plain)))):
                plain += piece
    except (OSError, ValueError) as error:
        if not plain and "truncated" not in str(error).lower():
            raise UndecodableError(f"its {codec} data cannot be read: {error}") from error
    return bytes(plain)


class Secrets:
    """What a client authenticates with, to be kept out of every record of the call."""

    def __init__(self, headers: Mapping[str, str], query: str = "") -> None:
        found: set[str] = set()
        for name, value in headers.items():
            if _SECRET.search(name):
                found |= {value, value.partition(" ")[2].strip()}
                if name == "cookie":
                    found |= {pair.partition("=")[2].strip() for pair in value.split(";")}
        found |= {value for name, value in parse_qsl(query) if _SECRET.search(name.lower())}
        self._values = sorted((value.encode() for value in found if len(value) >= 8), key=len, reverse=True)

    def removed(self, data: bytes) -> bytes:
        """`data` with a placeholder for each credential in it."""
        for value in self._values:
            if value in data:
                data = data.replace(value, CREDENTIAL)
        return data

    def removed_from(self, texts: Iterable[bytes]) -> tuple[bytes, ...]:
        """The same for several pieces."""
        return tuple(self.removed(text) for text in texts)
