"""The public chat templates of llama.cpp, where they are installed (tools/tokenizers/install.sh)."""

import os
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gyre_proxy.template import ChatTemplate
from tests.support.qwen3 import qwen3_folder

ROOT = Path(__file__).resolve().parents[2]


def templates_folder() -> Path:
    """Folder with the templates; skips the test when there is none."""
    folder = Path(os.environ.get("GYRE_TEST_TEMPLATES") or ROOT / ".cache" / "tokenizers" / "templates")
    if not any(folder.glob("*.jinja")):
        pytest.skip(f"no chat templates in {folder}; run tools/tokenizers/install.sh")
    return folder


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(qwen3_folder() / "tokenizer.json"))


@lru_cache
def public_template(name: str) -> ChatTemplate:
    """The template `name` on Qwen3's tokenizer: its texts are real, its tokens are not."""
    return ChatTemplate(
        _tokenizer(),
        {"default": (templates_folder() / f"{name}.jinja").read_text(encoding="utf-8")},
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
        kwargs={},
        now=datetime(2026, 1, 1, tzinfo=UTC),
        stop_tokens=["<|im_end|>"],
        digest="qwen3",
    )
