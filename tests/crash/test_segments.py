"""A growing segment cut, zero-filled or flipped at any byte gives back exactly a prefix of what was committed."""

import zlib
from functools import cache
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_data.arrays import from_table, to_batches
from gyre_data.commit_log import RECORD_BYTES, encode_record, read_log
from gyre_data.errors import CaptureError, CorruptError
from gyre_data.growing import read_open
from gyre_data.segment import SegmentWriter, open_sealed, write_sealed
from tests.support.rows import one_call

FILES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def commits():
    """Six commits of nodes, one of them in two batches."""
    made = [one_call(i)[:2] for i in range(8)]
    return [made[0], made[1] + made[2], made[3], made[4], made[5] + made[6], made[7]]


@cache
def written(folder: Path) -> tuple[bytes, bytes, tuple[int, ...], tuple[int, ...]]:
    """Data, log, end of data and rows after each commit."""
    folder.mkdir()
    segment = SegmentWriter(folder, "w0-000001", "nodes")
    ends, rows = [], []
    for number, commit in enumerate(commits()):
        parts = [commit] if number != 1 else [commit[:2], commit[2:]]
        segment.append([batch for part in parts for batch in to_batches("nodes", part)])
        ends.append(segment.end)
        rows.append(segment.num_rows)
    segment.close()
    return segment.data_path.read_bytes(), segment.log_path.read_bytes(), tuple(ends), tuple(rows)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return written(tmp_path_factory.mktemp("segment") / "nodes")


def check_prefix(folder: Path, data: bytes, log: bytes, original, known=None):
    """Read `data` + `log`: the rows of exactly those commits whose bytes and records, and all before, are intact."""
    whole, whole_log, ends, rows = original
    good = 0
    for number, end in enumerate(ends, 1):
        same_log = log[: number * RECORD_BYTES] == whole_log[: number * RECORD_BYTES]
        if data[:end] != whole[:end] or not same_log:
            break
        good = number
    path = folder / "x.open"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    found = read_open(path, log, known)
    assert found.num_rows == (rows[good - 1] if good else 0)
    assert found.end == (ends[good - 1] if good else 0)
    assert found.data_tail == len(data) - found.end
    assert found.log_tail == len(log) - good * RECORD_BYTES
    names = [n for batch in found.batches() for n in batch.column("node_id").to_pylist()]
    assert names == [node.node_id for commit in commits()[:good] for node in commit]
    return found, good


@FILES
@given(data=st.data())
def test_cut_anywhere(tmp_path, original, data):
    whole, log, _, _ = original
    data_cut = data.draw(st.integers(0, len(whole)))
    log_cut = data.draw(st.integers(0, len(log)))
    data_zeros, log_zeros = data.draw(st.integers(0, 5000)), data.draw(st.integers(0, 50))
    cut = whole[:data_cut] + bytes(data_zeros)
    cut_log = log[:log_cut] + bytes(log_zeros)
    found, _ = check_prefix(tmp_path, cut, cut_log, original)
    if found.num_rows:
        sealed = write_sealed(tmp_path / "y.arrow", found.schema, found.batches())
        _, batches = open_sealed(tmp_path / "y.arrow", sealed, full=True)
        assert sum(b.num_rows for b in batches) == found.num_rows
        # The same writer, the same batches: the sealed copy begins with the very bytes that were committed.
        assert (tmp_path / "y.arrow").read_bytes()[: found.end] == whole[: found.end]


def test_every_cut_of_the_log_and_every_commit_boundary(tmp_path, original):
    whole, log, ends, _ = original
    for cut in range(len(log) + 1):
        check_prefix(tmp_path, whole, log[:cut], original)
    for end in ends:
        for cut in (end - 1, end, end + 1):
            check_prefix(tmp_path, whole[:cut], log, original)


@FILES
@given(data=st.data())
def test_flip_anywhere(tmp_path, original, data):
    whole, log, _, _ = original
    bit = data.draw(st.integers(0, 8 * (len(whole) + len(log)) - 1))
    flipped = bytearray(whole + log)
    flipped[bit // 8] ^= 1 << bit % 8
    found, good = check_prefix(tmp_path, bytes(flipped[: len(whole)]), bytes(flipped[len(whole) :]), original)
    assert good < len(commits())
    assert found.damage is not None


@FILES
@given(data=st.data())
def test_reading_on_equals_reading_afresh(tmp_path, original, data):
    whole, log, ends, _ = original
    first = data.draw(st.integers(0, len(ends)))
    then = data.draw(st.integers(0, len(ends)))
    known, _ = check_prefix(tmp_path, whole, log[: first * RECORD_BYTES], original)
    found, good = check_prefix(tmp_path, whole, log[: then * RECORD_BYTES], original, known)
    assert good == then
    if first <= then:
        assert [*known.batches(), *found.batches(known)] == list(found.batches())
        assert found.mapped is known.mapped


def test_reads_are_zero_copy(tmp_path, original):
    whole, log, _, _ = original
    (tmp_path / "x.open").write_bytes(whole)
    before = pa.total_allocated_bytes()
    found = read_open(tmp_path / "x.open", log)
    nodes = from_table("nodes", pa.Table.from_batches(list(found.batches())))
    assert nodes[0].token_ids.tolist() == [0, 1, 2]
    # Strings and spans become Python objects; no Arrow buffer was allocated for them or for any token.
    assert pa.total_allocated_bytes() - before < 1024
    found_again = read_open(tmp_path / "x.open", log)
    values = next(found.batches()).column("token_ids").values.buffers()[1]
    again = next(found_again.batches()).column("token_ids").values.buffers()[1]
    assert values.address != again.address
    assert values.equals(again)


def test_record_is_twenty_bytes_as_documented():
    record = encode_record(4096, 7, 0xDEADBEEF)
    assert record[:16] == (4096).to_bytes(8, "little") + (7).to_bytes(4, "little") + 0xDEADBEEF.to_bytes(4, "little")
    assert record[16:] == zlib.crc32(record[:16]).to_bytes(4, "little")
    (read,), damage = read_log(record)
    assert (read.end, read.num_rows, read.crc32, damage) == (4096, 7, 0xDEADBEEF, None)


def test_sealed_flip_anywhere(tmp_path, original):
    whole, log, _, _ = original
    (tmp_path / "x.open").write_bytes(whole)
    found = read_open(tmp_path / "x.open", log)
    sealed = write_sealed(tmp_path / "y.arrow", found.schema, found.batches())
    good = (tmp_path / "y.arrow").read_bytes()
    for at in range(0, len(good), 37):
        bad = bytearray(good)
        bad[at] ^= 4
        (tmp_path / "y.arrow").write_bytes(bad)
        with pytest.raises(CorruptError, match="restore the file"):
            open_sealed(tmp_path / "y.arrow", sealed, full=True)
    (tmp_path / "y.arrow").write_bytes(good[:-1])
    with pytest.raises(CorruptError, match=r"wanted .* bytes"):
        open_sealed(tmp_path / "y.arrow", sealed)


def test_two_writers_never_share_a_name(tmp_path):
    first = SegmentWriter(tmp_path, "w0-000001", "nodes")
    with pytest.raises(FileExistsError):
        SegmentWriter(tmp_path, "w0-000001", "nodes")
    first.close()


def test_a_broken_segment_says_so(tmp_path, monkeypatch):
    segment = SegmentWriter(tmp_path, "w0-000001", "nodes")
    segment.append(to_batches("nodes", one_call(0)[:2]))

    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", full)
        with pytest.raises(OSError, match="No space"):
            segment.append(to_batches("nodes", one_call(1)[:2]))
    with pytest.raises(CaptureError, match="start a new one"):
        segment.append(to_batches("nodes", one_call(1)[:2]))
    segment.close()
    assert read_open(segment.data_path, segment.log_path.read_bytes()).num_rows == 2


def test_the_record_of_a_failed_append_is_taken_back_at_once(tmp_path, monkeypatch):
    """Data and record are written whole, only the sync fails: a reader must not see rows that were refused."""
    segment = SegmentWriter(tmp_path, "w0-000001", "nodes")
    segment.append(to_batches("nodes", one_call(0)[:2]))
    failing = [OSError(5, "Input/output error")]

    def sync(fd):
        if failing:
            raise failing.pop()

    monkeypatch.setattr("gyre_data.segment._sync", sync)
    with pytest.raises(OSError, match="Input/output"):
        segment.append(to_batches("nodes", one_call(1)[:2]))
    assert segment.taken_back
    assert read_open(segment.data_path, segment.log_path.read_bytes()).num_rows == 2
    segment.close()
