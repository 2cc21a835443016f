"""The batching loop never mixes requests up, whatever arrives, leaves or pauses when."""

from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gyre_train.engine.loop import EngineLoop, LoopSettings
from gyre_train.engine.model import Model
from gyre_train.engine.sampling import SamplingParams
from gyre_train.engine.sequence import Sequence
from gyre_train.tiny import make_tiny

VOCAB = 300
MAX_NEW = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, vocab=VOCAB, hidden=32, heads=4, kv_heads=2, context=512, init_std=0.2, texts=["a b c"])
    return Model(folder)


def make_loop(model: Model, max_running: int = 4, max_total_tokens: int = 300) -> EngineLoop:
    limits = LoopSettings(
        context_length=512, max_running=max_running, max_total_tokens=max_total_tokens, prefill_tokens=16
    )
    return EngineLoop(model, limits, "a:0")


def make_sequence(prompt: list[int], seed: int, extra_key: str = "", temperature: float = 1.0) -> Sequence:
    return Sequence(
        rid=f"r{seed}.",
        prompt_ids=np.array(prompt, dtype=np.int32),
        params=SamplingParams(max_new_tokens=MAX_NEW, seed=seed, temperature=temperature, ignore_eos=True),
        extra_key=extra_key,
        on_change=lambda: None,
    )


def run_alone(model: Model, sequence: Sequence) -> Sequence:
    loop = make_loop(model)
    twin = make_sequence(
        sequence.prompt_ids.tolist(), sequence.params.seed, sequence.extra_key or "", sequence.params.temperature
    )
    loop.submit(twin)
    while twin.finish_reason is None:
        loop.advance()
    return twin


# A prompt is a walk in a small tree of shared beginnings, then a tail of its own: prefixes are hit all the time.
prompts = st.tuples(
    st.sampled_from([[], list(range(20, 60)), list(range(20, 45)), list(range(100, 103))]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
).map(lambda parts: parts[0] + parts[1])
actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prompts, st.sampled_from(["", "k"])),
        st.tuples(st.just("advance"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 12)),
        st.tuples(st.sampled_from(["retract", "in_place", "flush"])),
    ),
    min_size=3,
    max_size=25,
)


# A long prompt is still being read while a later, short one already samples.
@example(actions=[("submit", list(range(60)), ""), ("submit", [5], ""), ("submit", [6], "k"), ("advance", 6)])
@settings(max_examples=25, deadline=None)
@given(actions=actions)
def test_every_request_gets_what_it_gets_alone(model: Model, actions: list[tuple[object, ...]]) -> None:
    loop = make_loop(model)
    sequences: list[Sequence] = []
    aborted: set[str] = set()
    for action in actions:
        match action:
            case ("submit", prompt, key):
                temperature = 1.0 if len(sequences) % 2 else 0.6
                sequences.append(make_sequence(prompt, len(sequences), key, temperature))
                loop.submit(sequences[-1])
            case ("advance", times):
                for _ in range(times):
                    loop.advance()
            case ("abort", number):
                loop.abort(f"r{number}.")
                aborted.add(f"r{number}.")
            case ("flush",):
                loop.flush()
            case (mode,):
                loop.pause(str(mode))
                loop.advance()
                loop.resume()
    rounds = 0
    while any(one.finish_reason is None for one in sequences):
        loop.advance()
        rounds += 1
        assert rounds < 2000, "a request never ended"
    for sequence in sequences:
        alone = run_alone(model, sequence)
        num = len(sequence.output_ids)
        assert sequence.finish_reason is not None
        if sequence.finish_reason["type"] == "abort":
            assert sequence.rid in aborted
        else:
            assert num == MAX_NEW
        assert sequence.output_ids == alone.output_ids[:num]
        assert sequence.logprobs == pytest.approx(alone.logprobs[:num], abs=2e-5)
        assert sequence.spans(num, "a:0") == [{"version": "a:0", "start": 0, "end": num}]
    assert loop.loads()["num_running_reqs"] == loop.loads()["num_waiting_reqs"] == 0


@settings(max_examples=40, deadline=None)
@given(prompts=st.lists(prompts, min_size=1, max_size=8))
def test_the_longest_known_prefix_is_reused(model: Model, prompts: list[list[int]]) -> None:
    loop = make_loop(model, max_total_tokens=100_000)
    known: list[list[int]] = []
    for seed, prompt in enumerate(prompts):
        sequence = make_sequence(prompt, seed)
        loop.submit(sequence)
        while sequence.finish_reason is None:
            loop.advance()
        assert sequence.cached_tokens == max((common_prefix(prompt[:-1], one) for one in known), default=0)
        known.append(prompt + sequence.output_ids[:-1])


def common_prefix(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_a_full_queue_refuses_the_next_request(model: Model) -> None:
    loop = EngineLoop(model, LoopSettings(context_length=512, max_running=1, max_queued=2), "a:0")
    answers: list[Future[None]] = [loop.submit(make_sequence([1, 2, 3], seed)) for seed in range(3)]
    loop.advance()
    assert [answer.exception() is None for answer in answers] == [True, True, False]
    with pytest.raises(ConnectionError, match="queue is full"):
        answers[2].result()


def test_a_closed_loop_refuses_and_ends_what_it_had(model: Model) -> None:
    loop = make_loop(model)
    loop.start()
    open_request = make_sequence(list(range(200)), 1)
    loop.submit(open_request).result()
    loop.close()
    assert open_request.finish_reason is not None
    with pytest.raises(ConnectionError, match="start it again"):
        loop.submit(make_sequence([1], 2)).result()
