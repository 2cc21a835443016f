"""The real SmolLM2 tokenizer, where it is installed (tools/tokenizers/install.sh)."""

import os
from functools import lru_cache
from pathlib import Path

import pytest

from gyre_proxy.template import ChatTemplate

ROOT = Path(__file__).resolve().parents[2]


def smollm2_folder() -> Path:
    """Folder with the tokenizer; skips the test when there is none."""
    folder = Path(os.environ.get("GYRE_TEST_SMOLLM2") or ROOT / ".cache" / "tokenizers" / "smollm2")
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no SmolLM2 tokenizer in {folder}; run tools/tokenizers/install.sh")
    return folder


def smollm2_template() -> ChatTemplate:
    """Its template, loaded once."""
    return _loaded(smollm2_folder())


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder)
