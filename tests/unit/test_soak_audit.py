"""The soak's audit finds each kind of fault that is planted, and nothing where there is none."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import _soak_audit
    import _soak_harness
    import _soak_world

    return _soak_audit, _soak_harness, _soak_world


def sound(kinds):
    """Two replies, each recorded and trained once; the second moved to another engine and other weights."""
    calls = [
        kinds.Recorded(
            call_id=f"c{n}", execution=f"e{n}", output_node=f"n{n}", text="said", tokens=5, num_ids=5, num_logprobs=5,
            spans=((0, 5),), attempts=((0, 2), (2, 5)),
        )
        for n in range(2)
    ]  # fmt: skip
    names = ("msg_c0", "chatcmpl-c1")
    return kinds.Evidence(
        replies=[
            kinds.Reply(reply=name, execution=f"e{n}", text="said", tokens=5 if n else None)
            for n, name in enumerate(names)
        ],
        calls=calls,
        trained=[(1, "e0", "n0"), (1, "e1", "n1"), (1, "e1", "other")],
        made=[1, 2],
        applied=[1],
        groups={"g": ("finished", "infra_fault", "crashed"), "late": ("finished", None)},
        open_groups=frozenset({"late"}),
        group_size=2,
    )


def test_what_is_sound_is_found_sound(parts):
    kinds, _, _ = parts
    assert kinds.audit(sound(kinds)) == {kind: [] for kind in kinds.KINDS}


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("lost", lambda e: replace(e, calls=e.calls[:1])),
        ("differ", lambda e: replace(e, replies=[replace(e.replies[0], text="sai"), e.replies[1]])),
        ("differ", lambda e: replace(e, replies=[replace(e.replies[0], execution="e9"), e.replies[1]])),
        ("differ", lambda e: replace(e, replies=[e.replies[0], replace(e.replies[1], tokens=4)])),
        ("doubled", lambda e: replace(e, calls=[*e.calls, e.calls[0]])),
        ("doubled", lambda e: replace(e, calls=[*e.calls, replace(e.calls[0], call_id="c9")])),
        ("doubled", lambda e: replace(e, calls=[replace(e.calls[0], num_ids=6, num_logprobs=6), e.calls[1]])),
        ("doubled", lambda e: replace(e, calls=[replace(e.calls[0], attempts=((0, 3), (2, 5))), e.calls[1]])),
        ("doubled", lambda e: replace(e, calls=[replace(e.calls[0], spans=((0, 4),)), e.calls[1]])),
        ("consumed", lambda e: replace(e, trained=[*e.trained, (2, "e0", "another")])),
        ("consumed", lambda e: replace(e, trained=[*e.trained, e.trained[0]])),
        ("versions", lambda e: replace(e, made=[1, 1])),
        ("versions", lambda e: replace(e, applied=[1, 3])),
        ("versions", lambda e: replace(e, made=[])),
        ("groups", lambda e: replace(e, groups={"g": ("finished", "infra_fault", None)})),
        ("verify", lambda e: replace(e, problems=["a byte was flipped"])),
        ("ends", lambda e: replace(e, ends=["proxy"])),
    ],
)
def test_a_planted_fault_of_each_kind_is_found(parts, kind, plant):
    kinds, _, _ = parts
    found = kinds.audit(plant(sound(kinds)))
    assert [name for name, some in found.items() if some] == [kind]


def test_a_group_that_was_dropped_by_rule_is_no_fault(parts):
    kinds, _, _ = parts
    lacking = replace(sound(kinds), groups={"g": ("finished", "infra_fault")})
    assert kinds.audit(lacking)["groups"] == ["g ended as ['finished', 'infra_fault']"]
    assert kinds.audit(replace(lacking, dropped=1))["groups"] == []


def test_executions_that_have_not_ended_are_told_as_at_work(parts):
    import soak

    kinds, _, _ = parts
    ends = soak._counts(sound(kinds))["execution_ends"]
    assert ends == {"at work": 1, "crashed": 1, "finished": 2, "infra_fault": 1}


STREAM = (
    b'event: message_start\ndata: {"type": "message_start", "message": {"id": "msg_c1", "usage": {}}}\n\n'
    b'data: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a\xc3\xa4"}}\n\n'
    b'data: {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}\n\n'
)
STOP = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
CHAT = b'data: {"id": "chatcmpl-c2", "choices": [{"delta": {"content": "b"}}]}\n\n'


def test_only_a_reply_that_came_to_its_end_was_acknowledged(parts):
    _, harness, _ = parts
    told = {"reply": "msg_c1", "text": "aä", "tokens": 3, "wire": "anthropic"}
    assert harness.reply_of("/v1/messages", "text/event-stream", STREAM + STOP) == told
    assert harness.reply_of("/v1/messages", "text/event-stream", STREAM) is None
    chat = {"reply": "chatcmpl-c2", "text": "b", "tokens": None, "wire": "openai_chat"}
    assert harness.reply_of("/v1/chat/completions", "text/event-stream", CHAT + b"data: [DONE]\n\n") == chat
    assert harness.reply_of("/v1/chat/completions", "text/event-stream", CHAT) is None
    assert harness.reply_of("/v1/messages", "application/json", b'{"type": "error", "error": {}}') is None


def test_the_schedule_is_the_seeds_and_has_every_kind_before_any_again(parts):
    _, _, world = parts
    drawn = world.schedule(7, 3600.0, (60.0, 240.0))
    assert drawn == world.schedule(7, 3600.0, (60.0, 240.0)) != world.schedule(8, 3600.0, (60.0, 240.0))
    assert {fault.kind for fault in drawn[: len(world.FAULTS)]} == set(world.FAULTS)
    gaps = [after.at_s - before.at_s for before, after in pairwise(drawn)]
    assert all(60.0 <= gap <= 240.0 for gap in gaps)
