"""Runs in the formats of other tools: `export` writes one, whole or not at all, and tells what it left out.

Secrets are taken out unless the caller says otherwise. What each format cannot hold is told in docs/convert.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from gyre_data.beside import new_file
from gyre_data.eligible import ROLE_ORDER
from gyre_data.errors import ConfigError
from gyre_data.reader import Run
from gyre_data.redact import Redactor
from gyre_data.run_copy import Exported, export_run
from gyre_data.schema import AgentRole

from .export_job import Job, new_folder, select
from .to_atif import atif_files
from .to_chat import write_chat
from .to_parquet import write_parquet
from .to_rows import write_prime_rl, write_slime
from .to_verifiers import write_verifiers

__all__ = ["EXPORT_FORMATS", "export", "format_of"]

_FILES: dict[str, Callable[[Job, IO[bytes]], None]] = {
    "chat": write_chat,
    "parquet": write_parquet,
    "slime": write_slime,
    "prime-rl": write_prime_rl,
    "verifiers": write_verifiers,
}
_FOLDERS: dict[str, Callable[[Job], Iterator[tuple[str, bytes]]]] = {"atif": atif_files}
EXPORT_FORMATS = ("run", *_FILES, *_FOLDERS)
_SUFFIXES = {".jsonl": "chat", ".parquet": "parquet"}
_J_MAX = 5
_WHOLE = ("atif", "verifiers")  # formats that hold executions, not trajectories


def export(
    run: Run,
    out: str | Path,
    *,
    format: str | None = None,
    where: str | None = None,
    redact: bool = True,
    patterns: Iterable[str] = (),
    force: bool = False,
    j_max: int | None = _J_MAX,
    roles: Sequence[AgentRole | str] = ROLE_ORDER,
    evaluators: Mapping[str, float] | None = None,
) -> Exported:
    """Write `run` to `out` in another tool's format; left out, the format is what the name's suffix says.

    `where` is a condition of SQL over the view `executions` (and `reward`, `advantage`, `admitted`, `reason`), such as
    `score > 0.5`. `redact` takes secrets out, and with them token ids that would tell them; `patterns` are regular
    expressions of more secrets. `force` replaces a file that is there. `j_max`, `roles` and `evaluators` are those of
    `admit`, for formats that hold trajectories. Raises ConfigError for what cannot be done as asked, and
    CorruptError when a byte of the run is not what was recorded.
    """
    out = Path(out)
    format = format_of(out, format)
    run.check_bytes()
    if format == "run":
        if where is not None or force or j_max != _J_MAX or tuple(roles) != ROLE_ORDER or evaluators is not None:
            raise ConfigError(
                "wanted a whole copy of the run, got settings that choose from it (or force); "
                "a copy takes redact and patterns only: leave them out, or name another format"
            )
        return export_run(run, out, redact=redact, patterns=patterns)
    if format in _WHOLE and (j_max != _J_MAX or tuple(roles) != ROLE_ORDER):
        raise ConfigError(f"wanted whole executions as {format}, got j_max or roles; leave them out, or use where")
    job = Job(
        run,
        only=select(run, where, j_max=j_max, evaluators=evaluators),
        j_max=j_max,
        roles=roles,
        evaluators=evaluators,
        redactor=Redactor(patterns) if redact else None,
    )
    if format in _FOLDERS:
        new_folder(out, _FOLDERS[format](job), force=force)
    else:
        with new_file(out, force=force) as file:
            _FILES[format](job, file)
    return Exported(
        path=out,
        format=format,
        num_rows=dict(job.num_rows),
        secrets=job.secrets,
        num_nodes_redacted=len(job.nodes_redacted),
        left_out={level: dict(found.most_common()) for level, found in job.left_out.items() if found},
    )


def format_of(out: Path, format: str | None = None) -> str:
    """The format that was named, or that the suffix of `out` says; ConfigError when that is not clear."""
    found = format or ("run" if not out.suffix or out.is_dir() else _SUFFIXES.get(out.suffix))
    if found not in EXPORT_FORMATS:
        came = repr(format) if format else f"the name {out.name}"
        raise ConfigError(f"wanted a format to export to, got {came}; give --format {'|'.join(EXPORT_FORMATS)}")
    return found
