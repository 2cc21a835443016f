"""The publish contract on a mixture of experts: `gyre engine` holds them in stacks, a checkpoint one by one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.publish_contract import CONTEXT, PublishContract, publisher, receiver
from tests.support.engines import Engine, embedded_engine
from tests.support.training import tiny_experts

__all__ = ["publisher", "receiver"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    one, two, three = (
        tiny_experts(folder / name, seed=seed, max_position_embeddings=CONTEXT)
        for seed, name in enumerate(("one", "two", "three"))
    )
    return one, two, three


@pytest.fixture(scope="module")
def served(models: tuple[Path, Path, Path]) -> Iterator[Engine]:
    with embedded_engine(models[0]) as engine:
        yield engine


class TestExperts(PublishContract):
    test_weights_that_do_not_fit_leave_no_mix = None  # the same whatever the tensors are
