"""The real Qwen3 tokenizer, where it is installed (tools/tokenizers/install.sh)."""

import os
from functools import lru_cache
from pathlib import Path

import pytest

from gyre_proxy.template import ChatTemplate

ROOT = Path(__file__).resolve().parents[2]


def qwen3_folder() -> Path:
    """Folder with the tokenizer; skips the test when there is none."""
    folder = Path(os.environ.get("GYRE_TEST_QWEN3") or ROOT / ".cache" / "tokenizers" / "qwen3")
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no Qwen3 tokenizer in {folder}; run tools/tokenizers/install.sh")
    return folder


def qwen3_template() -> ChatTemplate:
    """Its template, loaded once."""
    return _loaded(qwen3_folder())


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder)
