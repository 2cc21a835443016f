"""Token ids back to text, for people: only when the run's tokenizer is at hand and `tokenizers` is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .installing import pip_install

__all__ = ["Decode", "decoder"]

Decode = Callable[[Sequence[int]], str]


def decoder(run: Any, tokenizer: str | Path | None = None) -> Decode | None:
    """What decodes ids of `run`: with `tokenizer` (a folder or tokenizer.json), else with the one `run.json` names.

    None when the run's own cannot be had here: then ids are shown as numbers. ConfigError when a named one cannot.
    """
    named = tokenizer or (getattr(run, "info", None) or {}).get("tokenizer")
    if not named:
        return None
    path = Path(named) if tokenizer else getattr(run, "path", Path()) / named
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded = import_module("tokenizers").Tokenizer.from_file(str(file))
    except Exception as error:
        if tokenizer is None:
            return None
        raise ConfigError(
            f"wanted a tokenizer to decode ids with, {file} cannot be read ({error}); "
            f"name a folder with tokenizer.json, and install `tokenizers`: {pip_install('proxy')}"
        ) from error
    return lambda ids: str(loaded.decode(list(ids), skip_special_tokens=False))
