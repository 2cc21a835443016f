"""`gyre rm`: executions that nobody shall see any more.

Removing names them in the manifest: readers leave their rows out from then on. Purging also rewrites every segment that
holds a row of them, drops the blobs that no remaining row names, and clears `quarantine/` and their workspaces. After
it the bytes are gone from the folder.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from . import manifest as manifests
from .errors import ConfigError
from .execution import executions, find
from .manifest import Manifest
from .pins import LEASES, leased, tags
from .reader import Run, conformed
from .recovery import QUARANTINE
from .removed import nodes_of, visible
from .rewrite import (
    check_sources,
    codec_of,
    drop_unnamed,
    last_sequence,
    owned,
    publish_tables,
    rebatched,
    write_segments,
)
from .schema import RUN_TABLES
from .segment import Sealed, open_sealed

__all__ = ["Removal", "plan_removal", "remove"]

_WRITER = "purge"
_BLOB_COLUMNS = (
    ("nodes", "message_blobs"),
    ("calls", "request_blobs"),
    ("calls", "response_blobs"),
    ("calls", "tools_blob"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """A removal that was done, or with `manifest` None the plan of one."""

    path: str
    purge: bool
    manifest: int | None
    executions: tuple[str, ...]
    """Those that are removed now; with `purge` also those removed before."""
    num_calls: int
    num_nodes: int
    num_tokens: int
    num_scores: int
    tags: tuple[str, ...]
    """Tags that still show them; a purge is refused while there are any."""
    num_blobs: int = 0
    """Texts that no remaining row names; only a purge clears them."""
    quarantine_files: int = 0
    workspaces: tuple[str, ...] = ()
    clients_folder: bool = False
    """Whether the run has a `clients/`, where clients keep copies of their own: nothing there is removed."""
    freed_bytes: int = 0


def plan_removal(path: str | Path, wanted: Iterable[str] = (), *, purge: bool = False) -> Removal:
    """What `remove` would do now. Takes no lock; errors as `remove`, but for the lock."""
    run = Run(Path(path))
    return _plan(run, _resolved(run, wanted, purge), purge)


def remove(path: str | Path, wanted: Iterable[str] = (), *, purge: bool = False) -> Removal:
    """Remove the executions whose ids start with `wanted`; with `purge`, and all removed before, from the disk too.

    Takes the run's lock, or raises ConfigError that says who writes it; DataError for an id that is not there. A purge
    raises ConfigError while a tag or a lease still needs the files. A crash leaves the folder as it was or as it
    becomes; a purge that was cut off is finished by the next one.
    """
    path = Path(path)
    with owned(path, _WRITER) as current:
        if purge:
            check_sources(path, current, RUN_TABLES)
        run = Run(path)
        plan = _plan(run, _resolved(run, wanted, purge), purge)
        if purge:
            return _purge(run, current, plan)
        hidden = tuple(sorted({*current.removed, *plan.executions}))
        published = publish_tables(path, {}, _WRITER, removed=hidden)
    return replace(plan, manifest=published.number)


def _resolved(run: Run, wanted: Iterable[str], purge: bool) -> tuple[str, ...]:
    """Full ids. Those that were removed before can be named again for a purge only."""
    known = list(executions(run))
    before = run.manifest.removed if purge else ()
    named = {find([*known, *before], prefix) for prefix in wanted}
    if not named and not purge:
        raise ConfigError(f"wanted executions of {run.path} to remove, got none; see `gyre ls {run.path}`")
    return tuple(sorted({*named, *before}))


def _plan(run: Run, gone: tuple[str, ...], purge: bool) -> Removal:
    raw = {name: run.stored(name) for name in ("nodes", "calls", "scores")}
    mine = {name: _rows_of(table, gone) for name, table in raw.items()}
    nodes = mine["nodes"]
    lengths = pc.coalesce(nodes.column("counted_tokens"), pc.list_value_length(nodes.column("token_ids")))
    quarantine = run.path / QUARANTINE
    return Removal(
        path=str(run.path),
        purge=purge,
        manifest=None,
        executions=gone,
        num_calls=mine["calls"].num_rows,
        num_nodes=nodes.num_rows,
        num_tokens=pc.sum(lengths).as_py() or 0,
        num_scores=mine["scores"].num_rows,
        tags=tuple(tag.name for tag in tags(run.path) if _holds(run.path, tag.manifest, gone, shown=not purge)),
        num_blobs=len(_unnamed_blobs(run, gone)) if purge else 0,
        quarantine_files=sum(p.is_file() for p in quarantine.rglob("*")) if purge and quarantine.exists() else 0,
        workspaces=tuple(p.name for p in _workspaces(run.path, gone)) if purge else (),
        clients_folder=(run.path / "clients").exists(),
    )


def _rows_of(table: pa.Table, gone: Sequence[str]) -> pa.Table:
    return table.filter(pc.is_in(table.column("execution_id"), value_set=pa.array(gone, pa.string())))


def _holds(path: Path, manifest: int, gone: Sequence[str], *, shown: bool) -> bool:
    """Whether a manifest's files hold a row of these executions; with `shown`, one that readers show."""
    run = Run(path, manifest)
    read = run.table if shown else run.stored
    return any(_rows_of(read(name), gone).num_rows for name in ("executions", "calls", "nodes", "scores"))


def _unnamed_blobs(run: Run, gone: Sequence[str]) -> set[str]:
    """Ids of the blobs that no row names which stays."""
    every = set(run.table("blobs").column("blob_id").to_pylist())
    for table, column in _BLOB_COLUMNS:
        rows = visible(table, run.stored(table), gone, lambda: pa.array([], pa.string()))
        values = rows.column(column)
        flat = values if pa.types.is_string(values.type) else pc.list_flatten(values)
        every -= set(pc.unique(flat).to_pylist())
    return every


def _workspaces(path: Path, gone: Sequence[str]) -> list[Path]:
    root = path / "workspaces"  # what lies in it is compared with ids, so that no id can point elsewhere
    if root.is_symlink() or not root.is_dir():
        return []
    here = {folder.name: folder for folder in root.iterdir() if folder.is_dir()}
    return [here[name] for name in gone if name in here and not here[name].is_symlink()]


# --- purging -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gone:
    """What a purge leaves out."""

    run: Run
    executions: tuple[str, ...]
    nodes: pa.Array
    blobs: pa.Array

    def kept(self, name: str, one: Sealed) -> pa.Table:
        """The rows of a segment that stay."""
        table = conformed(name, *open_sealed(self.run.path / name / one.name, one))
        if name == "blobs":
            return table.filter(pc.invert(pc.is_in(table.column("blob_id"), value_set=self.blobs)))
        return visible(name, table, self.executions, lambda: self.nodes)


def _purge(run: Run, current: Manifest, plan: Removal) -> Removal:
    path = run.path
    gone = _Gone(
        run=run,
        executions=plan.executions,
        nodes=nodes_of(run.stored("nodes"), plan.executions),
        blobs=pa.array(sorted(_unnamed_blobs(run, plan.executions)), pa.string()),
    )
    touched = {
        name: [one for one in current.sealed[name] if gone.kept(name, one).num_rows != one.num_rows]
        for name in RUN_TABLES
        if name in current.sealed
    }
    stems = {(name, one.name.removesuffix(".arrow")) for name, many in touched.items() for one in many}
    _refuse_pinned(path, stems, plan.executions)
    numbers = itertools.count(last_sequence(path, _WRITER) + 1)
    names = (f"{_WRITER}-{number:06d}" for number in numbers)
    made: dict[str, tuple[Sealed, ...]] = {}
    for name in (name for name, many in touched.items() if many):
        segments: list[Sealed] = []
        for one in current.sealed[name]:
            codec = codec_of(path / name / one.name)
            rewritten = one in touched[name]
            segments += (
                write_segments(path, name, rebatched(gone.kept(name, one)), names, codec) if rewritten else [one]
            )
        made[name] = tuple(segments)
    # First what no manifest names: if this is cut off, the next purge finds all that is left.
    if (path / QUARANTINE).exists():
        shutil.rmtree(path / QUARANTINE)
    for folder in _workspaces(path, plan.executions):
        shutil.rmtree(folder)
    published = publish_tables(path, made, _WRITER, removed=()) if made or current.removed else current
    return replace(plan, manifest=published.number, freed_bytes=drop_unnamed(path))


def _refuse_pinned(path: Path, files: set[tuple[str, str]], gone: Sequence[str]) -> None:
    """A purge while a tag or a lease still needs the bytes would leave them: say who."""
    holders = [(f"tag {tag.name}", tag.manifest) for tag in tags(path)]
    holders += [(f"a lease in {LEASES}/", number) for number in leased(path)]
    held = []
    for who, number in holders:
        named = set(manifests.read(manifests.manifest_path(path, number)).stems())
        if files & named or _holds(path, number, gone, shown=False):
            held.append(who)
    if held:
        raise ConfigError(
            f"{path}: wanted to purge, but the bytes are still needed by {', '.join(held)}; "
            f"`gyre tag {path} NAME --delete` gives up a tag, a lease ends with its process"
        )
