"""A tiny checkpoint means the same to SGLang's transformers as to ours: tokens, template and configuration."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from gyre_train.tiny import make_tiny
from tests.support.engines import sglang_venv

pytestmark = pytest.mark.real

READ = """
import json, sys
from transformers import AutoConfig, AutoTokenizer
folder, case = sys.argv[1], json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(folder)
config = AutoConfig.from_pretrained(folder)
print(json.dumps({
    "ids": [tokenizer.encode(text) for text in case["texts"]],
    "rendered": tokenizer.apply_chat_template(
        case["messages"], tools=case["tools"], tokenize=False, add_generation_prompt=True
    ),
    "config": [config.vocab_size, config.rope_parameters, config.eos_token_id, config.max_position_embeddings],
}))
"""
CASE = {
    "texts": ["def f(x):\n    return x", "naïve 数 \x00", "<|im_start|>user\nhi<|im_end|>\n<tool_call>\n{}"],
    "messages": [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "ls", "arguments": {"path": "é"}}}],
        },
        {"role": "tool", "content": "a"},
    ],
    "tools": [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}],
}


def test_both_transformers_read_the_same(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, vocab=600, context=2048)
    python = sglang_venv() / "bin" / "python"
    done = subprocess.run(
        [str(python), "-c", READ, str(folder)],
        input=json.dumps(CASE),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    assert theirs["ids"] == [tokenizer.encode(text) for text in CASE["texts"]]
    assert theirs["rendered"] == tokenizer.apply_chat_template(
        CASE["messages"], tools=CASE["tools"], tokenize=False, add_generation_prompt=True
    )
    assert theirs["config"] == [
        config.vocab_size,
        config.rope_parameters,
        config.eos_token_id,
        config.max_position_embeddings,
    ]
