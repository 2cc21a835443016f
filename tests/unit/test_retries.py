from itertools import product

import pytest

from gyre_proxy.retries import Earlier, Verdict, judge


def test_a_first_request_is_new():
    assert judge(None) is Verdict.NEW


@pytest.mark.parametrize(
    ("earlier", "verdict"),
    [
        (Earlier(sampling=True, connected=True, delivered=False), Verdict.SIBLING),
        (Earlier(sampling=True, connected=False, delivered=False), Verdict.ATTACH),
        (Earlier(sampling=False, connected=False, delivered=False), Verdict.LOST),
        (Earlier(sampling=False, connected=True, delivered=False), Verdict.SIBLING),
        (Earlier(sampling=False, connected=False, delivered=True), Verdict.SIBLING),
        (Earlier(sampling=False, connected=False, delivered=False, ok=False), Verdict.SIBLING),
    ],
)
def test_what_became_of_the_first_connection_decides(earlier, verdict):
    assert judge(earlier) is verdict


def test_a_lost_reply_is_replayed_only_by_config_and_nothing_else_changes():
    for sampling, connected, delivered, ok in product([True, False], repeat=4):
        earlier = Earlier(sampling=sampling, connected=connected, delivered=delivered, ok=ok)
        usual, replaying = judge(earlier), judge(earlier, replay_lost=True)
        assert replaying is (Verdict.REPLAY if usual is Verdict.LOST else usual)
