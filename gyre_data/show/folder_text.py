"""What changes of a run folder say, as plans and when done."""

from __future__ import annotations

from gyre_data.compact import Compacted

from .numbers import file_size

__all__ = ["compact_lines"]


def compact_lines(done: Compacted) -> list[str]:
    """A compaction, or its plan, for people."""
    planned = done.manifest is None
    command = f"gyre compact {done.path}{' --cold' if done.cold else ''} --yes"
    if not done.tables and not done.stale_bytes:
        return [f"{done.path}: every table is compact{' and compressed' if done.cold else ''} already; nothing to do"]
    lines = [f"{done.path}: {'would rewrite' if planned else 'rewrote'} {len(done.tables)} tables"]
    for one in done.tables:
        line = f"  {one.table:16} {one.num_rows:>12,} rows {one.num_files:>6} files {file_size(one.num_bytes):>9}"
        if one.new_bytes is not None:
            line += f"  now {one.new_files} files {file_size(one.new_bytes)}"
        lines.append(line)
    if done.removed:
        lines.append(f"  rows of {len(done.removed)} removed executions are left behind")
    if planned:
        if done.stale_bytes:
            lines.append(f"  {file_size(done.stale_bytes)} lie in files that nothing names any more")
        return [*lines, "old files go, but for those that a tag names", f"do it: {command}"]
    return [*lines, f"manifest {done.manifest}; {file_size(done.stale_bytes)} freed", f"check: gyre verify {done.path}"]
