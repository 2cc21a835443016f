"""Prompts as JSON are the same whatever was written before them."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gyre_proxy.ids_text import IdsText

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(st.lists(st.tuples(st.sampled_from(("longer", "other", "shorter", "same")), IDS), max_size=12))
def test_every_prompt_is_written_whole(steps):
    text, ids = IdsText(), []
    for kind, more in steps:
        ids = {"longer": ids + more, "other": more, "shorter": ids[: len(more)], "same": ids}[kind]
        assert json.loads(text.of(np.array(ids, np.int32))) == ids


def test_what_is_known_is_not_written_again(monkeypatch):
    from gyre_proxy import ids_text

    written, write = [], ids_text._written
    monkeypatch.setattr(ids_text, "_written", lambda ids: written.append(len(ids)) or write(ids))
    text = IdsText()
    for size in (100, 130, 131):
        text.of(np.arange(size, dtype=np.int32))
    assert written == [100, 30, 1]
