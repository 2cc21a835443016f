"""The engine contract on real SGLang, the reference: what passes here is what the embedded engine must do too."""

from collections.abc import Iterator

import pytest

from tests.contract.engine_contract import EngineContract, Models, make_models
from tests.support.engines import Engine, sglang_engine

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(models: Models) -> Iterator[Engine]:
    with sglang_engine(models.first, "--weight-version", "a:0") as engine:
        yield engine


class TestSGLang(EngineContract):
    pass
