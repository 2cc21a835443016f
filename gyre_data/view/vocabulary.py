"""Texts of single token ids by the tokenizer that the run names, when it can be had here.

Without it the page shows ids and says why. One id is decoded by itself, so a character that spans several tokens shows
as U+FFFD in each: the ids are what was recorded, texts are a help.
"""

from __future__ import annotations

from collections.abc import Iterable

from gyre_data.decode import decoder
from gyre_data.reader import Run

__all__ = ["Vocabulary"]


class Vocabulary:
    """Decodes single ids; `problem` says why there is no text."""

    def __init__(self, run: Run) -> None:
        self._decode = decoder(run)
        self._known: dict[int, str] = {}
        named = run.info.get("tokenizer")
        self.problem: str | None = None
        if self._decode is None:
            here = "or the Python package tokenizers, is not on this machine"
            self.problem = f"the tokenizer {named}, {here}" if named else "run.json names no tokenizer"

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Text by id; empty without a tokenizer."""
        if self._decode is None:
            return {}
        wanted = set(ids)
        for one in wanted - self._known.keys():
            self._known[one] = self._decode([one])
        return {one: self._known[one] for one in wanted}
