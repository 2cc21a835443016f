"""Ids to text: with the run's own tokenizer, a named one, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

import gyre_data as gd
from gyre_data.decode import decoder
from gyre_data.errors import ConfigError
from gyre_data.store import SAMPLE
from tests.support.forest import Forest


def test_the_sample_decodes_with_its_own_tokenizer() -> None:
    run = gd.open(SAMPLE)
    decode = decoder(run)
    assert decode is not None
    ids = run["982c"].main.token_ids.tolist()
    assert "Read mon.txt and tue.txt" in decode(ids)
    assert decode(ids) == "".join([decode(ids[:50]), decode(ids[50:])])


def test_without_a_tokenizer_nothing_is_decoded(tmp_path: Path) -> None:
    assert decoder(Forest()) is None
    with gd.RunWriter(tmp_path / "a") as writer:
        writer.update_info({"tokenizer": "/nowhere/at/all"})
    assert decoder(gd.open(tmp_path / "a")) is None
    for named in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="wanted a tokenizer to decode ids with"):
            decoder(gd.open(tmp_path / "a"), named)
    assert decoder(gd.open(tmp_path / "a"), SAMPLE) is not None
