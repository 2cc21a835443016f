"""Texts of token ids by the tokenizer that the run names, when it is on this machine.

Without it the page shows ids and says why. One id is decoded by itself, so a character that spans several tokens shows
as U+FFFD in each: the ids are what was recorded, texts are a help.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["Vocabulary"]


class Vocabulary:
    """Decodes single ids; `problem` says why there is no text."""

    def __init__(self, tokenizer: str | None) -> None:
        self.name = tokenizer
        self.problem: str | None = None
        self._tokenizer: Any = None
        self._known: dict[int, str] = {}
        file = Path(tokenizer) if tokenizer else None
        if file is None:
            self.problem = "run.json names no tokenizer"
            return
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            self.problem = f"the run's tokenizer {tokenizer} is not on this machine"
            return
        try:
            from tokenizers import Tokenizer  # an extra: nothing else of the page needs it
        except ImportError:
            self.problem = "the Python package tokenizers is not installed"
            return
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001  the library raises plain Exception for a damaged file
            self.problem = f"the run's tokenizer {file} cannot be read: {error}"

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Text by id; empty without a tokenizer."""
        if self._tokenizer is None:
            return {}
        wanted = set(ids)
        for one in wanted - self._known.keys():
            self._known[one] = self._tokenizer.decode([one], skip_special_tokens=False)
        return {one: self._known[one] for one in wanted}
