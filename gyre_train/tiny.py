"""A tiny Qwen3, Llama or Qwen2 with its own tokenizer and chat template, made on the spot in seconds.

The demo warm-starts it, the tests serve it from the embedded engine and from SGLang. The folder is an ordinary Hugging
Face checkpoint: `config.json`, `model.safetensors`, `tokenizer.json`, `chat_template.jinja`, `generation_config.json`.
Same arguments, same Python version: same bytes.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from gyre_data.errors import ConfigError

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "make_tiny"]

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Added tokens in id order. The first three are control tokens; the others stay in decoded text, as Qwen3's do."""

_NUM_CONTROL = 3

# ChatML; tools and calls in the Hermes form; results of one turn share a user message, as in Qwen3. Thoughts stay.
CHAT_TEMPLATE = """\
{%- set lead = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if lead or tools %}
    {{- '<|im_start|>system\\n' + lead }}
    {%- if tools %}
        {{- '\\n\\n' if lead else '' }}
        {{- '# Tools\\n\\nThese functions can be called, one JSON signature a line:\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' + (tool | tojson) }}
        {%- endfor %}
        {{- '\\n</tools>\\n\\nTo call one, write its name and arguments as JSON between call tags:\\n' }}
        {{- '<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else '' %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text }}
        {%- for item in message.tool_calls or [] %}
            {%- set call = item.function if item.function else item %}
            {{- '\\n' if text or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

_STDLIB_TEXTS = ("argparse.py", "subprocess.py", "pathlib.py", "json/decoder.py", "textwrap.py", "shutil.py", "this.py")


def make_tiny(
    folder: str | Path,
    *,
    arch: str = "qwen3",
    vocab: int = 1024,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 65536,
    seed: int = 0,
    texts: Iterable[str] | None = None,
    init_std: float = 0.05,
) -> Path:
    """Write a loadable checkpoint of random weights to `folder` and return the folder.

    The tokenizer is a byte-level BPE trained on `texts` (sources of the standard library by default): it encodes any
    text, and every id below `vocab` decodes, so no sampled id is ever outside the tokenizer.
    """
    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise ConfigError(
            "a tiny model needs hidden divisible by heads, heads by kv_heads, and an even head size; "
            f"got hidden {hidden}, heads {heads}, kv_heads {kv_heads}: change one of them"
        )
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab < smallest:
        raise ConfigError(
            f"a byte-level vocabulary needs at least {smallest} ids, got vocab={vocab}: ask for more, 1024 trains well"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    special_ids = _write_tokenizer(folder, vocab, context, _stdlib_texts() if texts is None else texts)
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
        "initializer_range": init_std,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0 if context <= 8192 else 1000000.0},
        "bos_token_id": None,
        "eos_token_id": special_ids["<|im_end|>"],
        "pad_token_id": special_ids["<|endoftext|>"],
    }
    _write_model(folder, arch, sizes, seed)
    return folder


def _stdlib_texts() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    return [(root / name).read_text(encoding="utf-8") for name in _STDLIB_TEXTS]


def _write_tokenizer(folder: Path, vocab: int, context: int, texts: Iterable[str]) -> dict[str, int]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(texts), trainer=trainer)
    # A short text can run out of merges: unused names fill the gap, so that every id of the model decodes.
    num_unused = vocab - len(SPECIAL_TOKENS) - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|unused_{i}|>" for i in range(num_unused)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL_TOKENS[:_NUM_CONTROL]])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in SPECIAL_TOKENS[_NUM_CONTROL:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written by hand and small, so that older and newer transformers read the same thing in it.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    ids = tokenizer.get_vocab()
    return {text: ids[text] for text in SPECIAL_TOKENS}


def _write_model(folder: Path, arch: str, sizes: dict[str, object], seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import (
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    known = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    if arch not in known:
        raise ConfigError(f"arch must be one of {', '.join(sorted(known))}, got {arch!r}")
    config_class, model_class = known[arch]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**sizes)).to(torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=sizes["eos_token_id"], pad_token_id=sizes["pad_token_id"], do_sample=True
    )
    # save_pretrained would do the same with a progress bar of its own.
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [model_class.__name__]
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
