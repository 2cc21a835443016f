"""A run as one file that opens anywhere and asks for nothing: everything the served page could fetch is in it.

Pieces are deflated one by one and inflated by the page when they are opened, so that a million tokens cost nothing
until someone looks at one. Each text is in it once, whoever uses it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from gyre_data.beside import new_file
from gyre_data.errors import ConfigError, DataError
from gyre_data.execution import Execution, executions, find
from gyre_data.reader import Run
from gyre_data.tree import Forest, Tree

from .data import Kept, execution_model, node_tokens, run_figures, run_model
from .page import Chunk, page
from .texts import Texts
from .training import Training
from .vocabulary import Vocabulary

__all__ = ["write_report"]

STEPS_TOGETHER = 50
"""Steps of training in one chunk; source.js counts on it."""
_BUNDLE_BYTES = 1 << 19  # texts inflated together when one of them is opened


def write_report(
    run: Run,
    out: str | Path,
    *,
    execution: str | None = None,
    j_max: int | None = 5,
    evaluators: Mapping[str, float] | None = None,
    training: Training | None = None,
) -> Path:
    """Write `run`, or one execution of it, to the HTML file `out`; raises ConfigError when it cannot be written.

    The file holds the texts and raw requests of the run: redact first (`gyre export`) what may not be given away.
    """
    out, figures = Path(out), run_figures(run, j_max=j_max, evaluators=evaluators)
    known = executions(run)
    wanted = list(known) if execution is None else [find(known, execution)]
    try:
        with new_file(out, force=True) as file:  # for its owner alone, as the run is: it holds every text
            chunks = page(
                chain(_chunks(run, wanted, figures), _training(training)), title=f"{Path(run.path).name} - gyre view"
            )
            file.writelines(chunk.encode() for chunk in chunks)
    except OSError as error:
        raise ConfigError(f"wanted to write a report to {out}, got: {error}; name another place") from error
    return out


def _chunks(run: Run, wanted: Sequence[str], figures: dict[str, Any]) -> Iterator[Chunk]:
    texts, forest, known = Texts(run), Forest(run), executions(run)
    told = run_model(run)
    told["executions"] = [one for one in told["executions"] if one["execution_id"] in set(wanted)]
    yield _json("run", told)
    yield _json("figures", figures)
    bundles = _Bundles(texts)
    ids: set[int] = set()
    for number, execution_id in enumerate(wanted):
        if execution_id not in forest:
            continue
        execution = Execution(run, known[execution_id], forest)
        try:
            _ = execution.tree
        except DataError as error:  # one that contradicts itself says nothing about the others
            yield _json(f"execution:{number}", {"problem": str(error)})
            continue
        model = execution_model(execution, Kept(texts), j_max=figures["j_max"])
        yield _json(f"execution:{number}", model)
        yield from _tokens(number, execution.tree)
        ids |= _distinct(execution.tree)
        yield from bundles.add(model["blobs"])
    yield from bundles.rest()
    yield _json("bundles", bundles.place)
    vocabulary = Vocabulary(run)
    yield _json("vocabulary", {"problem": vocabulary.problem, "texts": vocabulary.texts(ids)})


def _training(training: Training | None) -> Iterator[Chunk]:
    yield _json("training", None if training is None else training.model())
    if training is None:
        return
    steps = [row["step"] for row in training.folder.steps]
    for at in range(0, len(steps), STEPS_TOGETHER):
        yield _json(f"steps:{at // STEPS_TOGETHER}", [training.step(step) for step in steps[at : at + STEPS_TOGETHER]])


def _json(name: str, value: Any) -> Chunk:
    return _deflated(name, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))


def _deflated(name: str, data: bytes) -> Chunk:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return Chunk(name=name, data=packer.compress(data) + packer.flush())


def _tokens(number: int, tree: Tree) -> Iterable[Chunk]:
    ids, logprobs = node_tokens(tree, range(len(tree)))
    yield _deflated(f"ids:{number}", ids)
    # Bytes of one significance together: exponents repeat, mantissas do not.
    planes = np.frombuffer(logprobs, np.uint8).reshape(-1, 4).T.tobytes()
    yield _deflated(f"logprobs:{number}", planes)


def _distinct(tree: Tree) -> set[int]:
    found: set[int] = set()
    for i in range(len(tree)):
        found.update(np.unique(tree.ids(i)).tolist())
    return found


class _Bundles:
    """Puts texts into chunks of some size, each text once; `place` says in which chunk a blob lies."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self.place: dict[str, int] = {}
        self._open: dict[str, str] = {}
        self._num_chars, self._number = 0, 0

    def add(self, blob_ids: Iterable[str]) -> Iterator[Chunk]:
        for blob_id in blob_ids:
            if blob_id in self.place or (text := self._texts.plain(blob_id)) is None:
                continue
            self.place[blob_id] = self._number
            self._open[blob_id] = text
            self._num_chars += len(text)
            if self._num_chars >= _BUNDLE_BYTES:
                yield from self.rest()

    def rest(self) -> Iterator[Chunk]:
        if self._open:
            yield _json(f"texts:{self._number}", self._open)
            self._open, self._num_chars = {}, 0
            self._number += 1
