"""Judge kept workspaces again with another evaluator: `gyre eval --rescore`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_data.errors import ConfigError
from gyre_data.execution import ExecutionInfo, executions
from gyre_data.remote import append_scores
from gyre_data.scores import make_score
from gyre_data.store import Run, open
from gyre_proxy.launch.evaluate import Verdict, evaluate
from gyre_proxy.launch.harness import environment
from gyre_proxy.launch.split import split_command
from gyre_proxy.launch.tasks import PLACEHOLDERS, fill, program_name
from gyre_proxy.launch.workspace import Workspace, capture

__all__ = ["Rescored", "rescore"]

_KNOWN = ("workspace", "sample_index")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """What came of it; `evaluator` is the name the verdicts were written under."""

    evaluator: str
    scored: int
    failed: Mapping[str, str]
    """By execution, why the evaluator gave no score; recorded as failed, never as zero."""
    skipped: Mapping[str, int]
    """Executions that were not judged, by reason: `running`, `no_workspace`."""


def rescore(
    run: str | Path, command: str, *, evaluator: str | None = None, timeout_s: float = 600.0, jobs: int = 1
) -> Rescored:
    """Run `command` on a copy of each kept workspace and append its verdicts to the run, each as it comes.

    The command is as in tasks.toml and may hold {workspace} and {sample_index}; kept workspaces stay as they are. Older
    verdicts stay too: the new ones stand under the evaluator's name, which is by default the program's.
    """
    words = split_command(command, "--rescore")
    names = (f"{{{name}}}" for name in PLACEHOLDERS if name not in _KNOWN)
    if strange := [name for name in names if any(name in word for word in words)]:
        raise ConfigError(
            f"--rescore: wanted at most {{workspace}} and {{sample_index}}, got {', '.join(strange)}; write it out"
        )
    opened = open(run)
    judged: list[ExecutionInfo] = []
    skipped: Counter[str] = Counter()
    root = opened.path / "workspaces"
    here = {folder.name for folder in root.iterdir()} if root.is_dir() else set()  # no id leads out of the run
    for info in executions(opened).values():
        if info.running:
            skipped["running"] += 1
        elif info.execution_id not in here or not _space(opened, info).work.is_dir():
            skipped["no_workspace"] += 1
        else:
            judged.append(info)
    _refuse_lost_files(words, [_space(opened, info).work for info in judged])
    name = evaluator or program_name(words)
    failed: dict[str, str] = {}
    asyncio.run(_judge_all(opened, judged, words, name, timeout_s, jobs, failed))
    return Rescored(evaluator=name, scored=len(judged) - len(failed), failed=failed, skipped=dict(skipped))


def _refuse_lost_files(words: tuple[str, ...], workspaces: list[Path]) -> None:
    """ConfigError for a file of the caller's folder: an evaluator works in a copy of the workspace and finds it not."""
    for word in words:
        path = Path(word)
        if not path.is_absolute() and path.is_file() and not any((work / path).exists() for work in workspaces):
            raise ConfigError(
                f"--rescore: wanted paths from the workspace or full ones, got {word}, which no workspace holds; "
                f"write {path.resolve()}"
            )


def _space(run: Run, info: ExecutionInfo) -> Workspace:
    return Workspace(root=run.path / "workspaces" / info.execution_id)


async def _judge_all(
    run: Run, judged: list[ExecutionInfo], words: tuple[str, ...], name: str, timeout_s: float, jobs: int,
    failed: dict[str, str],
) -> None:  # fmt: skip
    config = hashlib.sha256(json.dumps(list(words)).encode()).hexdigest()[:32]
    states = _states(run)
    free = asyncio.Semaphore(max(1, jobs))
    key = os.environ.get("GYRE_KEY")

    async def one(info: ExecutionInfo) -> None:
        async with free:
            work = _space(run, info).work
            state = await asyncio.to_thread(capture, work)
            verdict = await _judge(info, work, words, timeout_s)
        if verdict.status == "failed":
            failed[info.execution_id] = str(verdict.detail)
        detail = verdict.detail if isinstance(verdict.detail, str | None) else json.dumps(verdict.detail)
        row = make_score(
            info.execution_id, verdict.value, evaluator=name, status=verdict.status, partial=verdict.partial,
            config_digest=config, state_id=states.get((info.execution_id, state.digest)), detail=detail,
        )  # fmt: skip
        append_scores(run, [row], key=key)

    async with asyncio.TaskGroup() as group:
        for info in judged:
            group.create_task(one(info))


async def _judge(info: ExecutionInfo, work: Path, words: tuple[str, ...], timeout_s: float) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="gyre-rescore-") as folder:
        copy = Path(folder) / "work"
        await asyncio.to_thread(shutil.copytree, work, copy, symlinks=True)
        index = "" if info.sample_index is None else str(info.sample_index)
        told = {"GYRE_EXECUTION": info.execution_id, "GYRE_TASK": info.task_id or "", "GYRE_SAMPLE_INDEX": index}
        return await evaluate(
            fill(words, {"workspace": str(copy), "sample_index": index}), copy, str(info.end_reason or ""),
            Path(folder) / "score.json", timeout_s=timeout_s, env=environment("", "", None, told),
        )  # fmt: skip


def _states(run: Run) -> dict[tuple[str, str], Any]:
    """Recorded states by execution and digest, so that a verdict names what it judged."""
    table = run.table("environments").select(["execution_id", "digest", "state_id"])
    return {(execution, digest): state for execution, digest, state in zip(*table.to_pydict().values(), strict=True)}
