"""What every engine must do, as tests that an engine's own test module subclasses.

The subclass gives the fixtures `served` (a running Engine that serves `models.first` as version "a:0") and `models`.
Real SGLang is the reference; log-probs are checked against a plain transformers forward in float32.
"""

import asyncio
import functools
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from gyre_train.tiny import make_tiny
from tests.support.engines import Background, Engine, request, wait_until
from tests.support.proxy_server import check_run, nodes_of, path_ids, serve_proxy

VOCAB = 512
CONTEXT = 16384
TOLERANCE = 1e-4
PROMPT = list(range(40, 100))
SWAPPED = 1500
"""Tokens of a reply whose weights are swapped: a fast engine samples hundreds before a slow client has it paused."""
LONG_REQUEST = {"model": "any", "max_tokens": 400, "messages": [{"role": "user", "content": "Count."}]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """Two checkpoints of one shape. `eos` ends the greedy reply to PROMPT under the first after `eos_after` tokens."""

    first: Path
    second: Path
    eos: int
    eos_after: int


def make_models(folder: Path) -> Models:
    first, second = (
        make_tiny(folder / name, arch="qwen3", vocab=VOCAB, context=CONTEXT, seed=seed, init_std=0.15)
        for seed, name in enumerate(("first", "second"))
    )
    reply = greedy(first, PROMPT, 12)
    eos_after = next(i for i in range(4, 12) if reply[i] not in reply[:i])
    for model in (first, second):
        path = model / "generation_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "eos_token_id": [config["eos_token_id"], reply[eos_after]]}))
    return Models(first=first, second=second, eos=reply[eos_after], eos_after=eos_after)


@functools.lru_cache(maxsize=4)
def _reference(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logprobs(model_dir: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of `output` after `prompt` in one plain forward."""
    with torch.inference_mode():
        logits = _reference(model_dir)(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(output)[:, None])[:, 0]


def greedy(model_dir: Path, prompt: list[int], num: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num):
            ids.append(int(_reference(model_dir)(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def logprobs_of(reply: dict[str, Any]) -> list[float]:
    """The reply's log-probs, after a check that they belong to its ids one to one."""
    rows = reply["meta_info"]["output_token_logprobs"]
    assert [row[1] for row in rows] == reply["output_ids"]
    assert reply["meta_info"]["completion_tokens"] == len(rows)
    return [row[0] for row in rows]


def assert_logprobs(
    model_dir: Path, prompt: list[int], output: list[int], found: list[float], temperature: float = 1.0
) -> None:
    wanted = reference_logprobs(model_dir, prompt, output, temperature)
    assert float((torch.tensor(found) - wanted).abs().max()) < TOLERANCE


class EngineContract:
    """Tests that must pass on every engine."""

    @pytest.fixture
    def engine(self, served: Engine, models: Models) -> Engine:
        """The engine as each test wants to find it: not paused, nothing cached, the first weights as "a:0"."""
        served.post("/continue_generation")
        served.post("/abort_request", {"abort_all": True})
        body = {"model_path": str(models.first), "weight_version": "a:0", "flush_cache": True}
        # SGLang shows no request a moment before it lets the cache be flushed.
        wait_until(lambda: served.post("/update_weights_from_disk", body).json()["success"], "the engine to be idle")
        return served

    @pytest.mark.parametrize(
        "sampling",
        [
            {"temperature": 1.0},
            {"temperature": 0.5},
            {"temperature": 0.7, "top_p": 0.5},
            {"temperature": 1.0, "top_k": 5},
        ],
    )
    def test_logprobs_are_after_temperature_and_before_truncation(
        self, engine: Engine, models: Models, sampling: dict[str, Any]
    ) -> None:
        reply = engine.generate(PROMPT, max_new_tokens=40, **sampling)
        assert reply["meta_info"]["prompt_tokens"] == len(PROMPT)
        assert_logprobs(models.first, PROMPT, reply["output_ids"], logprobs_of(reply), sampling["temperature"])

    def test_greedy_is_repeatable_and_is_the_models_own(self, engine: Engine, models: Models) -> None:
        one, two = (engine.generate(PROMPT, max_new_tokens=24) for _ in range(2))
        assert one["output_ids"] == two["output_ids"] == greedy(models.first, PROMPT, 24)
        assert_logprobs(models.first, PROMPT, one["output_ids"], logprobs_of(one))

    def test_length_ends_a_reply(self, engine: Engine) -> None:
        reply = engine.generate(PROMPT, max_new_tokens=7)
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 7}
        assert len(reply["output_ids"]) == 7

    def test_no_new_tokens_is_an_empty_reply(self, engine: Engine) -> None:
        reply = engine.generate(PROMPT, max_new_tokens=0)
        assert reply["output_ids"] == []
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}

    def test_a_reply_ends_with_the_context(self, engine: Engine) -> None:
        prompt = [7] * (CONTEXT - 50)
        for asked in (50, None):
            reply = engine.generate(prompt, max_new_tokens=asked)
            assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 48}
        assert engine.post("/generate", request(prompt, max_new_tokens=51)).status_code == 400

    def test_a_stop_token_ends_a_reply_and_is_part_of_it(self, engine: Engine, models: Models) -> None:
        free = engine.generate(PROMPT)["output_ids"]
        after = next(i for i in range(1, models.eos_after) if free[i] not in free[:i])
        stop = [free[after], VOCAB - 1]
        reply = engine.generate(PROMPT, stop_token_ids=stop, ignore_eos=False)
        assert reply["output_ids"] == free[: after + 1]
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[after]}
        # Who ignores the model's own stop tokens ignores these too.
        assert engine.generate(PROMPT, stop_token_ids=stop)["output_ids"] == free

    def test_the_models_own_stop_tokens_hold_unless_ignored(self, engine: Engine, models: Models) -> None:
        reply = engine.generate(PROMPT, ignore_eos=False)
        assert reply["output_ids"][-1] == models.eos
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": models.eos}
        assert len(engine.generate(PROMPT)["output_ids"]) == 16

    def test_a_stream_is_cumulative_and_ends_as_the_batch_reply(self, engine: Engine) -> None:
        chunks = list(engine.stream(PROMPT, max_new_tokens=30))
        whole = engine.generate(PROMPT, max_new_tokens=30)
        for earlier, later in itertools.pairwise(chunks):
            assert earlier["meta_info"]["finish_reason"] is None
            assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
            assert logprobs_of(later)[: len(earlier["output_ids"])] == logprobs_of(earlier)
        assert chunks[-1]["output_ids"] == whole["output_ids"]
        assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
        assert logprobs_of(chunks[-1]) == pytest.approx(logprobs_of(whole), abs=TOLERANCE)

    def test_requests_at_the_same_time_do_not_touch_one_another(self, engine: Engine) -> None:
        prompts = [[10 * i + j for j in range(5 + 30 * i)] for i in range(6)]
        prompts = [[token % VOCAB for token in prompt] for prompt in prompts]
        alone = [engine.generate(prompt, max_new_tokens=20, extra_key="alone") for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            bodies = [request(prompt, max_new_tokens=20, extra_key="together") for prompt in prompts]
            together = list(pool.map(lambda body: engine.post("/generate", body).json(), bodies))
        for one, other in zip(alone, together, strict=True):
            assert one["output_ids"] == other["output_ids"]
            assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=TOLERANCE)

    def test_abort_returns_what_was_sampled(self, engine: Engine, models: Models) -> None:
        running = Background(engine, PROMPT, rid="to-abort", max_new_tokens=3000)
        running.wait_for(5)
        assert engine.post("/abort_request", {"rid": "to-abort"}).status_code == 200
        reply = running.result()
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert 5 <= len(reply["output_ids"]) < 3000
        assert_logprobs(models.first, PROMPT, reply["output_ids"], logprobs_of(reply))

    def test_abort_of_nothing_is_ignored(self, engine: Engine) -> None:
        running = Background(engine, PROMPT, max_new_tokens=200)
        running.wait_for(1)
        assert engine.post("/abort_request", {"rid": ""}).status_code == 200
        assert engine.post("/abort_request", {"rid": "unknown"}).status_code == 200
        assert running.result()["meta_info"]["finish_reason"]["type"] == "length"

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_client_that_goes_away_frees_its_place(self, engine: Engine, stream: bool) -> None:
        # To its end this request would run for longer than the wait below.
        body = {**request(PROMPT, max_new_tokens=CONTEXT - 100), "stream": stream}
        impatient = httpx.Timeout(120.0 if stream else 1.0, connect=30.0)  # a stream is left after its first line
        with httpx.Client(timeout=impatient, trust_env=False) as client:
            if stream:
                with client.stream("POST", engine.url + "/generate", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(engine.url + "/generate", json=body)
        wait_until(lambda: _is_idle(engine), "the request of the lost client to end", 12)

    def test_retract_and_swap_gives_the_new_weights_exactly(self, engine: Engine, models: Models) -> None:
        running = Background(engine, PROMPT, max_new_tokens=SWAPPED, extra_key="a:0")
        running.wait_for(10)
        assert engine.post("/pause_generation", {"mode": "retract"}).json()["status"] == "ok"
        assert engine.get("/ready").status_code == 503
        body = {"model_path": str(models.second), "weight_version": "a:1", "flush_cache": True}
        assert engine.post("/update_weights_from_disk", body).json()["success"]
        assert engine.post("/continue_generation").status_code == 200
        reply = running.result()
        spans = reply["meta_info"]["weight_versions"]
        cut = spans[0]["end"]
        assert spans == [{"version": "a:0", "start": 0, "end": cut}, {"version": "a:1", "start": cut, "end": SWAPPED}]
        assert reply["meta_info"]["num_retractions"] == 1
        assert reply["meta_info"]["weight_version"] == "a:1"
        ids, found = reply["output_ids"], logprobs_of(reply)
        assert_logprobs(models.first, PROMPT, ids[:cut], found[:cut])
        assert_logprobs(models.second, PROMPT + ids[:cut], ids[cut:], found[cut:])
        assert float((reference_logprobs(models.first, PROMPT, ids) - torch.tensor(found)).abs().max()) > 0.01

    async def test_a_swap_under_replies_through_the_proxy_is_exact(
        self, engine: Engine, models: Models, tmp_path: Path
    ) -> None:
        run, folders = tmp_path / "run", {0: models.first, 1: models.second}
        async with serve_proxy(run, engine, tokenizer=models.first, poll_s=0.1) as served, served.http() as http:
            calls = [
                asyncio.create_task(http.post(f"/x/e{i}/v1/messages", json=LONG_REQUEST, timeout=120)) for i in range(8)
            ]
            while not any(g.sampler.num_tokens > 10 for g in served.proxy._going):
                await asyncio.sleep(0.005)
            await asyncio.to_thread(engine.post, "/pause_generation", {"mode": "retract"})
            body = {"model_path": str(models.second), "weight_version": "a:1", "flush_cache": True}
            swapped = await asyncio.to_thread(engine.post, "/update_weights_from_disk", body)
            assert swapped.json()["success"]
            await asyncio.to_thread(engine.post, "/continue_generation")
            assert [(await call).status_code for call in calls] == [200] * 8
        nodes, crossed = nodes_of(run), 0
        for call in check_run(run):
            output, prompt = nodes[call.output_node], path_ids(nodes, call.prompt_node)
            crossed += len(output.policy_versions) == 2
            ids, found = output.token_ids.tolist(), output.logprobs.tolist()
            for span in output.policy_versions:  # as a fresh prefill of these weights sees all that came before
                part = slice(span.start, span.end)
                assert_logprobs(folders[span.n], prompt + ids[: span.start], ids[part], found[part])
        assert crossed

    def test_pause_in_place_keeps_requests_open_and_their_cache(self, engine: Engine, models: Models) -> None:
        running = Background(engine, PROMPT, max_new_tokens=SWAPPED)
        running.wait_for(10)
        engine.post("/pause_generation", {"mode": "in_place"})
        assert engine.post("/flush_cache").status_code == 400
        body = {"model_path": str(models.second), "weight_version": "a:1", "flush_cache": False}
        assert engine.post("/update_weights_from_disk", body).json()["success"]
        engine.post("/continue_generation")
        meta = running.result()["meta_info"]
        assert [span["version"] for span in meta["weight_versions"]] == ["a:0", "a:1"]
        assert meta["num_retractions"] == 0

    def test_pause_abort_ends_requests_with_what_they_have(self, engine: Engine) -> None:
        running = Background(engine, PROMPT, max_new_tokens=3000)
        running.wait_for(5)
        engine.post("/pause_generation", {"mode": "abort"})
        reply = running.result()
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(logprobs_of(reply)) >= 5

    def test_a_paused_engine_answers_after_it_goes_on(self, engine: Engine) -> None:
        engine.post("/pause_generation", {"mode": "retract"})
        late = Background(engine, PROMPT, max_new_tokens=5)
        # The model's facts are served meanwhile, and nothing is sampled.
        assert engine.get("/model_info").status_code == 200
        assert late.num == 0
        engine.post("/continue_generation")
        assert len(late.result()["output_ids"]) == 5

    def test_new_weights_without_a_pause(self, engine: Engine, models: Models) -> None:
        before = engine.post("/weights_checker", {"action": "checksum"}).json()["ranks"][0]["checksums"]
        body = {"model_path": str(models.second), "weight_version": "a:7"}
        assert engine.post("/update_weights_from_disk", body).json()["success"]
        assert engine.get("/model_info").json()["weight_version"] == "a:7"
        after = engine.post("/weights_checker", {"action": "checksum"}).json()["ranks"][0]["checksums"]
        assert before.keys() == after.keys()
        assert before["lm_head.weight"] != after["lm_head.weight"]
        reply = engine.generate(PROMPT)
        assert reply["meta_info"]["weight_versions"] == [{"version": "a:7", "start": 0, "end": 16}]
        assert_logprobs(models.second, PROMPT, reply["output_ids"], logprobs_of(reply))

    def test_a_folder_without_weights_changes_nothing(self, engine: Engine, models: Models, tmp_path: Path) -> None:
        wanted = engine.generate(PROMPT)
        response = engine.post(
            "/update_weights_from_disk", {"model_path": str(tmp_path / "no"), "weight_version": "x:9"}
        )
        assert response.status_code == 400
        assert response.json()["success"] is False
        assert engine.get("/model_info").json()["weight_version"] == "a:0"
        assert engine.generate(PROMPT)["output_ids"] == wanted["output_ids"]

    def test_a_known_prefix_is_not_computed_again(self, engine: Engine, models: Models) -> None:
        first = engine.generate(PROMPT, max_new_tokens=10)
        assert first["meta_info"]["cached_tokens"] == 0
        prompt = PROMPT + first["output_ids"] + [5, 6, 7]
        second = engine.generate(prompt)
        # The last sampled token has never been an input, so its keys and values are not there.
        assert second["meta_info"]["cached_tokens"] == len(PROMPT) + 9
        assert_logprobs(models.first, prompt, second["output_ids"], logprobs_of(second))

    def test_a_reply_can_be_continued_from_prompt_and_partial(self, engine: Engine) -> None:
        whole = engine.generate(PROMPT, max_new_tokens=30)["output_ids"]
        rest = engine.generate(PROMPT + whole[:12], max_new_tokens=18)["output_ids"]
        assert whole[12:] == rest

    def test_extra_keys_do_not_share_a_prefix(self, engine: Engine) -> None:
        engine.generate(PROMPT, extra_key="a:0")
        assert engine.generate(PROMPT, extra_key="a:1")["meta_info"]["cached_tokens"] == 0
        assert engine.generate(PROMPT, extra_key="a:0")["meta_info"]["cached_tokens"] == len(PROMPT) - 1

    def test_flush_forgets_prefixes(self, engine: Engine) -> None:
        engine.generate(PROMPT)
        # A request that an earlier test let go of may still be in the engine, which then refuses.
        wait_until(lambda: engine.post("/flush_cache").status_code == 200, "a flush of the idle engine")
        assert engine.generate(PROMPT)["meta_info"]["cached_tokens"] == 0

    @pytest.mark.parametrize("num", [CONTEXT - 6, CONTEXT + 1000])
    def test_a_prompt_that_is_too_long_is_refused(self, engine: Engine, num: int) -> None:
        response = engine.post("/generate", request([7] * num))
        assert response.status_code == 400
        assert "message" in response.json()["error"]

    def test_a_refusal_in_a_stream_is_an_error_event(self, engine: Engine) -> None:
        (only,) = engine.stream([7] * (CONTEXT + 1))
        assert only["error"]["code"] == 400
        assert "longer than the model's context length" in only["error"]["message"]

    def test_sampling_that_cannot_be_is_refused(self, engine: Engine) -> None:
        for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"max_new_tokens": -1}, {"no_such": 1}):
            body = request(PROMPT, **{"temperature": 1.0, **wrong})
            assert engine.post("/generate", body).status_code == 400, wrong

    async def test_a_schema_that_it_cannot_hold_is_a_refusal_of_the_call_alone(
        self, engine: Engine, models: Models, tmp_path: Path
    ) -> None:
        async with serve_proxy(tmp_path / "run", engine, tokenizer=models.first) as served, served.http() as http:
            held = {**LONG_REQUEST, "response_format": {"type": "json_object"}}
            answer = await http.post("/x/e/v1/chat/completions", json=held, timeout=120)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
            assert [one.state for one in served.proxy.router.engines] == ["up"]

    def test_facts_and_load_are_served(self, engine: Engine, models: Models) -> None:
        assert engine.get("/ready").status_code == 200
        assert engine.get("/health").status_code == 200
        info = engine.get("/model_info").json()
        assert info["weight_version"] == "a:0"
        assert info["model_path"] == str(models.first)
        assert engine.get("/server_info").json()["max_req_input_len"] == CONTEXT - 6
        running = Background(engine, PROMPT, max_new_tokens=3000, rid="busy")
        running.wait_for(1)
        wait_until(lambda: _load(engine)["num_running_reqs"] == 1, "the load to show the request")
        assert _load(engine)["num_waiting_reqs"] == 0
        assert _load(engine)["max_total_num_tokens"] >= CONTEXT
        engine.post("/abort_request", {"abort_all": True})
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"


def _load(engine: Engine) -> dict[str, Any]:
    return engine.get("/v1/loads").json()["loads"][0]


def _is_idle(engine: Engine) -> bool:
    load = _load(engine)
    return load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0
