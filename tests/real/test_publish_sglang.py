"""Weights trained here are served by real SGLang, exactly."""

from pathlib import Path

import pytest

from tests.support.engines import sglang_engine
from tests.support.publishing import check_publish
from tests.support.training import tiny_model

pytestmark = pytest.mark.real


def test_sglang_serves_what_was_trained(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    with sglang_engine(model, "--weight-version", "base:0") as engine:
        check_publish(engine, model, tmp_path)
