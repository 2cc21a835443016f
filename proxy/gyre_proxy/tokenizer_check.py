"""Whether the proxy's tokenizer is the engine's: a wrong one would record ids that mean something else."""

from __future__ import annotations

from pathlib import Path

import orjson

from gyre_data.errors import ConfigError

from .router import Engine
from .template import Template

__all__ = ["check_tokenizer"]

_PROBE = "Gyre probes: naïve 12,345 <b>déjà</b>\n\n\tfor (i = 0; i < n; ++i) {} 数据 🚚"


async def check_tokenizer(template: Template, engine: Engine, folder: Path) -> None:
    """Raise ConfigError when the engine's model cannot take this tokenizer's ids, or means other text by them."""
    vocab_size = engine.info.vocab_size
    if vocab_size is not None and template.vocab_size > vocab_size:
        raise ConfigError(
            f"Tokenizer {folder} has {template.vocab_size:,} ids, the model of engine {engine.url} {vocab_size:,}; "
            "nothing recorded; pass the served checkpoint's folder"
        )
    difference = _first_difference(folder, engine.info.tokenizer_path)
    if difference is not None:
        raise ConfigError(
            f"Tokenizer {folder} has {template.vocab_size:,} ids, engine {engine.url} wants another (first difference "
            f"id {difference:,}); nothing recorded; pass the served checkpoint's folder {engine.info.tokenizer_path}"
        )
    theirs = await engine.client.tokenize(_PROBE)
    ours = template.encode(_PROBE).ids.tolist()
    if theirs is not None and theirs != ours:
        at = next(
            (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours))
        )
        raise ConfigError(
            f"Tokenizer {folder} is not that of engine {engine.url}: the same text gives other ids from token {at} on; "
            "nothing recorded; pass the served checkpoint's folder"
        )


def _first_difference(ours: Path, theirs: str | None) -> int | None:
    """Lowest id that stands for another token in the engine's folder; None when equal or not readable from here."""
    if theirs is None or ours.resolve() == Path(theirs).resolve():
        return None
    mine, other = _tokens_by_id(ours), _tokens_by_id(Path(theirs))
    if mine is None or other is None or mine == other:
        return None
    return min(i for i in mine.keys() | other.keys() if mine.get(i) != other.get(i))


def _tokens_by_id(folder: Path) -> dict[int, str] | None:
    try:
        content = orjson.loads((folder / "tokenizer.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    vocab = (content.get("model") or {}).get("vocab")
    tokens = {i: text for text, i in vocab.items()} if isinstance(vocab, dict) else {}
    tokens |= {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    return tokens or None
