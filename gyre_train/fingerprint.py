"""Was the data made with the model's own tokenizer and chat template? Standard library and the run's tables only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from gyre_data.errors import ConfigError, DataError

if TYPE_CHECKING:
    from gyre_data.store import Run

__all__ = ["check_fingerprints"]


def check_fingerprints(runs: Sequence[Run], model: str) -> None:
    """Refuse runs whose tokenizer or template is not the model's, and nodes that another one made than their run's.

    A run says in run.json where its tokenizer and template lie, and by which fingerprint its nodes name them. Runs that
    do not say (imported, merged, or moved away from their tokenizer) must at least name one and the same fingerprint.
    """
    known = {str(run.info["fingerprint"]) for run in runs if _is_models_own(run, model) and run.info.get("fingerprint")}
    first: tuple[str, str] | None = None
    for run in runs:
        for fingerprint, execution_id in _recorded(run).items():
            if fingerprint in known:
                continue
            if first is None and not known:
                first = (fingerprint, execution_id)
            other = next(iter(known), None) if first is None else first[0]
            if other is not None and fingerprint != other:
                where = "" if first is None else f" of execution {first[1]}"
                raise DataError(
                    f"execution {execution_id} of {run.path} was recorded with tokenizer and template "
                    f"{fingerprint[:4]}, wanted {other[:4]}{where}; train runs of two templates apart"
                )


def _recorded(run: Run) -> dict[str, str]:
    """Fingerprints of the nodes that hold token ids, each with an execution that has it."""
    nodes = run.table("nodes").select(["fingerprint", "execution_id", "counted_tokens"])
    nodes = nodes.filter(pc.and_(pc.is_valid(nodes.column("fingerprint")), pc.is_null(nodes.column("counted_tokens"))))
    found = nodes.group_by("fingerprint").aggregate([("execution_id", "min")])
    return dict(zip(*(found.column(name).to_pylist() for name in ("fingerprint", "execution_id_min")), strict=True))


def _is_models_own(run: Run, model: str) -> bool:
    """True when the files the run was recorded with are the model's; ConfigError when they are others; False: gone."""
    recorded_with = run.info.get("tokenizer")
    if not isinstance(recorded_with, str) or not (Path(recorded_with) / "tokenizer.json").is_file():
        return False
    own_template = run.info.get("template")
    theirs = _identity(Path(recorded_with), Path(own_template) if own_template else None)
    mine = _identity(Path(model))
    for what, mend in (
        ("tokenizer", "set model.path to the model that was served"),
        ("template", "put the template it was recorded with into the model's folder, or record again"),
    ):
        if theirs[what] != mine[what]:
            raise ConfigError(
                f"{run.path} was recorded with {what} {theirs[what][:4]}, the model has {mine[what][:4]}; {mend}"
            )
    return True


def _identity(folder: Path, template_file: Path | None = None) -> dict[str, str]:
    """Digests of what turns messages into ids: the tokenizer's file and the chat template's text."""
    file = folder / "tokenizer.json"
    tokenizer = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "none"
    template = ""
    template_file = template_file or folder / "chat_template.jinja"
    if template_file.is_file():
        template = template_file.read_text(encoding="utf-8")
    elif (folder / "tokenizer_config.json").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = str(config.get("chat_template") or "")
    return {"tokenizer": tokenizer, "template": hashlib.sha256(template.strip().encode()).hexdigest()}
