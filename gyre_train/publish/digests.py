"""Digests of a checkpoint's tensors as an engine should report them, whatever it fused or padded.

An SGLang server on a CPU and the embedded engine give the first 16 hex digits of sha256 over a tensor's bytes. SGLang
holds q, k, v and gate, up in one tensor each, experts stacked, and pads the vocabulary with zero rows.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from gyre_data.errors import EngineError
from gyre_train.megatron.weights import TensorSource

__all__ = ["FolderDigests"]

_VOCAB_BLOCK = 64
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


class FolderDigests:
    """What an engine's digests must be when it serves this folder in `dtype` (None: as stored)."""

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        self._tensors = TensorSource(folder)
        self._names = set(self._tensors.names)
        self._tied = bool(json.loads((folder / "config.json").read_text("utf-8")).get("tie_word_embeddings"))
        self._dtype = dtype
        self._known: dict[str, frozenset[str]] = {}
        self._lock = threading.Lock()

    def check(self, found: Mapping[str, str]) -> None:
        """Raise EngineError that names the first tensors that differ, are unknown here, or are missing there."""
        with self._lock:  # engines of one publish share the work
            wrong: list[str] = []
            used: set[str] = set()
            for name, digest in found.items():
                parts = self._parts(name)
                used.update(part for group in parts for part in group)
                if name not in self._known:
                    self._known[name] = self._digests(parts) if parts else frozenset()
                if digest not in self._known[name]:
                    wrong.append(name)
        wrong += sorted(self._names - used)
        if wrong:
            raise EngineError(
                f"wanted the tensors of {self._tensors.folder} in the engine, {len(wrong)} of {len(found)} differ: "
                f'{", ".join(wrong[:3])}; publish again, or set publish.confirm = "version" if it stores weights '
                "in a layout of its own"
            )

    def _parts(self, name: str) -> list[tuple[str, ...]]:
        """Names of the folder's tensors this one is made of: groups that are stacked, each joined along its rows."""
        if name in self._names:
            return [(name,)]
        if name == "lm_head.weight" and self._tied:
            return [("model.embed_tokens.weight",)]
        stem, _, leaf = name.rpartition(".experts.")
        if stem and leaf in _EXPERTS:
            numbers = {int(m[1]) for n in self._names if (m := re.match(re.escape(stem) + r"\.experts\.(\d+)\.", n))}
            return [tuple(f"{stem}.experts.{i}.{p}.weight" for p in _EXPERTS[leaf]) for i in sorted(numbers)]
        for fused, parts in _FUSED.items():
            if f".{fused}." in name:
                made = tuple(name.replace(fused, part) for part in parts)
                return [made] if self._names.issuperset(made) else []
        return []

    def _digests(self, parts: list[tuple[str, ...]]) -> frozenset[str]:
        tensors = [torch.cat([self._tensors(name) for name in group]) for group in parts]
        tensor = tensors[0] if len(tensors) == 1 and ".experts." not in parts[0][0] else torch.stack(tensors)
        if self._dtype is not None:
            tensor = tensor.to(self._dtype)
        found = {_digest(tensor)}
        if parts[0][0] in ("model.embed_tokens.weight", "lm_head.weight"):
            short = -tensor.shape[0] % _VOCAB_BLOCK
            found.add(_digest(torch.cat((tensor, tensor.new_zeros(short, *tensor.shape[1:])))))
        return frozenset(found)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)).hexdigest()[:16]
