"""What changes of a run folder say, as plans and when done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gyre_data.compact import Compacted
from gyre_data.merge import Merged
from gyre_data.pins import Tag
from gyre_data.removal import Removal
from gyre_data.salvage import Salvage

from .numbers import count, file_size, plural

__all__ = ["compact_lines", "merge_lines", "removal_lines", "salvage_lines", "tag_lines", "tags_text"]


def compact_lines(done: Compacted) -> list[str]:
    """A compaction, or its plan, for people."""
    planned = done.manifest is None
    command = f"gyre compact {done.path}{' --cold' if done.cold else ''} --yes"
    if not done.tables and not done.stale_bytes:
        return [f"{done.path}: every table is compact{' and compressed' if done.cold else ''} already; nothing to do"]
    lines = [f"{done.path}: {'would rewrite' if planned else 'rewrote'} {plural(len(done.tables), 'table')}"]
    for one in done.tables:
        line = f"  {one.table:16} {one.num_rows:>12,} rows {one.num_files:>6} files {file_size(one.num_bytes):>9}"
        if one.new_bytes is not None:
            line += f"  now {one.new_files} files {file_size(one.new_bytes)}"
        lines.append(line)
    if done.removed:
        lines.append(
            f"  left behind: {plural(len(done.removed), 'removed execution')}; their texts go with gyre rm --purge"
        )
    if planned:
        if done.stale_bytes:
            lines.append(f"  {file_size(done.stale_bytes)} lie in files that nothing names any more")
        return [*lines, "old files go, but for those that a tag names", f"do it: {command}"]
    return [*lines, f"manifest {done.manifest}; {file_size(done.stale_bytes)} freed", f"check: gyre verify {done.path}"]


def removal_lines(done: Removal) -> list[str]:
    """A removal or a purge, or its plan, for people."""
    planned = done.manifest is None
    verb = "purge" if done.purge else "remove"
    head = f"{done.path}: {f'would {verb}' if planned else f'{verb}d'} {plural(len(done.executions), 'execution')}"
    lines = [head, *(f"  {name}" for name in done.executions)]
    held = ((done.num_calls, "call"), (done.num_nodes, "node"), (done.num_tokens, "token"), (done.num_scores, "score"))
    lines.append(f"  {', '.join(plural(value, noun) for value, noun in held)}")
    if done.purge:
        lines.append(
            f"  {plural(done.num_blobs, 'text')} that nothing else names, {plural(done.quarantine_files, 'file')} of "
            f"quarantine/, {plural(len(done.workspaces), 'workspace')}"
        )
    if done.tags:
        what = "tags that hold them, to be given up first" if done.purge else "tags that still show them"
        lines.append(f"  {what}: {', '.join(done.tags)}")
    if done.purge and done.clients_folder:
        lines.append("  clients/ is left alone: what clients keep there themselves may hold the conversations")
    if planned:
        names = "".join(f" {name}" for name in done.executions)
        end = "there is no way back" if done.purge else "the bytes stay until --purge"
        return [*lines, f"{end}; do it: gyre rm {done.path}{names}{' --purge' if done.purge else ''} --yes"]
    if done.purge:
        return [
            *lines,
            f"manifest {done.manifest}; {file_size(done.freed_bytes)} freed",
            f"check: gyre verify {done.path}",
        ]
    return [*lines, f"manifest {done.manifest}; clear the bytes too: gyre rm {done.path} --purge"]


def tag_lines(path: Path, tag: Tag, *, deleted: bool) -> list[str]:
    """A tag that was made or given up."""
    if deleted:
        return [f"{path}: {tag.name} is given up; what only it named goes with the next gyre compact {path} --yes"]
    return [f"{path}: {tag.name} names manifest {tag.manifest}", f"look at it: gyre stats {path}@{tag.name}"]


def tags_text(path: Path, known: Sequence[Tag]) -> str:
    """All tags of a run, a line each."""
    lines = [f"{one.name:20} manifest {one.manifest:<6} {one.created_at}  {one.note or ''}".rstrip() for one in known]
    return "\n".join(lines) if lines else f"{path} has no tag; make one: gyre tag {path} NAME"


def merge_lines(done: Merged) -> list[str]:
    """What a merge wrote."""
    rows = done.num_rows
    calls, nodes = plural(rows.get("calls", 0), "call"), plural(rows.get("nodes", 0), "node")
    lines = [f"{done.path}: {len(done.sources)} runs, {calls}, {nodes}"]
    for one in done.sources:
        lines.append(f"  {one.path}  manifest {one.manifest}, {plural(len(one.executions), 'execution')}")
    if done.num_same:
        lines.append(f"  {count(done.num_same)} rows were the same in several of them and are there once")
    return [*lines, f"look at it: gyre stats {done.path}"]


def salvage_lines(done: Salvage) -> list[str]:
    """What is saved of a damaged run, or would be."""
    if not done.broken:
        return [f"{done.path}: no damaged segment; nothing to save"]
    planned = done.manifest is None
    lines = [f"{done.path}: {plural(len(done.broken), 'damaged segment')}"]
    for one in done.broken:
        rows = (
            f"{count(one.num_good)} of {count(one.num_rows)} rows are good"
            if one.num_rows is not None
            else (f"{count(one.num_good)} rows are good")
        )
        what = "left alone; restore it from a copy" if one.left_alone else rows
        lines.append(f"  {one.table}/{one.name}: {one.detail}; {what}")
    if done.calls_left_out or done.nodes_left_out:
        calls, nodes = plural(len(done.calls_left_out), "good call"), plural(done.nodes_left_out, "good node")
        lines.append(f"  left out too, since they rest on lost nodes: {calls}, {nodes}")
    if done.executions:
        lines.append(f"  executions that lose calls by that: {', '.join(done.executions)}")
    if all(one.left_alone for one in done.broken):
        return [*lines, "nothing of it can be salvaged"]
    if planned:
        return [*lines, f"damaged files go to quarantine/; do it: gyre verify {done.path} --salvage --yes"]
    return [*lines, f"manifest {done.manifest}; damaged files are in quarantine/", f"check: gyre verify {done.path}"]
