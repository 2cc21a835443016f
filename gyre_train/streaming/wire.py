"""What core and satellites say to one another beside tensors: packs as npz, figures and keys as JSON. No pickles."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from gyre_train.figures import Figure, Figures, Max, Mean, Sum
from gyre_train.pack import Pack
from gyre_train.segment_table import SegmentTable

from .board import Key

__all__ = [
    "answer_json",
    "figures_from_json",
    "figures_to_json",
    "key_from_json",
    "packs_from_bytes",
    "packs_to_bytes",
    "read_json",
    "split_query",
]

_ARRAYS = tuple(f.name for f in fields(Pack) if f.name != "segments")
_SEGMENTS = tuple(f.name for f in fields(SegmentTable))
_MOST_BODY_BYTES = 16 << 20
_FIGURES: dict[str, type[Any]] = {kind.__name__: kind for kind in (Sum, Mean, Max)}


def packs_to_bytes(packs: Sequence[Pack]) -> bytes:
    """The arrays of some packs as one npz file."""
    arrays = {"packs": np.array(len(packs))}
    for index, pack in enumerate(packs):
        found = {name: getattr(pack, name) for name in _ARRAYS}
        found |= {f"segments.{name}": getattr(pack.segments, name) for name in _SEGMENTS}
        arrays |= {f"{index}.{name}": array for name, array in found.items() if array is not None}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def packs_from_bytes(data: bytes) -> tuple[Pack, ...]:
    """What `packs_to_bytes` wrote."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        out = []
        for index in range(int(file["packs"])):
            segments = SegmentTable(**{name: file[f"{index}.segments.{name}"] for name in _SEGMENTS})
            arrays: dict[str, Any] = {
                name: file[at] if (at := f"{index}.{name}") in file.files else None for name in _ARRAYS
            }
            out.append(Pack(segments=segments, **arrays))
    return tuple(out)


def figures_to_json(figures: Figures) -> dict[str, list[Any]]:
    """Figures of plain numbers as {name: [kind, number, ...]}."""
    return {
        name: [type(figure).__name__, *(getattr(figure, f.name) for f in fields(figure))]
        for name, figure in figures.items()
    }


def figures_from_json(value: Mapping[str, Sequence[Any]]) -> dict[str, Figure]:
    """What `figures_to_json` wrote; KeyError or ValueError for anything else."""
    out: dict[str, Figure] = {}
    for name, (kind, *amounts) in value.items():
        names = [f.name for f in fields(_FIGURES[kind])]
        out[name] = _FIGURES[kind](**dict(zip(names, map(float, amounts), strict=True)))
    return out


def key_from_json(value: Sequence[Any]) -> Key:
    """[step, group, part] as a key."""
    step, group, part = value
    return int(step), str(group), int(part)


def split_query(target: str) -> tuple[str, dict[str, str]]:
    """A request's path, and what it asks by name."""
    parts = urlsplit(target)
    return parts.path, {name: values[-1] for name, values in parse_qs(parts.query).items()}


def read_json(request: BaseHTTPRequestHandler) -> dict[str, Any]:
    """The JSON object that a request carries; TypeError or ValueError for anything else, or for too much."""
    size = int(request.headers.get("Content-Length", "0"))
    if size > _MOST_BODY_BYTES:
        request.close_connection = True  # the body is not read
        raise ValueError(f"wanted at most {_MOST_BODY_BYTES} bytes, got {size}")
    value = json.loads(request.rfile.read(size))
    if not isinstance(value, dict):
        raise TypeError(f"wanted a JSON object, got {value!r:.60}")
    return value


def answer_json(request: BaseHTTPRequestHandler, status: int, value: Mapping[str, Any] | bytes) -> None:
    """Answer with a JSON object, or with bytes as they are."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    request.send_response(status)
    request.send_header("Content-Type", "application/json" if body is not value else "application/octet-stream")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)
