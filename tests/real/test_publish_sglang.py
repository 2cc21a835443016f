"""The publish contract on real SGLang, and a training run that publishes to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.publish_contract import PublishContract, make_checkpoints, publisher, receiver
from tests.support.engines import Engine, sglang_engine
from tests.support.publishing import check_publish

__all__ = ["publisher", "receiver"]

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return make_checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(models: tuple[Path, Path, Path]) -> Iterator[Engine]:
    with sglang_engine(models[0], "--weight-version", "base:0") as engine:
        yield engine


class TestSGLang(PublishContract):
    pass


def test_what_was_trained_is_served(served: Engine, models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    served.post("/update_weights_from_disk", {"model_path": str(models[0]), "weight_version": "base:0"})
    check_publish(served, models[0], tmp_path)
