"""Workspaces: one folder an execution, kept after it ends, and the digest that names its state."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["State", "Workspace", "capture"]

_GIT_TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What a workspace held at one moment: `kind` is digest or git_tree."""

    kind: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Folders of one execution: `work` is the harness's working folder, `home` its own HOME, `logs` what it printed."""

    root: Path

    @property
    def work(self) -> Path:
        """Working folder of the harness; judged by the evaluator."""
        return self.root / "work"

    @property
    def home(self) -> Path:
        """HOME of the harness, so that its settings and history are its own."""
        return self.root / "home"

    @property
    def pid_file(self) -> Path:
        """Process group of the running harness, for a launcher that comes back after a crash."""
        return self.root / "pid"

    @classmethod
    def create(cls, root: Path, source: Path | None) -> Workspace:
        """Make the folders of a new execution; `source` is copied, links kept as links."""
        space = cls(root=root)
        root.mkdir(parents=True)
        space.home.mkdir()
        if source is None:
            space.work.mkdir()
        else:
            shutil.copytree(source, space.work, symlinks=True)
        return space


def capture(folder: Path) -> State:
    """Name the state of `folder`: its git tree when it is a sound git work tree, else a digest of all its files.

    The git index of the user is not touched. Files that git ignores are not part of a git tree.
    """
    if (folder / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):  # a harness may leave a broken repository
            return State(kind="git_tree", digest=_git_tree(folder))
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder)).encode("utf-8", "surrogateescape")
        if path.is_symlink():
            whole.update(b"link\0" + name + b"\0" + os.readlink(path).encode("utf-8", "surrogateescape") + b"\0")
        elif path.is_file():
            try:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").digest()
            except OSError:  # gone since it was listed: the harness may be at work
                content = b"unreadable"
            executable = b"x" if os.access(path, os.X_OK) else b"-"
            whole.update(b"file\0" + name + b"\0" + executable + content)
    return State(kind="digest", digest=whole.hexdigest())


def _git_tree(folder: Path) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        env = {**os.environ, "GIT_INDEX_FILE": str(Path(scratch) / "index")}
        env["GIT_CEILING_DIRECTORIES"] = str(folder.resolve().parent)  # never a repository around the run

        def git(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                ["git", *words], cwd=folder, env=env, check=True, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S
            )

        git("add", "-A")
        made = git("write-tree")
    return made.stdout.strip()
