"""The publish contract on `gyre engine`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.publish_contract import PublishContract, make_checkpoints, publisher, receiver
from tests.support.engines import Engine, embedded_engine

__all__ = ["publisher", "receiver"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return make_checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(models: tuple[Path, Path, Path]) -> Iterator[Engine]:
    with embedded_engine(models[0]) as engine:
        yield engine


class TestEmbedded(PublishContract):
    pass
