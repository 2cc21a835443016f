"""What the embedded engine refuses, and that it says what to do."""

from typing import Any

import pytest

from gyre_train.engine.sampling import parse_sampling
from gyre_train.engine.wire import parse_generate, request_object


def parse(body: dict[str, Any]) -> Any:
    return parse_generate({"input_ids": [1, 2], **body}, vocab_size=10, context_length=200, max_prompt=94)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"temperature": float("nan")}, "non-negative finite"),
        ({"temperature": "hot"}, "must be a number"),
        ({"top_p": 1.5}, r"\(0, 1\]"),
        ({"top_k": -3}, "-1 \\(disable\\) or at least 1"),
        ({"max_new_tokens": 1.5}, "whole number"),
        ({"stop_token_ids": ["<|im_end|>"]}, "list of token ids"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
        ({"min_p": 0.1}, "leave it out"),
        ({"regex": "a+"}, "leave it out"),
        ({"n": 2}, "leave it out"),
        ({"temprature": 1}, "known: .*temperature"),
    ],
)
def test_sampling_is_obeyed_or_refused(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_sampling(raw)


def test_sampling_defaults_are_sglangs() -> None:
    params = parse_sampling({"min_p": 0.0, "n": 1, "stop": None, "skip_special_tokens": False})
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (128, 1.0, 1.0, 0)
    assert parse_sampling({}).seed != parse_sampling({}).seed
    greedy = parse_sampling({"temperature": 0})
    assert (greedy.temperature, greedy.top_k) == (1.0, 1)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input_ids": None, "text": "hi"}, "token ids, never text|leave it out"),
        ({"input_ids": []}, "cannot be empty"),
        ({"input_ids": [[1], [2]]}, "one request for each prompt"),
        ({"input_ids": [True]}, "whole numbers"),
        ({"input_ids": [10]}, r"\[0, 9\], got 10"),
        ({"input_ids": [-1]}, "got -1"),
        ({"input_ids": [1] * 94}, "longer than the model's context length"),
        ({"sampling_params": {"max_new_tokens": 199}}, "ask for fewer new tokens"),
        ({"logprob_start_len": 0}, "outputs only"),
        ({"top_logprobs_num": 3}, "leave it out"),
        ({"rid": 5}, "rid must be a string"),
        ({"sampling_params": [1]}, "must be an object"),
    ],
)
def test_a_request_is_obeyed_or_refused(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(body)


def test_a_salt_is_part_of_the_key() -> None:
    keys = {parse(body).extra_key for body in ({}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "b"})}
    assert len(keys) == 4
    assert parse({}).rid != parse({}).rid


@pytest.mark.parametrize("body", [b"{", b"[1]", b'"x"'])
def test_a_body_must_be_an_object(body: bytes) -> None:
    with pytest.raises(ValueError, match="JSON object"):
        request_object(body)
