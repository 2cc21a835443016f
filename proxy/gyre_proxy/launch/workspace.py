"""Workspaces: one folder an execution, kept after it ends, and the digest that names its state."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GitSource", "State", "Workspace", "capture"]

_GIT_TIMEOUT_S = 120
_FETCH_TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True, slots=True)
class GitSource:
    """A commit of a repository; `ref` is a commit, tag or branch, `repository` a URL or a path."""

    repository: str
    ref: str = "HEAD"


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
    def workers(self) -> Path:
        """Working folder of the run's long-lived workers, with their logs."""
        return self.root.parent.parent / "workers"

    @property
    def cache(self) -> Path:
        """Where the run keeps copies of repositories."""
        return self.root.parent.parent / "cache"

    @property
    def pid_file(self) -> Path:
        """Process group of the running harness, for a launcher that comes back after a crash."""
        return self.root / "pid"

    @property
    def up_file(self) -> Path:
        """There while a container is up: the words that remove it, one a line, for whoever comes after a crash."""
        return self.root / "container"

    @classmethod
    def create(cls, root: Path, source: Path | GitSource | None) -> Workspace:
        """Make the folders of a new execution; a folder is copied, links kept as links, a commit is checked out.

        A repository is fetched once for a run. Raises OSError with git's words when there is no such one or no such
        commit.
        """
        space = cls(root=root)
        root.mkdir(parents=True)
        space.home.mkdir()
        if source is None:
            space.work.mkdir()
        elif isinstance(source, GitSource):
            _check_out(source, space.work, space.cache)
        else:
            shutil.copytree(source, space.work, symlinks=True)
        return space


def _check_out(source: GitSource, folder: Path, cache: Path) -> None:
    """Put one commit into `folder` as a repository of its own: its objects are linked, later commits are not there."""
    kept = cache / f"git-{hashlib.sha256(source.repository.encode()).hexdigest()[:16]}"
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        bare = kept / "bare"
        if not (bare / "HEAD").exists():
            shutil.rmtree(kept / "partial", ignore_errors=True)  # of a launcher that was killed
            _git(["clone", "--quiet", "--bare", "--", source.repository, str(kept / "partial")], cache)
            (kept / "partial").rename(bare)
        try:
            commit = _git(["rev-parse", "--verify", "--quiet", f"{source.ref}^{{commit}}"], bare)
        except OSError:  # newer than the copy, or a commit that no branch holds
            _git(["fetch", "--quiet", "origin", source.ref], bare)
            commit = _git(["rev-parse", "FETCH_HEAD^{commit}"], bare)
        _git(["init", "--quiet", str(folder)], cache)
        # Only this commit and what is before it: the answer to an issue may lie in a later one.
        _git(["fetch", "--quiet", str(bare), f"{commit}:refs/heads/gyre"], folder)
    _git(["checkout", "--quiet", "gyre"], folder)


def _git(words: list[str], folder: Path) -> str:
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"git {words[0]} took over {_FETCH_TIMEOUT_S} s") from None
    if done.returncode:
        raise OSError(f"git {words[0]}: {done.stderr.strip()[-300:] or f'exit status {done.returncode}'}")
    return done.stdout.strip()


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
