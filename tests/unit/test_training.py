"""Training runs on a tiny model: direction of learning, anchors, resume at any point, forecasts and refusals."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import gyre_data
from gyre_data import ledger
from gyre_data.errors import ConfigError, DataError
from gyre_data.main import app
from gyre_data.model_shapes import shape_of
from gyre_data.store import RunWriter
from gyre_data.store import open as open_run
from gyre_train import coordinator, step
from gyre_train import forecast as forecasts
from gyre_train.anchor import choose_anchor
from gyre_train.config import to_toml
from gyre_train.forecast import forecast
from gyre_train.lineage import lineage_of
from gyre_train.loop import train
from gyre_train.megatron import checkpoint
from gyre_train.metrics import read_metrics
from gyre_train.source import load_source
from tests.support.checkpoints import same_state, saved_state
from tests.support.forest import Forest
from tests.support.training import VOCAB, chat_file, config, own_logprobs, recorded_run, tiny_experts, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return recorded_run(tmp_path_factory.mktemp("runs") / "r", model)


def sampled_logprobs(model: Path, run: Path) -> dict[float, float]:
    """Mean log-prob of the trained tokens under a model folder, by the sign of their advantage."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    found: dict[float, list[float]] = {1.0: [], -1.0: []}
    for e in gyre_data.admit([open_run(run)]).executions:
        for t in e.trajectories:
            for node in t.owned:
                logp = own_logprobs(policy, e.tree.path_ids(node))[-len(e.tree.ids(node)) :]
                found[float(np.sign(e.advantage or 0.0))] += [float(x) for x in logp]
    return {sign: float(np.mean(values)) for sign, values in found.items()}


def test_rl_raises_what_won_and_lowers_what_lost(model: Path, run: Path, tmp_path: Path) -> None:
    done = train(config(model, tmp_path / "out", runs=run))
    assert (done.step, done.version) == (1, "run:1")
    assert done.checkpoint is not None
    before, after = sampled_logprobs(model, run), sampled_logprobs(Path(done.checkpoint), run)
    assert after[1.0] > before[1.0] + 1e-3
    assert after[-1.0] < before[-1.0] - 1e-3
    row = read_metrics(tmp_path / "out/metrics.jsonl")[0]
    assert row["mismatch_max"] < 1e-4  # the trainer's log-probs are those of transformers
    assert max(row["mismatch_main"], row["mismatch_sub_agent"]) <= row["mismatch_max"]
    assert row["mismatch_age_0"] == row["mismatch_mean"]  # sampled by the weights that training began with
    assert row["entropy"] > 0
    assert row["executions"] == 4
    assert row["packed_tokens"] < row["unpacked_tokens"]
    assert row["sharing"] == row["unpacked_tokens"] / row["packed_tokens"]
    assert row["trained_tokens_per_s"] == pytest.approx(row["trained_tokens"] / row["seconds"])
    assert row["plan_seconds"] > 0
    # Engines load every safetensors file beside the weights, so nothing else may lie there.
    assert [f.name for f in Path(done.checkpoint).glob("*.safetensors")] == ["model.safetensors"]
    assert lineage_of(done.checkpoint).policy_ids == ("run", lineage_of(model).version.policy_id)
    rows = ledger.ledger(tmp_path / "out")
    assert sum(r.owned_tokens for r in rows) == row["trained_tokens"]
    assert {r.reward for r in rows} == {0.0, 1.0}


def test_a_burst_of_two_steps_clips_and_caps(model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model, groups=6, shift=-2.0)
    overrides = ["--train.anchor=burst", "--train.steps_per_burst=2", "--train.executions_per_step=4"]
    train(config(model, tmp_path / "out", *overrides, runs=run))
    first, second, third = read_metrics(tmp_path / "out/metrics.jsonl")
    assert first["clip_fraction"] == 0.0  # the anchor's own forward
    assert second["clip_fraction"] > 0
    assert first["cap_fraction"] > 0
    assert second["cap_fraction"] > 0
    assert (third["ratio"], third["clip_fraction"]) == (1.0, 0.0)  # the next burst opened at its own weights


def test_sft_learns_a_chat_by_heart(model: Path, tmp_path: Path) -> None:
    chat = chat_file(tmp_path / "chat.jsonl", "hello again", "the lazy dog")
    overrides = ["--data.epochs=60", "--train.lr=5e-3", "--output.save_every=100"]
    done = train(config(model, tmp_path / "out", *overrides, chat=chat))
    rows = read_metrics(tmp_path / "out/metrics.jsonl")
    assert done.step == len(rows) == 60
    assert rows[-1]["loss"] < 0.05 < 1 < rows[0]["loss"]
    assert done.checkpoint is not None
    tokenizer = AutoTokenizer.from_pretrained(done.checkpoint)
    policy = AutoModelForCausalLM.from_pretrained(done.checkpoint)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say 1"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = policy.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(reply) == "the lazy dog<|im_end|>"


class Killed(BaseException):
    """Stands for the end of the process."""


def die_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int) -> None:
    """Let the `call`-th call of a function end the process, before it does anything."""
    real: Callable[..., object] = getattr(owner, name)
    seen = 0

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal seen
        seen += 1
        if seen == call:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)


RESUME = ("--train.executions_per_step=1", "--output.save_every=2", "--train.anchor=burst", "--train.steps_per_burst=3",
          "--train.weight_decay=0.1", "--train.warmup_steps=3")  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(model: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    assert train(config(model, out, *RESUME, runs=run)).step == 4
    return out


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (step.Learner, "step", 2),
        (coordinator.Coordinator, "record", 2),
        (checkpoint, "_sync", 2),
        (coordinator.Coordinator, "saved", 1),
        (step.Learner, "step", 4),
        (checkpoint, "_sync", 15),
    ],
    ids=[
        "in step 2",
        "before the ledger of 2",
        "in checkpoint 2",
        "after checkpoint 2",
        "in step 4",
        "in checkpoint 4",
    ],
)
def test_a_killed_run_resumes_exactly(
    owner: object, name: str, call: int, undisturbed: Path, model: Path, run: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        die_at(patch, owner, name, call)
        with pytest.raises(Killed):
            train(config(model, tmp_path, *RESUME, runs=run))
    assert train(config(model, tmp_path, *RESUME, runs=run)).step == 4
    consumed = [[(r.step, r.execution_id) for r in ledger.ledger(out)] for out in (undisturbed, tmp_path)]
    assert consumed[0] == consumed[1]
    assert len({e for _, e in consumed[0]}) == 4
    final = "checkpoints/step-00000004"
    one, two = (load_file(out / final / "model.safetensors") for out in (undisturbed, tmp_path))
    for key in one:
        assert torch.equal(one[key], two[key]), key
    assert same_state(undisturbed / final, tmp_path / final)
    figures = [
        [{k: v for k, v in row.items() if "second" not in k and "_per_s" not in k} for row in read_metrics(out)]
        for out in (undisturbed / "metrics.jsonl", tmp_path / "metrics.jsonl")
    ]
    assert figures[0] == figures[1]
    assert train(config(model, tmp_path, *RESUME, runs=run)).steps_done == 0


def test_a_version_is_never_made_twice(model: Path, run: Path, tmp_path: Path) -> None:
    settings = ("--train.executions_per_step=1", "--output.save_every=1")
    assert train(config(model, tmp_path, *settings, "--train.steps=2", runs=run)).version == "run:2"
    shutil.rmtree(tmp_path / "checkpoints/step-00000002")
    other = config(model, tmp_path, *settings, "--train.steps=3", "--train.lr=1e-2", runs=run)
    assert train(other).version == "run:4"
    assert [(s.step, s.n, s.parent_n) for s in ledger.steps(tmp_path)] == [(1, 1, 0), (2, 3, 1), (3, 4, 3)]
    shutil.rmtree(tmp_path / "checkpoints")
    assert train(config(model, tmp_path, *settings, "--train.steps=1", runs=run)).version == "run:5"


def test_a_burst_is_ended_as_it_was_begun(model: Path, run: Path, tmp_path: Path) -> None:
    settings = ("--train.executions_per_step=1", "--train.anchor=burst")
    train(config(model, tmp_path, *settings, "--train.steps_per_burst=3", "--train.steps=2", runs=run))
    with pytest.raises(ConfigError, match=r"steps_per_burst = 2: step 2 lies inside a burst of 3 .*--train.steps=3\)"):
        train(config(model, tmp_path, *settings, "--train.steps_per_burst=2", runs=run))
    with pytest.raises(ConfigError, match=r"train.anchor = step: step 2 lies inside a burst of 3"):
        train(config(model, tmp_path, "--train.executions_per_step=1", "--train.anchor=step", runs=run))
    assert train(config(model, tmp_path, *settings, "--train.steps_per_burst=3", "--train.steps=3", runs=run)).step == 3
    assert train(config(model, tmp_path, *settings, "--train.steps_per_burst=2", runs=run)).step == 4


def test_a_trajectory_that_no_pack_holds_is_found_before_training(model: Path, run: Path, tmp_path: Path) -> None:
    longest = max(
        t.needed_tokens for e in load_source(config(model, tmp_path, runs=run)).examples for t in e.trajectories
    )
    settings = config(model, tmp_path, "--train.executions_per_step=1", f"--pack.tokens={longest - 1}", runs=run)
    for command in (train, forecast):
        with pytest.raises(DataError, match=f"set pack.tokens to {longest} or more"):
            command(settings)
    assert not ledger.steps(tmp_path)


def test_bfloat16_keeps_float32_masters_through_a_resume(model: Path, run: Path, tmp_path: Path) -> None:
    settings = ("--model.dtype=bfloat16", "--train.executions_per_step=1", "--train.lr=1e-5")
    train(config(model, tmp_path / "a", *settings, runs=run))
    train(config(model, tmp_path / "b", *settings, "--train.steps=2", runs=run))
    train(config(model, tmp_path / "b", *settings, runs=run))
    one, two = (tmp_path / x / "checkpoints/step-00000004" for x in "ab")
    assert same_state(one, two)
    masters = [tensor for key, tensor in saved_state(one).items() if key.startswith("optimizer.state.param.")]
    assert any((master != master.bfloat16().float()).any() for master in masters)


def test_the_forecast_is_what_training_does(model: Path, run: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path / "out", "--train.executions_per_step=2", runs=run)
    seen = forecast(settings)
    assert not (tmp_path / "out").exists()
    train(settings)
    rows = read_metrics(tmp_path / "out/metrics.jsonl")
    assert (seen.steps, seen.executions) == (2, 4) == (len(rows), sum(r["executions"] for r in rows))
    assert seen.edges == sum(r["trained_tokens"] for r in rows)
    assert seen.packed_tokens == sum(r["packed_tokens"] for r in rows)
    assert seen.flops > 0
    assert seen.memory.pack_tokens == max(seen.memory.pack_tokens, seen.packed_tokens // seen.packs) <= 8192
    assert seen.memory.fits
    assert seen.excluded["calls"] == {}


def test_the_forecast_knows_experts_and_recomputation(run: Path, tmp_path: Path) -> None:
    experts = tiny_experts(tmp_path / "experts")
    settings = config(experts, tmp_path / "out", "--parallel.recompute=full", runs=run)
    again, kept = (forecast(one) for one in (settings, config(experts, tmp_path / "out", runs=run)))
    tensors = load_file(experts / "model.safetensors")
    whole = sum(t.numel() for t in tensors.values())
    idle = 2 * sum(tensors[f"model.layers.{i}.mlp.experts.0.{x}_proj.weight"].numel()
                   for i in (0, 1) for x in ("gate", "up", "down"))  # fmt: skip
    assert (again.parameters, again.active_parameters) == (whole, whole - idle)  # a token passes 2 of 4
    assert again.memory.state_bytes == kept.memory.state_bytes == 16 * whole
    assert again.memory.activation_bytes < kept.memory.activation_bytes
    assert again.flops == kept.flops
    (tmp_path / "t.toml").write_text(to_toml(settings))
    told = CliRunner().invoke(app, ["train", str(tmp_path / "t.toml"), "--dry-run"]).output
    assert f"a token passes {whole - idle:,} of {whole:,} parameters" in told
    assert max(map(len, told.rsplit("\nsteps ", 1)[1].splitlines())) <= 80


def test_a_pack_that_does_not_fit_is_told_with_what_to_set(
    model: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(model, tmp_path, "--model.dtype=bfloat16", runs=run)
    file = tmp_path / "t.toml"
    file.write_text(to_toml(settings))
    alone = forecast(settings).memory
    assert alone.state_bytes == 18 * sum(t.numel() for t in load_file(model / "model.safetensors").values())
    monkeypatch.setattr(forecasts, "device_bytes", lambda device, ranks: alone.total_bytes - 1)
    told = CliRunner().invoke(app, ["train", str(file), "--dry-run"]).output
    assert f"A pack of {alone.pack_tokens} needs about" in told
    assert "raise parallel.tp" in told  # less than one unit of tokens would fit
    monkeypatch.setattr(forecasts, "_ROUND", 1)
    fitting = forecast(settings).memory.fitting_tokens
    assert fitting == alone.pack_tokens - 1
    assert f"set pack.tokens = {fitting}" in CliRunner().invoke(app, ["train", str(file), "--dry-run"]).output
    monkeypatch.setattr(forecasts, "device_bytes", lambda device, ranks: None)
    assert "device unknown" in CliRunner().invoke(app, ["train", str(file), "--dry-run"]).output


def test_each_rank_is_forecast_its_own_part(model: Path, run: Path, tmp_path: Path) -> None:
    """By hand, in float32: what tensor-parallel ranks hold alike, heads and MLP, and a logit's copies."""
    shape = shape_of(str(model))
    whole = 2 * 4 * shape.hidden
    sliced = 2 * ((shape.num_heads + shape.num_kv_heads) * 2 * shape.head_dim + 3 * shape.ffn)
    gathered = 2 * shape.num_kv_heads * 2 * shape.head_dim

    def held(*parallel: str) -> tuple[int, int, int]:
        memory = forecast(config(model, tmp_path, "--train.executions_per_step=4", *parallel, runs=run)).memory
        return memory.pack_tokens, memory.activation_bytes // 2, memory.state_bytes

    tokens, alone, state = held()
    logits = alone - tokens * shape.num_layers * (whole + sliced)
    assert logits % (10 * shape.vocab) == 0 < logits
    assert held("--parallel.tp=2") == (
        tokens, tokens * shape.num_layers * (whole + sliced // 2) + logits // 2, state // 2
    )  # fmt: skip
    # One pack in the step, so no stage has two in flight.
    assert held("--parallel.pp=2") == (
        tokens, tokens * shape.num_layers // 2 * (whole + sliced) + logits, state // 2
    )  # fmt: skip
    half, rows = -(-tokens // 2), logits // (10 * shape.vocab)
    assert held("--parallel.cp=2") == (
        tokens,
        shape.num_layers * (half * (whole + sliced) + (tokens - half) * gathered) + -(-rows // 2) * 10 * shape.vocab,
        state,
    )
    on_gpu = ("--parallel.tp=2", "--parallel.dp=2", "--model.device=cuda", "--model.dtype=bfloat16")
    assert held(*on_gpu)[2] == state // 16 * 12 // 2  # 6 + 12/2 bytes a parameter instead of 16


def test_trees_and_rows_give_the_same_weights(model: Path, run: Path, tmp_path: Path) -> None:
    for sharing in ("tree", "rows"):
        train(config(model, tmp_path / sharing, f"--pack.sharing={sharing}", "--model.dtype=float64", runs=run))
    packed, alone = (saved_state(tmp_path / x / "checkpoints/step-00000001") for x in ("tree", "rows"))
    for key in (k for k in packed if k.startswith("optimizer.state.exp_avg.")):
        assert (packed[key] - alone[key]).abs().max() <= 1e-9 * alone[key].abs().max(), key


def test_what_cannot_be_trained_says_why(model: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"wanted every trajectory within 8 tokens.*execution e_\d.*pack.tokens"):
        train(config(model, out, "--pack.tokens=8", runs=run))
    other = tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"holds the training of base-.*use a new output\.dir"):
        train(config(other, out, runs=run))
    with pytest.raises(ConfigError, match="makes versions of run, got another"):
        train(config(model, out, "--output.policy_id=another", runs=run))
    with pytest.raises(ConfigError, match="wanted a Hugging Face folder"):
        train(config(tmp_path / "none", tmp_path / "out2", runs=run))
    with pytest.raises(ConfigError, match="wanted a run folder"):
        train(config(model, tmp_path / "out3", runs=tmp_path / "nowhere"))
    small = dataclasses.replace(config(model, out, runs=run).model, path=str(tiny_model(tmp_path / "small")))
    cut = json.loads((tmp_path / "small/config.json").read_text()) | {"vocab_size": VOCAB - 100}
    (tmp_path / "small/config.json").write_text(json.dumps(cut))
    with pytest.raises(DataError, match="wanted token ids below the model's 200"):
        forecast(dataclasses.replace(config(model, out, runs=run), model=small))


def test_a_device_that_is_not_there_is_named(model: Path, run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wanted 99 CUDA devices.*set model\.device = cpu"):
        train(
            config(
                model, tmp_path / "out", "--model.device=cuda", "--model.dtype=bfloat16", "--parallel.tp=99", runs=run
            )
        )


def test_a_step_without_signal_says_why(model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model)
    for e in gyre_data.admit([open_run(run)]).executions:
        gyre_data.score(run, e.execution_id, 0.5, evaluator="check")
    with pytest.raises(DataError, match=r"Group g0: 2 equal scores, no signal; 0 of 2 groups left for step 1; see"):
        train(config(model, tmp_path / "out", runs=run))


def test_a_hosted_recording_says_what_it_is_good_for(model: Path, tmp_path: Path) -> None:
    forest = Forest()
    for i in range(2):
        e = forest.execution(group="g", score=float(i))
        e.call(new=[("user", 4)], output=5, logprobs=False, version=None)
    forest.rows["nodes"] = [dataclasses.replace(n, token_ids=n.token_ids % VOCAB) for n in forest.rows["nodes"]]
    forest.write(tmp_path / "r")
    with pytest.raises(DataError, match=r'0 of 10 sampled tokens trainable by a policy loss .*use loss.kind = "sft"'):
        train(config(model, tmp_path / "out", runs=tmp_path / "r"))
    done = train(config(model, tmp_path / "out", "--loss.kind=sft", runs=tmp_path / "r"))
    assert done.trained_tokens == 10


def test_another_template_is_refused(model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model)
    other = tiny_model(tmp_path / "other")
    with RunWriter(run) as writer:
        writer.update_info({"tokenizer": str(other)})
    assert forecast(config(model, tmp_path / "out", runs=run)).steps == 1
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "{# thoughts are kept #}")
    with pytest.raises(ConfigError, match=r"recorded with template \w{4}, the model has \w{4}; put the template"):
        forecast(config(model, tmp_path / "out", runs=run))
    with RunWriter(run) as writer:  # the proxy was given another template file, which is the model's
        writer.update_info({"template": str(model / "chat_template.jinja")})
    assert forecast(config(model, tmp_path / "out", runs=run)).steps == 1


def test_weights_are_never_stepped_by_a_gradient_that_is_no_number(model: Path, run: Path, tmp_path: Path) -> None:
    overrides = ("--train.executions_per_step=1", "--output.save_every=1", "--train.lr=1e30")
    with pytest.raises(DataError, match=r"step 2: wanted a finite loss and gradient.*the weights were not touched"):
        train(config(model, tmp_path, *overrides, runs=run))
    assert [s.step for s in ledger.steps(tmp_path)] == [1]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_clock_that_is_set_back_loses_no_step(
    model: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("--train.executions_per_step=1", "--output.save_every=1")
    train(config(model, tmp_path, *overrides, "--train.steps=2", runs=run))

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime(2001, 1, 1, tzinfo=tz)

    monkeypatch.setattr(coordinator, "datetime", Earlier)
    train(config(model, tmp_path, *overrides, "--train.steps=3", runs=run))
    assert [s.step for s in ledger.steps(tmp_path)] == [1, 2, 3]
    assert train(config(model, tmp_path, *overrides, runs=run)).step == 4
    assert len(ledger.consumed(tmp_path)) == 4


def test_an_execution_that_two_runs_hold_is_refused(model: Path, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    twice = f'--data.runs=["{run}", "{tmp_path / "copy"}"]'
    with pytest.raises(DataError, match=r"execution e_00\w+: wanted it once, found it in .* and in .*/copy"):
        train(config(model, tmp_path / "out", twice))


def test_a_line_of_two_chat_files_is_two_conversations(model: Path, tmp_path: Path) -> None:
    files = [chat_file(tmp_path / f"{name}.jsonl", "hello again") for name in "ab"]
    both = f'--data.chat=["{files[0]}", "{files[1]}"]'
    settings = config(model, tmp_path / "out", both, "--train.executions_per_step=1", "--loss.kind=sft")
    assert train(settings).step == 2
    assert len(ledger.consumed(tmp_path / "out")) == 2


def test_a_recorded_run_is_no_output_folder(model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model)
    before = (run / "run.json").read_bytes()
    with pytest.raises(ConfigError, match=r"r is a recorded run \(it holds calls.*use another folder"):
        train(config(model, run, runs=run))
    assert (run / "run.json").read_bytes() == before


def test_negative_ids_are_refused(model: Path, tmp_path: Path) -> None:
    forest = Forest()
    for i in range(2):
        forest.execution(group="g", score=float(i)).call()
    forest.rows["nodes"] = [dataclasses.replace(n, token_ids=-n.token_ids - 1) for n in forest.rows["nodes"]]
    forest.write(tmp_path / "r")
    with pytest.raises(DataError, match=r"wanted token ids from 0, got -\d+; run `gyre verify`"):
        train(config(model, tmp_path / "out", runs=tmp_path / "r"))


def test_data_whose_sampler_is_partly_unknown_is_not_called_own(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path / "out", runs=recorded_run(tmp_path / "r", model))
    source = load_source(settings)
    assert choose_anchor(settings, source, lineage_of(model)) == "behaviour"
    unknown = dataclasses.replace(source.examples[0], policy_ids=frozenset())
    mixed = dataclasses.replace(source, examples=(unknown, *source.examples[1:]))
    assert choose_anchor(settings, mixed, lineage_of(model)) == "step"


def test_the_temperature_of_a_call_reaches_the_packer(model: Path, tmp_path: Path) -> None:
    forest = Forest()
    for i in range(2):
        e = forest.execution(group="g", score=float(i))
        e.call(after=e.call(temperature=0.5), temperature=2.0)
    forest.rows["nodes"] = [dataclasses.replace(n, token_ids=n.token_ids % VOCAB) for n in forest.rows["nodes"]]
    forest.write(tmp_path / "r")
    for example in load_source(config(model, tmp_path / "out", runs=tmp_path / "r")).examples:
        tree = example.tree(0)
        (trajectory,) = tree.trajectories
        assert tree.temperature_N[trajectory.owned_O].tolist() == [0.5, 2.0]
    for example in load_source(config(model, tmp_path / "out", "--loss.kind=sft", runs=tmp_path / "r")).examples:
        assert set(example.tree(0).temperature_N.tolist()) == {1.0}


def test_a_damaged_line_of_metrics_does_not_stop_a_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\0\0\0\n\xff{"step": 2}\n{"step": 3}\n{"st')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 3}]
