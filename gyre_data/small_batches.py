"""Many small record batches of a plain segment as few large ones, without an Arrow array for each column of each.

A proxy commits a call at a time, so a hundred million tokens are 63,000 batches in each of three tables. Arrow takes 50
to 100 µs for one, most of it column by column. Here each column of thousands of batches is one piece of work: where its
buffers lie stands in the batches' headers, and those are alike byte for byte but for numbers, since the schema is one.

Nothing is trusted. Headers must equal the first one in all but those numbers, buffers must lie in their batch, offsets
must rise, and whoever takes the result has Arrow validate it. What does not fit is left to Arrow's own reader, which
knows what to say.

Legend: B batches, R rows of all of them, F field nodes, K buffers of a batch.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["batches_of"]

_FEW_BATCHES = 64
_SMALL_ROWS = 64
_AT_ONCE_BYTES = 16 << 20
"""Of the file, that become one batch."""

_HEAD_BYTES = 8  # of the file, and of each message: a mark and the size of its header
_MARK = 0xFFFFFFFF
_RECORD_BATCH = 3  # of the header types in Arrow's Message.fbs

Longs = npt.NDArray[np.int64]


class _Misfit(Exception):
    """These bytes are not what this module reads; they may be sound or not."""


def batches_of(
    reader: pa.ipc.RecordBatchFileReader,
    data: pa.Buffer,
    num_rows: int,
    names: Sequence[str],
    lengths_of: Collection[str] = (),
) -> Iterator[pa.RecordBatch]:
    """The columns `names` of every batch of `reader`, which reads the plain segment `data` of `num_rows` rows.

    Large batches as they are, viewing `data`; many small ones copied into few. Of the lists in `lengths_of` only the
    lengths are wanted, and what is copied holds zeros. Not validated. Errors are Arrow's.
    """
    count, at = reader.num_record_batches, 0
    if count > _FEW_BATCHES and num_rows < count * _SMALL_ROWS:
        try:
            layout = _layout(data, reader.schema)
            start_B1 = _starts(data, layout, count)
        except (_Misfit, struct.error):
            start_B1 = np.zeros(1, np.int64)
        while at < len(start_B1) - 1:
            end = max(int(np.searchsorted(start_B1, start_B1[at] + _AT_ONCE_BYTES)) - 1, at + 1)
            try:
                yield _Block(data, layout, start_B1[at : end + 1]).batch(reader.schema, names, lengths_of)
            except _Misfit:
                yield from (reader.get_batch(i).select(names) for i in range(at, end))
            at = end
    yield from (reader.get_batch(i).select(names) for i in range(at, count))


# --- headers: flatbuffers, as Arrow's Message.fbs has them ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where the numbers of a batch stand in its header; places are in words of 8 bytes from the header's begin."""

    header: Longs
    """The first batch's, to hold the others against."""
    body_bytes: int
    num_rows: int
    nodes: slice
    """Of each field node its length and its number of nulls."""
    buffers: slice
    """Of each buffer its place in the body and its bytes."""

    def alike(self, head_BW: Longs) -> bool:
        """Whether these headers are the first one in all but numbers."""
        same_W = (head_BW == self.header).all(axis=0)
        same_W[[self.body_bytes, self.num_rows]] = same_W[self.nodes] = same_W[self.buffers] = True
        return bool(same_W.all())


def _layout(data: pa.Buffer, schema: pa.Schema) -> _Layout:
    """That of the first batch, which comes after the schema."""
    view = memoryview(data)
    mark, schema_bytes = struct.unpack_from("<Ii", view, _HEAD_BYTES)
    start = 2 * _HEAD_BYTES + schema_bytes
    mark, size = struct.unpack_from("<Ii", view, start)
    if mark != _MARK or size <= 0 or size % 8:
        raise _Misfit
    head = view[start + 8 : start + 8 + size]
    message = _number("<I", head, 0)
    header_type, body_bytes = _slot(head, message, 1), _slot(head, message, 3)
    batch = _follow(head, _slot(head, message, 2))
    nodes, buffers = (_follow(head, _slot(head, batch, n)) for n in (1, 2))
    num_nodes, num_buffers = _number("<I", head, nodes), _number("<I", head, buffers)
    extents = [_extent(field.type) for field in schema]
    if (
        _number("<B", head, header_type) != _RECORD_BATCH
        or _slot(head, batch, 3)  # compressed
        or (num_nodes, num_buffers) != (sum(f for f, _ in extents), sum(k for _, k in extents))
    ):
        raise _Misfit
    return _Layout(
        header=np.frombuffer(head, "<i8"),
        body_bytes=_word(body_bytes),
        num_rows=_word(_slot(head, batch, 0)),
        nodes=slice(_word(nodes + 4), _word(nodes + 4) + 2 * num_nodes),
        buffers=slice(_word(buffers + 4), _word(buffers + 4) + 2 * num_buffers),
    )


def _number(form: str, head: memoryview, at: int) -> int:
    if at < 0:
        raise _Misfit
    return int(struct.unpack_from(form, head, at)[0])


def _slot(head: memoryview, table: int, number: int) -> int:
    """Place of a field of the table at `table`; 0 when it is not there."""
    vtable = table - _number("<i", head, table)
    at = 4 + 2 * number
    offset = _number("<H", head, vtable + at) if at < _number("<H", head, vtable) else 0
    return table + offset if offset else 0


def _follow(head: memoryview, at: int) -> int:
    """Where the offset at `at` leads."""
    if not at:
        raise _Misfit
    return at + _number("<I", head, at)


def _word(at: int) -> int:
    if not at or at % 8:
        raise _Misfit
    return at // 8


def _starts(data: pa.Buffer, layout: _Layout, count: int) -> Longs:
    """Where each batch's message begins, and where the last one ends. Each must begin where the one before ends."""
    view, head_bytes = memoryview(data), 8 * len(layout.header)
    read, body_at = struct.Struct("<Ii").unpack_from, 8 + 8 * layout.body_bytes
    body_of = struct.Struct("<q").unpack_from
    at = 2 * _HEAD_BYTES + struct.unpack_from("<i", view, _HEAD_BYTES + 4)[0]
    found = [at]
    for _ in range(count):
        (body,) = body_of(view, at + body_at)
        if read(view, at) != (_MARK, head_bytes) or body < 0 or body % 8:
            raise _Misfit
        at += 8 + head_bytes + body
        found.append(at)
    if at > data.size:
        raise _Misfit
    return np.array(found, np.int64)


@cache
def _extent(type_: pa.DataType) -> tuple[int, int]:
    """Field nodes and buffers of a column of this type."""
    if pa.types.is_struct(type_):
        inner, own = [type_.field(i).type for i in range(type_.num_fields)], 1
    elif pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner, own = [type_.value_type], 2
    elif _is_text(type_):
        inner, own = [], 3
    elif pa.types.is_primitive(type_):
        inner, own = [], 2
    else:
        raise _Misfit
    below = [_extent(one) for one in inner]
    return 1 + sum(f for f, _ in below), own + sum(k for _, k in below)


def _is_text(type_: pa.DataType) -> bool:
    kinds = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
    return any(kind(type_) for kind in kinds)


# --- columns ----------------------------------------------------------------------------------------------------------


class _Block:
    """Some batches that lie one after the other."""

    def __init__(self, data: pa.Buffer, layout: _Layout, start_B1: Longs) -> None:
        self._data = data
        head_bytes = 8 * len(layout.header)
        heads = _pieces(data, start_B1[:-1] + 8, start_B1[:-1] + 8 + head_bytes)
        head_BW = np.frombuffer(heads, "<i8").reshape(-1, len(layout.header))
        if not layout.alike(head_BW):
            raise _Misfit
        self._body_B = start_B1[:-1] + 8 + head_bytes
        self._num_rows_B = head_BW[:, layout.num_rows]
        self._length_BF, self._nulls_BF = (head_BW[:, layout.nodes][:, i::2] for i in (0, 1))
        self._place_BK, self._bytes_BK = (head_BW[:, layout.buffers][:, i::2] for i in (0, 1))
        room_B1 = (start_B1[1:] - self._body_B)[:, None]
        inside = (self._place_BK >= 0) & (self._bytes_BK >= 0) & (self._place_BK <= room_B1)
        inside &= (self._bytes_BK <= room_B1 - self._place_BK) & (self._place_BK % 8 == 0)
        if not inside.all() or (self._length_BF < 0).any():
            raise _Misfit

    def batch(self, schema: pa.Schema, names: Sequence[str], lengths_of: Collection[str]) -> pa.RecordBatch:
        """The rows of all batches in one."""
        found: dict[str, pa.Array] = {}
        node = buffer = 0
        for field in schema:
            if (self._length_BF[:, node] != self._num_rows_B).any():
                raise _Misfit
            if field.name in names:
                found[field.name] = self._array(field.type, node, buffer, field.name in lengths_of)
            below = _extent(field.type)
            node, buffer = node + below[0], buffer + below[1]
        fields = [schema.field(name) for name in names]
        return pa.RecordBatch.from_arrays([found[name] for name in names], schema=pa.schema(fields, schema.metadata))

    def _array(self, type_: pa.DataType, node: int, buffer: int, hollow: bool = False) -> pa.Array:
        """The column, or part of one, whose field nodes and buffers begin with these. A hollow list holds zeros."""
        length_B = self._length_BF[:, node]
        num_rows, valid = int(length_B.sum()), self._valid(node, buffer)
        if pa.types.is_struct(type_):
            children, below, after = [], node + 1, buffer + 1
            for field in (type_.field(i) for i in range(type_.num_fields)):
                if (self._length_BF[:, below] != length_B).any():
                    raise _Misfit
                children.append(self._array(field.type, below, after))
                below, after = below + _extent(field.type)[0], after + _extent(field.type)[1]
            return pa.Array.from_buffers(type_, num_rows, [valid], children=children)
        if pa.types.is_list(type_) or pa.types.is_large_list(type_):
            offsets, first_B, last_B = self._offsets(length_B, buffer + 1, 8 if pa.types.is_large_list(type_) else 4)
            if first_B.any() or (last_B != self._length_BF[:, node + 1]).any():
                raise _Misfit  # a list that shows a part of its values; no writer of ours makes one
            if hollow:  # pages that nobody touches take no memory
                if (last_B * (type_.value_type.bit_width // 8) > self._bytes_BK[:, buffer + 3]).any():
                    raise _Misfit
                values = pa.array(np.zeros(int(last_B.sum()), type_.value_type.to_pandas_dtype()))
            else:
                values = self._array(type_.value_type, node + 1, buffer + 2)
            return pa.Array.from_buffers(type_, num_rows, [valid, offsets], children=[values])
        if _is_text(type_):
            wide = pa.types.is_large_string(type_) or pa.types.is_large_binary(type_)
            offsets, first_B, last_B = self._offsets(length_B, buffer + 1, 8 if wide else 4)
            text = self._join(buffer + 2, last_B - first_B, first_B)
            return pa.Array.from_buffers(type_, num_rows, [valid, offsets, text])
        if pa.types.is_boolean(type_):
            bits = self._bits(buffer + 1, length_B)
            return pa.Array.from_buffers(type_, num_rows, [valid, _packed(bits)])
        values = self._join(buffer + 1, length_B * (type_.bit_width // 8))
        return pa.Array.from_buffers(type_, num_rows, [valid, values])

    def _join(self, buffer: int, bytes_B: Longs, skip_B: Longs | int = 0) -> pa.Buffer:
        """So many bytes of a buffer of each batch, one after the other."""
        if (skip_B + bytes_B > self._bytes_BK[:, buffer]).any():
            raise _Misfit
        start_B = self._body_B + self._place_BK[:, buffer] + skip_B
        return _pieces(self._data, start_B, start_B + bytes_B)

    def _valid(self, node: int, buffer: int) -> pa.Buffer | None:
        """Bits of the rows that are not null; None when all are. A batch without nulls need not have any."""
        nulls_B, length_B = self._nulls_BF[:, node], self._length_BF[:, node]
        if not nulls_B.any():
            return None
        has_B = nulls_B != 0
        valid_R = np.ones(int(length_B.sum()), np.bool_)
        valid_R[np.repeat(has_B, length_B)] = self._bits(buffer, np.where(has_B, length_B, 0))
        null_R1 = np.concatenate([[0], np.cumsum(~valid_R)])
        end_B = np.cumsum(length_B)
        if (null_R1[end_B] - null_R1[end_B - length_B] != nulls_B).any():
            raise _Misfit
        return _packed(valid_R)

    def _bits(self, buffer: int, length_B: Longs) -> npt.NDArray[np.bool_]:
        """So many bits of each batch; each begins with a byte of its own."""
        bytes_B = (length_B + 7) // 8
        bits = np.unpackbits(np.frombuffer(self._join(buffer, bytes_B), np.uint8), bitorder="little")
        skipped_B = np.cumsum(8 * bytes_B - length_B) - (8 * bytes_B - length_B)
        found = bits[np.arange(int(length_B.sum())) + np.repeat(skipped_B, length_B)]
        return np.asarray(found, np.bool_)

    def _offsets(self, length_B: Longs, buffer: int, width: int) -> tuple[pa.Buffer, Longs, Longs]:
        """Offsets of all rows, and of each batch the first and the last that it had."""
        some_B = length_B > 0
        raw = self._join(buffer, np.where(some_B, (length_B + 1) * width, 0))
        offset = np.frombuffer(raw, f"<i{width}").astype(np.int64)
        low_R = np.arange(int(length_B.sum())) + np.repeat(np.cumsum(some_B) - 1, length_B)
        size_R = offset[low_R + 1] - offset[low_R]
        end_B = np.cumsum(length_B + some_B)
        first_B, last_B = np.zeros(len(length_B), np.int64), np.zeros(len(length_B), np.int64)
        first_B[some_B], last_B[some_B] = offset[(end_B - length_B - 1)[some_B]], offset[(end_B - 1)[some_B]]
        if (size_R < 0).any() or (first_B < 0).any() or int(size_R.sum()) > np.iinfo(f"i{width}").max:
            raise _Misfit
        out = np.concatenate([np.zeros(1, np.int64), np.cumsum(size_R)])
        return pa.py_buffer(out.astype(f"<i{width}")), first_B, last_B


def _pieces(data: pa.Buffer, start_B: Longs, end_B: Longs) -> pa.Buffer:
    """The bytes [start, end) of each of many ascending pieces of `data`, copied one after the other.

    Arrow sees pieces and gaps as one binary column, and takes the pieces: some nanoseconds for each.
    """
    cuts = pa.py_buffer(np.column_stack([start_B, end_B]).ravel())
    column = pa.Array.from_buffers(pa.large_binary(), 2 * len(start_B) - 1, [None, cuts, data])
    return column.take(pa.array(np.arange(0, len(column), 2))).buffers()[2]


def _packed(bits: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(bits, bitorder="little"))
