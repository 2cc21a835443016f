"""Hugging Face weights in and out of a TreeGPTModel in slices and stages, exact in both directions.

Megatron fuses what Hugging Face keeps apart: `linear_qkv` holds, per key-value group, [its query heads | k | v], and
`linear_fc1` holds [gate | up], each sliced over ranks separately. One table below says it for every parameter,
and for whatever has the shapes of the parameters (a reference's weights, moments in tests), in any layout of ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gyre_data.errors import ConfigError, CorruptError

from .layers import ep_size
from .model import TreeGPTModel
from .parallel import from_stage, gather_shards, is_first_rank, pp_rank, pp_size, tp_rank, tp_size

__all__ = ["TensorSource", "export_tensors", "import_tensors", "load_hf", "save_hf", "write_tensors"]

_MAX_FILE_BYTES = 4 << 30
_SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template*", "*.jinja", "*.model",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One Megatron parameter: the Hugging Face tensors it is made of, and how they are joined and sliced."""

    name: str
    """In its pipeline stage, where layers are numbered from 0."""
    stage: int
    hf_names: tuple[str, ...]
    kind: str  # copy | rows | columns | qkv | gate_up
    groups: int = 1
    """Groups of neighbouring tensor-parallel ranks that hold different tensors; `hf_names` are those of all groups."""


def _entries(model: TreeGPTModel) -> Iterator[_Entry]:
    stage = 0

    def entry(name: str, kind: str, *hf_names: str) -> _Entry:
        return _Entry(name=name, stage=stage, hf_names=hf_names, kind=kind)

    yield entry("embedding.word_embeddings.weight", "rows", "model.embed_tokens.weight")
    config = model.config
    per_stage = config.num_layers // pp_size()
    for i in range(config.num_layers):
        stage = i // per_stage
        mine, theirs = f"decoder.layers.{i % per_stage}.", f"model.layers.{i}."
        attn = theirs + "self_attn."
        yield entry(mine + "input_layernorm.weight", "copy", theirs + "input_layernorm.weight")
        suffixes = ("weight", "bias") if config.add_qkv_bias else ("weight",)
        for suffix in suffixes:
            names = (f"{attn}{x}_proj.{suffix}" for x in "qkv")
            yield entry(f"{mine}self_attention.linear_qkv.{suffix}", "qkv", *names)
        if config.qk_layernorm:
            for x in "qk":
                yield entry(f"{mine}self_attention.{x}_layernorm.weight", "copy", f"{attn}{x}_norm.weight")
        yield entry(mine + "self_attention.linear_proj.weight", "columns", attn + "o_proj.weight")
        yield entry(mine + "pre_mlp_layernorm.weight", "copy", theirs + "post_attention_layernorm.weight")
        if model.sparse_layers[i]:
            yield entry(mine + "mlp.router.weight", "copy", theirs + "mlp.gate.weight")
            yield from _experts(config.num_moe_experts, stage, mine + "mlp.experts.", theirs + "mlp.experts.")
            continue
        names = (f"{theirs}mlp.{x}_proj.weight" for x in ("gate", "up"))
        yield entry(mine + "mlp.linear_fc1.weight", "gate_up", *names)
        yield entry(mine + "mlp.linear_fc2.weight", "columns", theirs + "mlp.down_proj.weight")
    yield entry("decoder.final_layernorm.weight", "copy", "model.norm.weight")
    if not model.share_embeddings_and_output_weights:
        yield entry("output_layer.weight", "rows", "lm_head.weight")


def _experts(num_experts: int, stage: int, mine: str, theirs: str) -> Iterator[_Entry]:
    """The experts of a layer; with expert parallelism a rank's n-th is another one in every group."""
    groups = ep_size()
    local = num_experts // groups
    for n in range(local):
        numbers = range(n, num_experts, local)
        fc1 = tuple(f"{theirs}{e}.{x}_proj.weight" for e in numbers for x in ("gate", "up"))
        fc2 = tuple(f"{theirs}{e}.down_proj.weight" for e in numbers)
        for part, kind, names in (("linear_fc1", "gate_up", fc1), ("linear_fc2", "columns", fc2)):
            name = f"{mine}local_experts.{n}.{part}.weight"
            yield _Entry(name=name, stage=stage, hf_names=names, kind=kind, groups=groups)


def _copies(model: TreeGPTModel) -> Iterator[_Entry]:
    """What a later stage holds again of an earlier one's."""
    if model.share_embeddings_and_output_weights and pp_size() > 1:
        embedding = ("model.embed_tokens.weight",)
        yield _Entry(name="output_layer.weight", stage=pp_size() - 1, hf_names=embedding, kind="rows")


def _own_names(entry: _Entry) -> tuple[str, ...]:
    """The tensors that this rank holds a slice of."""
    each = len(entry.hf_names) // entry.groups
    group = tp_rank() // (tp_size() // entry.groups)
    return entry.hf_names[group * each : (group + 1) * each]


def _slice(entry: _Entry, parts: tuple[torch.Tensor, ...], model: TreeGPTModel) -> torch.Tensor:
    """Return this rank's Megatron tensor of whole Hugging Face tensors."""
    size = tp_size() // entry.groups
    rank = tp_rank() % size
    match entry.kind:
        case "rows":
            (full,) = parts
            if full.shape[0] == model.real_vocab < model.vocab_size:
                padding = full.new_zeros(model.vocab_size - full.shape[0], *full.shape[1:])
                full = torch.cat((full, padding))
            return full.chunk(size)[rank]
        case "columns":
            return parts[0].chunk(size, dim=1)[rank]
        case "qkv":
            groups = model.config.num_query_groups
            by_group = [p.reshape(groups, -1, *p.shape[1:]) for p in parts]
            return torch.cat(by_group, dim=1).flatten(0, 1).chunk(size)[rank]
        case "gate_up":
            return torch.cat([p.chunk(size)[rank] for p in parts])
    return parts[0]


def _join(entry: _Entry, shards: list[torch.Tensor], model: TreeGPTModel) -> tuple[torch.Tensor, ...]:
    """Return the whole Hugging Face tensors of every rank's Megatron tensor: the inverse of `_slice`."""
    config = model.config
    if entry.groups > 1:
        size = len(shards) // entry.groups
        one = replace(entry, groups=1)
        return tuple(x for g in range(entry.groups) for x in _join(one, shards[g * size : (g + 1) * size], model))
    match entry.kind:
        case "rows":
            return (torch.cat(shards)[: model.real_vocab],)
        case "columns":
            return (torch.cat(shards, dim=1),)
        case "qkv":
            full = torch.cat(shards)
            rows = (config.num_attention_heads // config.num_query_groups, 1, 1)
            by_group = full.reshape(config.num_query_groups, -1, *full.shape[1:])
            split = by_group.split([n * config.kv_channels for n in rows], dim=1)
            return tuple(p.flatten(0, 1) for p in split)
        case "gate_up":
            halves = [shard.chunk(2) for shard in shards]
            return torch.cat([h[0] for h in halves]), torch.cat([h[1] for h in halves])
    return (shards[0],)


def export_tensors(
    model: TreeGPTModel, tensors: Mapping[str, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, whole tensor on CPU) of the weights, or of `tensors` keyed by Megatron name.

    Every rank of the group must iterate to the end; the values are whole on each.
    """
    own = dict(model.named_parameters()) if tensors is None else tensors
    device = next(model.parameters()).device
    for entry in _entries(model):
        parts: tuple[torch.Tensor, ...] = ()
        if entry.stage == pp_rank():
            parts = _join(entry, gather_shards(own[entry.name].detach().to(device)), model)
        for name, whole in zip(entry.hf_names, from_stage(entry.stage, parts, device), strict=True):
            yield name, whole.cpu().contiguous()


def import_tensors(
    model: TreeGPTModel, read: Callable[[str], torch.Tensor], into: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Fill the weights, or `into` keyed by Megatron name, from whole tensors that `read` gives by Hugging Face name."""
    own = dict(model.named_parameters()) if into is None else into
    with torch.no_grad():
        for entry in [*_entries(model), *_copies(model)]:
            if entry.stage != pp_rank():
                continue
            target = own[entry.name]
            local = _slice(entry, tuple(read(name) for name in _own_names(entry)), model)
            if local.shape != target.shape:
                raise CorruptError(
                    f"{', '.join(_own_names(entry))}: wanted shape {tuple(target.shape)} on this rank, the file gives "
                    f"{tuple(local.shape)}; its config.json does not belong to these weights"
                )
            target.copy_(local)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CorruptError(
            f"{file}: wanted a safetensors file, got {error}; copy it again, or delete the checkpoint to resume from "
            "the one before"
        ) from error


class TensorSource:
    """Reads tensors by name from safetensors files of a folder: one file, several with an index, or `pattern`."""

    def __init__(self, folder: Path, pattern: str = "model*.safetensors") -> None:
        self.folder = folder
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob(pattern)):
            with _opened(file) as opened:
                self._files.update(dict.fromkeys(opened.keys(), file))
        if not self._files:
            raise ConfigError(f"model weights: wanted {pattern} in {folder}, found none; save it with safetensors")

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor, in the order of the files."""
        return tuple(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str) -> torch.Tensor:
        """Return one tensor; raise CorruptError that names it when it is missing."""
        if name not in self._files:
            raise CorruptError(f"{self.folder}: tensor {name} is missing; the weights are not those of its config.json")
        with _opened(self._files[name]) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor


def load_hf(model: TreeGPTModel, folder: str | Path) -> None:
    """Fill every parameter from a Hugging Face folder, converting to the model's dtype."""
    import_tensors(model, TensorSource(Path(folder)))


def save_hf(model: TreeGPTModel, folder: str | Path, source: str | Path) -> None:
    """Write a folder that transformers and SGLang load: weights from every rank, the rest copied from `source`.

    All ranks must call it; rank 0 writes. The folder must not hold weights yet. `save_checkpoint` makes it atomic.
    """
    folder, source = Path(folder), Path(source)
    first = is_first_rank()
    if first:
        folder.mkdir(parents=True, exist_ok=True)
    write_tensors(export_tensors(model), folder, "model", enabled=first)
    if not first:
        return
    for pattern in _SIDE_FILES:
        for file in source.glob(pattern):
            if file.suffix != ".safetensors" and file.is_file():
                shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def write_tensors(
    tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, stem: str, *, enabled: bool = True
) -> None:
    """Write named tensors as `stem.safetensors`, or as numbered files with an index when they are large.

    `tensors` is consumed on every rank (gathering needs all of them) and written where `enabled`.
    """
    files: list[Path] = []
    names: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = held_bytes = 0

    def flush() -> None:
        nonlocal held, held_bytes
        if held:
            files.append(folder / f"{stem}-part{len(files)}.safetensors")
            names.append(list(held))
            save_file(held, files[-1], metadata={"format": "pt"})
            held, held_bytes = {}, 0

    for name, tensor in tensors:
        if not enabled:
            continue
        size = tensor.numel() * tensor.element_size()
        if held_bytes + size > _MAX_FILE_BYTES:
            flush()
        held[name] = tensor
        held_bytes += size
        total += size
    flush()
    if len(files) == 1:
        files[0].rename(folder / f"{stem}.safetensors")
    elif files:
        final = [f"{stem}-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        for file, name in zip(files, final, strict=True):
            file.rename(folder / name)
        weight_map = {name: file for file, held_names in zip(final, names, strict=True) for name in held_names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
