"""Tiny checkpoints made on the spot."""

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gyre_train.tiny import SPECIAL_TOKENS, make_tiny

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "ls", "arguments": {"path": "é"}}}],
    },
    {"role": "tool", "content": "a"},
    {"role": "tool", "content": "b"},
]
RENDERED = (
    "<|im_end|>\n<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes.\n"
    '<tool_call>\n{"name": "ls", "arguments": {"path": "é"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)


@functools.cache
def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), vocab=600, context=2048)


def test_the_same_arguments_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = make_tiny(tmp_path, vocab=600, context=2048)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in names)
    other = make_tiny(tmp_path / "other", vocab=600, context=2048, seed=1)
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_each_architecture_loads_whole(arch: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, arch=arch, vocab=300, hidden=32, layers=1, context=128, texts=["few words"])
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.model_type == arch
    assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == 128
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert len(tokenizer) == model.config.vocab_size == 300
    assert all(isinstance(tokenizer.decode([token]), str) for token in range(300))


def test_special_tokens_are_one_id_each(folder: Path) -> None:
    tokenizer = tokenizer_of(folder)
    ids = tokenizer.encode("".join(SPECIAL_TOKENS))
    assert ids == list(range(600 - len(SPECIAL_TOKENS), 600))
    # Control tokens vanish from plain text, the markers of thoughts and calls stay, as with Qwen3.
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(SPECIAL_TOKENS[3:])


def test_the_template_renders_tools_calls_and_results(folder: Path) -> None:
    tokenizer = tokenizer_of(folder)
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
    text = tokenizer.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
    head, _, rest = text.partition("\n\n# Tools\n\n")
    assert head == "<|im_start|>system\nBe brief."
    assert '\n<tools>\n{"type": "function", "function": {"name": "ls", "parameters": {}}}\n</tools>\n' in rest
    assert text.endswith(RENDERED)
    plain = tokenizer.apply_chat_template(MESSAGES[1:2], tokenize=False, add_generation_prompt=True)
    assert plain == "<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n"


def test_a_rendering_is_a_prefix_of_the_next_turns(folder: Path) -> None:
    tokenizer = tokenizer_of(folder)
    texts = [tokenizer.apply_chat_template(MESSAGES[:num], tokenize=False) for num in (1, 2, 3)]
    assert texts[1].startswith(texts[0])
    assert texts[2].startswith(texts[1])


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(folder: Path, text: str) -> None:
    tokenizer = tokenizer_of(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"vocab": 100}, "at least 265"), ({"hidden": 30}, "divisible"), ({"arch": "gpt2"}, "one of llama, qwen2, qwen3")],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_tiny(tmp_path, **wrong)
