"""Tokens and log-probs as agent runs hold them, without a model: Python's standard library, tokenised.

With Qwen3's tokenizer where it is cached, else with whole words numbered by how frequent they are; each token keeps its
text, so that messages can be written too. Log-probs are drawn so that most are near zero, as those of a trained model.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Source", "read_source"]

_CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tokenizers" / "qwen3" / "tokenizer.json"
_VOCABULARY = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A stream of tokens with the text of each, and a pool of log-probs; both are read round and round."""

    tokenizer: str
    ids: npt.NDArray[np.int32]
    text: bytes
    end: npt.NDArray[np.int64]
    """Where the text of each token ends."""
    logprobs: npt.NDArray[np.float32]

    def take(self, start: int, count: int) -> npt.NDArray[np.int32]:
        """`count` ids from place `start` of the endless stream."""
        return _round(self.ids, start, count)

    def take_logprobs(self, start: int, count: int) -> npt.NDArray[np.float32]:
        """`count` log-probs from place `start` of the endless pool."""
        return _round(self.logprobs, start, count)

    def text_of(self, start: int, count: int) -> str:
        """Text of `count` ids from place `start`, cut where the stream ends."""
        first = start % len(self.ids)
        last = min(first + count, len(self.ids)) - 1
        begin = int(self.end[first - 1]) if first else 0
        return self.text[begin : int(self.end[last])].decode(errors="replace")


def _round(values: npt.NDArray[np.generic], start: int, count: int) -> npt.NDArray[np.generic]:
    first = start % len(values)
    times = -(-(first + count) // len(values))
    return (np.concatenate([values] * times) if times > 1 else values)[first : first + count]


def read_source(num_tokens: int, seed: int = 0) -> Source:
    """About `num_tokens` tokens of the standard library's own source files."""
    texts, wanted = [], 5 * num_tokens  # characters: a token of code is four or less
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts and wanted > 0:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            wanted -= len(texts[-1])
    rng = np.random.default_rng(seed)
    logprobs = -np.exp(rng.normal(-4.0, 3.0, 1 << 22)).clip(1e-9, 30.0).astype(np.float32)
    name, ids, pieces = _qwen3(texts) if _CACHE.exists() else _words(texts)
    ids, pieces = ids[:num_tokens], pieces[:num_tokens]
    end = np.fromiter(accumulate(map(len, pieces)), np.int64, len(pieces))
    return Source(tokenizer=name, ids=np.asarray(ids, np.int32), text=b"".join(pieces), end=end, logprobs=logprobs)


def _qwen3(texts: list[str]) -> tuple[str, list[int], list[bytes]]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from tokenizers import Tokenizer, decoders

    tokenizer = Tokenizer.from_file(str(_CACHE))
    ids = [i for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False) for i in one.ids]
    decode = decoders.ByteLevel().decode
    piece = {i: decode([tokenizer.id_to_token(i)]).encode(errors="replace") for i in set(ids)}
    return "qwen3", ids, [piece[i] for i in ids]


def _words(texts: list[str]) -> tuple[str, list[int], list[bytes]]:
    pieces = [piece for text in texts for piece in re.findall(r" ?\w{1,8}|\s+|[^\w\s]+", text)]
    number = {piece: i for i, (piece, _) in enumerate(Counter(pieces).most_common(_VOCABULARY - 1), 1)}
    return "words", [number.get(piece, 0) for piece in pieces], [piece.encode(errors="replace") for piece in pieces]
