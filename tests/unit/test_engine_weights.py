"""New weights are taken whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gyre_train.engine.model import Model, Span
from gyre_train.tiny import make_tiny

SHAPE = {"vocab": 300, "hidden": 32, "context": 256, "texts": ["a b c"], "init_std": 0.2}


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def other_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    )


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: edit_weights(folder, lambda t: t["lm_head.weight"].fill_(float("nan"))), "finite"),
        (lambda folder: edit_weights(folder, lambda t: t.pop("lm_head.weight")), "lm_head.weight"),
        (lambda folder: edit_weights(folder, lambda t: t.update(extra=torch.zeros(1))), "extra"),
        (lambda folder: edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.ones(3)})), "norm"),
        (cut_file, "complete"),
        (other_config, "rope_parameters"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "complete"),
    ],
)
def test_bad_weights_are_refused_and_the_old_ones_stay(
    tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    model = Model(make_tiny(tmp_path / "good", **SHAPE))
    before = model.checksums()
    bad = make_tiny(tmp_path / "bad", seed=1, **SHAPE)
    damage(bad)
    with pytest.raises(ValueError, match=says):
        model.replace(bad)
    assert model.checksums() == before
    assert model.path == str(tmp_path / "good")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_spans_of_many_sequences_equal_a_plain_forward(tmp_path: Path, arch: str) -> None:
    folder = make_tiny(tmp_path, arch=arch, **SHAPE)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model = Model(folder)
    random = np.random.default_rng(0)
    sequences = [random.integers(0, 300, num) for num in (100, 37, 7)]
    buffers = [model.new_buffer(8) for _ in sequences]
    done = [0, 0, 0]
    for ends in ([50, 1, 2], [51, 2, 3], [99, 20, 5], [100, 37, 7]):
        spans = [Span(ids[a:b], buffer) for ids, a, b, buffer in zip(sequences, done, ends, buffers, strict=True)]
        logits = model.forward(spans)
        for row, (ids, end) in enumerate(zip(sequences, ends, strict=True)):
            with torch.inference_mode():
                wanted = plain(torch.from_numpy(ids[None, :end])).logits[0, -1]
            assert float((wanted - logits[row]).abs().max()) < 1e-5
        done = ends
