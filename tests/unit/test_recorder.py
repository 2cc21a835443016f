import asyncio
import threading

import pytest

from gyre_data.errors import AlignmentError, CaptureError
from gyre_proxy.capture import kept_headers
from gyre_proxy.events import EventLog
from gyre_proxy.recorder import Recorder, Scope, blob_id


class Disk:
    """A writer in memory that can be slow, full, or refuse a row."""

    def __init__(self):
        self.commits, self.blobs = [], []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error = None

    def put_blob(self, data):
        self.blobs.append(data)
        return blob_id(data)

    def write(self, rows):
        self.entered.set()
        assert self.gate.wait(60)
        if self.error:
            raise self.error
        if "bad" in rows:
            raise AlignmentError("a row that cannot be written")
        self.commits.append(list(rows))

    def close(self):
        self.commits.append("closed")


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def recorder(disk):
    recorder = Recorder(disk)
    yield recorder
    disk.gate.set()
    recorder.close()


async def held_up(disk, recorder):
    """A commit that is running, so that the next ones queue up behind it."""
    disk.gate.clear()
    first = asyncio.ensure_future(recorder.commit(["first"]))
    assert await asyncio.to_thread(disk.entered.wait, 60)
    return first


async def test_calls_that_end_during_a_commit_share_the_next_one(disk, recorder):
    first = await held_up(disk, recorder)
    others = [asyncio.ensure_future(recorder.commit([i, -i], [bytes([i])])) for i in range(5)]
    await asyncio.sleep(0)
    assert not any(other.done() for other in others)
    disk.gate.set()
    await asyncio.gather(first, *others)
    assert disk.commits == [["first"], [0, 0, 1, -1, 2, -2, 3, -3, 4, -4]]
    assert disk.blobs == [bytes([i]) for i in range(5)]


async def test_rows_that_nobody_waits_for_go_with_the_next_commit_or_soon(disk, recorder, monkeypatch):
    waits = []
    recorder.observe_wait = waits.append
    with monkeypatch.context() as patch:
        patch.setattr("gyre_proxy.recorder._LATER_S", 3600.0)  # they go with the call's, or not in this test
        recorder.later(["delivered"])
        await recorder.commit(["call"])
    assert disk.commits == [["delivered", "call"]]
    assert len(waits) == 1
    recorder.later(["abandoned"])
    while len(disk.commits) < 2:
        await asyncio.sleep(0.02)
    assert disk.commits[1] == ["abandoned"]


async def test_a_failed_commit_fails_every_call_in_it_and_what_builds_on_them(disk, recorder):
    first = await held_up(disk, recorder)
    scope = Scope()
    one, two = asyncio.ensure_future(recorder.commit([1], scope=scope)), asyncio.ensure_future(recorder.commit([2]))
    await asyncio.sleep(0)
    disk.error = OSError(28, "No space left on device")
    disk.gate.set()
    for failing in (first, one, two):
        with pytest.raises(CaptureError, match="No space left on device; free the disk"):
            await failing
    disk.error = None
    with pytest.raises(CaptureError, match="earlier call of this execution"):
        await recorder.commit([3], scope=scope)
    await recorder.commit([4])
    assert disk.commits == [[4]]


async def test_a_row_that_cannot_be_written_fails_its_own_call_only(disk, recorder):
    first = await held_up(disk, recorder)
    good, bad, more = (asyncio.ensure_future(recorder.commit([row])) for row in ("good", "bad", "more"))
    await asyncio.sleep(0)
    disk.gate.set()
    await asyncio.gather(first, good, more)
    with pytest.raises(CaptureError, match="a row that cannot be written"):
        await bad
    assert disk.commits == [["first"], ["good"], ["more"]]


async def test_closing_writes_what_is_queued_and_takes_no_more(disk):
    recorder = Recorder(disk)
    recorder.later(["event"])
    await asyncio.to_thread(recorder.close)
    assert disk.commits == [["event"], "closed"]
    with pytest.raises(CaptureError, match="start the proxy again"):
        await recorder.commit([1])


def test_only_headers_that_say_who_called_are_kept():
    sent = {
        "user-agent": "claude-cli/2.1",
        "x-claude-code-session-id": "s",
        "x-claude-code-auth-token": "t",
        "authorization": "Bearer secret",
        "x-api-key": "secret",
        "cookie": "c",
        "x-forwarded-for": "10.0.0.1",
        "x-stainless-retry-count": "1",
    }
    assert kept_headers(sent) == {
        "user-agent": "claude-cli/2.1",
        "x-claude-code-session-id": "s",
        "x-stainless-retry-count": "1",
    }


async def test_events_are_numbered_bounded_and_tell_a_follower_what_it_missed():
    log = EventLog(capacity=3, start=10)
    assert log.read(0) == {"events": [], "next": 10, "oldest": 10}
    for i in range(5):
        log.add("tick", i=i)
    found = log.read(11)
    assert ([event["i"] for event in found["events"]], found["next"], found["oldest"]) == ([2, 3, 4], 15, 12)
    assert [event["seq"] for event in log.read(13, limit=1)["events"]] == [13]
    assert log.read(13, limit=1)["next"] == 14
    assert log.read(99)["next"] == 15  # a follower of an earlier process with a fast clock starts again
    assert (await log.wait(15, 10, 0.01))["events"] == []


def test_a_restarted_log_goes_on_above_the_old_one():
    old = EventLog()
    old.add("tick")
    assert EventLog().read(0)["next"] >= old.read(0)["next"] - 1
