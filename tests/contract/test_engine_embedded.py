"""The engine contract on `gyre engine`, and what it refuses where SGLang would crash."""

from collections.abc import Iterator

import pytest

from tests.contract.engine_contract import CONTEXT, PROMPT, VOCAB, EngineContract, Models, logprobs_of, make_models
from tests.support.engines import Background, Engine, embedded_engine, request


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(models: Models) -> Iterator[Engine]:
    with embedded_engine(models.first, "--weight-version", "a:0") as engine:
        yield engine


class TestEmbedded(EngineContract):
    @pytest.mark.parametrize("wrong", [VOCAB, -1, 10**12])
    def test_ids_outside_the_vocabulary_are_refused(self, engine: Engine, wrong: int) -> None:
        response = engine.post("/generate", request([*PROMPT, wrong]))
        assert response.status_code == 400
        assert str(wrong) in response.json()["error"]["message"]
        assert len(engine.generate(PROMPT)["output_ids"]) == 16

    def test_stopping_ends_open_requests_with_what_they_have(self, models: Models) -> None:
        with embedded_engine(models.first) as own:
            running = Background(own, PROMPT, max_new_tokens=CONTEXT - 100)
            running.wait_for(3)
        reply = running.result()
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(logprobs_of(reply)) >= 3

    def test_a_seeded_request_is_repeatable(self, engine: Engine) -> None:
        one, two = (engine.generate(PROMPT, temperature=1.0, sampling_seed=11) for _ in range(2))
        other = engine.generate(PROMPT, temperature=1.0, sampling_seed=12)
        assert one["output_ids"] == two["output_ids"] != other["output_ids"]
