"""What every exporter needs: the executions that were asked for, their admission, clean texts, and what to tell."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gyre_data.admission import Admission, AdmittedExecution, admit
from gyre_data.beside import beside
from gyre_data.errors import ConfigError, DataError
from gyre_data.execution import Execution, ExecutionInfo, executions
from gyre_data.hosted import usage_of
from gyre_data.json_values import parsed
from gyre_data.path import PathMessage
from gyre_data.query import sql
from gyre_data.reader import Run
from gyre_data.reasons import REASONS
from gyre_data.redact import Redactor
from gyre_data.schema import AgentRole
from gyre_data.segment import fsync_folder
from gyre_data.tree import Forest, Tree
from gyre_data.types import Call

__all__ = ["Job", "TextMissing", "Usage", "finite", "json_line", "new_folder", "select"]


def select(
    run: Run, where: str | None, *, j_max: int | None, evaluators: Mapping[str, float] | None
) -> frozenset[str] | None:
    """Ids of the executions for which `where` holds; None where all are wanted.

    `where` is a condition of SQL over the view `executions`, to which `admitted`, `reason`, `reward` and `advantage` of
    the view `admission` are joined when it names one of them.
    """
    if where is None:
        return None
    words = set(re.findall(r"\w+", where.lower()))
    wanted = [name for name in ("admitted", "reason", "reward", "advantage") if name in words]
    table = "executions"
    if wanted:
        columns = ", ".join(f"a.{name}" for name in wanted)
        table = f"(select e.*, {columns} from executions e left join admission a using (execution_id))"
    found = sql(run, f"select execution_id from {table} where ({where})", j_max=j_max, evaluators=evaluators)
    return frozenset(found.arrow().column(0).to_pylist())


_LEVELS = {"execution": "executions", "call": "calls", "trajectory": "trajectories"}


class TextMissing(DataError):
    """A conversation has a hole. What was to be written of it is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of a call: by the provider's own count where there is one."""

    prompt: int
    """Those read from a cache, too."""
    cached: int
    output: int

    @classmethod
    def of(cls, call: Call) -> Usage | None:
        """None when nobody counted."""
        block = parsed(call.provider_usage)
        if isinstance(block, dict):
            used = usage_of(call.wire, block)
            return cls(
                prompt=used.input + used.cache_write + used.cache_read, cached=used.cache_read, output=used.output
            )
        if call.prompt_tokens is None or call.output_tokens is None:
            return None
        return cls(prompt=call.prompt_tokens, cached=call.cached_tokens or 0, output=call.output_tokens)


def finite(value: float | None) -> float | None:
    """A number that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None


class Job:
    """One export under way. Exporters add what they wrote and left out to its counters."""

    def __init__(
        self,
        run: Run,
        *,
        only: frozenset[str] | None,
        j_max: int | None,
        roles: Sequence[AgentRole | str],
        evaluators: Mapping[str, float] | None,
        redactor: Redactor | None,
    ) -> None:
        self.run, self.only = run, only
        self._admission: dict[str, Any] = {"j_max": j_max, "role_order": roles, "evaluators": evaluators}
        self._redactor = redactor
        self._has_secret: dict[str, bool] = {}
        self._in_ids: Counter[str] = Counter()
        self.num_rows: Counter[str] = Counter()
        self.left_out: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._in_texts: Counter[str] = Counter()
        self.nodes_redacted: set[str] = set()
        """Nodes whose token ids are left out since they would tell a secret."""

    # ------------------------------------------------------------------ what is exported

    @cached_property
    def infos(self) -> dict[str, ExecutionInfo]:
        """The executions that were asked for; the others are counted."""
        known = executions(self.run)
        if self.only is None:
            return known
        if others := len(known) - len(self.only):
            self.left_out["executions"]["where"] += others
        return {name: info for name, info in known.items() if name in self.only}

    @cached_property
    def forest(self) -> Forest:
        """The trees of the run."""
        return Forest(self.run)

    def execution(self, execution_id: str) -> Execution:
        """The handle of one execution."""
        return Execution(self.run, self.infos[execution_id], self.forest)

    def admission(self, **settings: Any) -> Admission:
        """That of the whole run: statistics of groups are over all of their members, wanted here or not."""
        return admit(self.run, **self._admission, **settings)

    def admitted(self, **settings: Any) -> Iterator[tuple[AdmittedExecution, Execution]]:
        """What admission takes, oldest first; what it leaves out is counted by level and reason."""
        names, found = self.infos, self.admission(**settings)
        for x in found.excluded:
            if x.execution_id in names:
                self.left_out[_LEVELS[REASONS[x.reason].level]][str(x.reason)] += 1
        kept = {e.execution_id: e for e in found.executions}
        for name in names:
            if (one := kept.get(name)) is not None:
                yield one, self.execution(name)

    # ------------------------------------------------------------------ without secrets

    def clean(self, value: Any) -> Any:
        """A JSON value without secrets, which are counted."""
        if self._redactor is None:
            return value
        value, kinds = self._redactor.json(value)
        self._in_texts.update(kinds)
        return value

    @property
    def secrets(self) -> dict[str, int]:
        """Kind -> places where one was taken out, of texts or of token ids."""
        return dict(self._in_texts | self._in_ids)

    def holds_secret(self, tree: Tree, node: int) -> bool:
        """Whether the tokens of a node would tell a secret: of its messages, or of the tools rendered in a root."""
        if self._redactor is None:
            return False
        names = list(tree.message_blobs(node))
        if tree.parent_N[node] < 0:
            names += self._tools_below(tree).get(node, ())
        found = any([self._secret_in(name) for name in names])  # noqa: C419 - all of them, so that all are counted
        if found:
            self.nodes_redacted.add(tree.node_id[node])
        return found

    def _secret_in(self, blob_id: str) -> bool:
        if blob_id not in self._has_secret:
            assert self._redactor is not None
            try:
                kinds = self._redactor.blob(self.run.blob(blob_id))[1]
            except KeyError:  # a text that is not there cannot be found clean
                self._has_secret[blob_id] = True
            else:
                self._in_ids.update(kinds)
                self._has_secret[blob_id] = bool(kinds)
        return self._has_secret[blob_id]

    def _tools_below(self, tree: Tree) -> dict[int, set[str]]:
        """Root -> the tool lists that calls under it were given. The last tree's are kept."""
        if getattr(self, "_tools_of", None) is not tree:
            self._tools_of, self._tools = tree, defaultdict[int, set[str]](set)
            for call, node in zip(tree.calls, tree.prompt_C.tolist(), strict=True):
                if call.tools_blob and node >= 0:
                    self._tools[int(tree.path(node)[0])].add(call.tools_blob)
        return self._tools

    # ------------------------------------------------------------------ texts

    def messages(self, conversation: Sequence[PathMessage], tree: Tree) -> list[tuple[PathMessage, dict[str, Any]]]:
        """The messages that have a text, without secrets; TextMissing when a named one is not there or is none."""
        found = []
        for one in conversation:
            if not isinstance(one.value, Mapping):
                if tree.message_blobs(one.node):
                    raise TextMissing(f"wanted the message of node {tree.node_id[one.node]}, the run holds none")
                continue
            found.append((one, self.clean(one.value)))
        return found


def json_line(value: Any) -> bytes:
    """One line of JSON; a lone surrogate, which is no text, becomes a question mark."""
    return (
        json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace") + b"\n"
    )


def _private(path: str, flags: int) -> int:
    """Only the owner reads it, as with the run it comes from; to share it is the owner's word."""
    return os.open(path, flags, 0o600)


def new_folder(path: Path, files: Iterable[tuple[str, bytes]], *, force: bool) -> None:
    """A folder with these files that is there whole or not at all; `force` replaces files of a folder that is there.

    ConfigError when there is something at `path` that is no empty folder, unless `force`.
    """
    there = path.is_dir() and any(path.iterdir())
    if (there and not force) or (path.exists() and not path.is_dir()):
        raise ConfigError(f"wanted a new folder to export to, {path} is there; name another, or use --force")
    with beside(path, folder=True) as made:
        for name, data in files:
            with open(made / name, "xb", opener=_private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        fsync_folder(made)
        if not there:
            made.rename(path)
        else:
            for one in made.iterdir():
                one.replace(path / one.name)
            fsync_folder(path)
