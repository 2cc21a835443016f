"""A kept trajectory as flat arrays of tokens, for trainers that take rows.

Every array is one element per token of the path (suffix T). A token that another trajectory owns is context here, so
that nothing is trained twice. The row ends before the first node whose ids are not known, or would tell a secret.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_data.admission import AdmittedExecution, AdmittedTrajectory
from gyre_data.execution import Execution
from gyre_data.path import Path, PathCall
from gyre_data.types import Floats, Ints, VersionSpan

from .export_job import Job

__all__ = ["TokenRow", "rl_rows", "token_row"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRow:
    """Tokens of a trajectory, with what its loss needs."""

    admitted: AdmittedExecution
    trajectory: AdmittedTrajectory
    path: Path
    nodes: Ints
    """Indices into the tree, root first, as far as the row goes."""
    starts_N1: npt.NDArray[np.int64]
    ids_T: Ints
    owned_T: npt.NDArray[np.bool_]
    """Trained here."""
    logprobs_T: Floats
    """NaN where none was recorded."""
    temperatures_T: Floats
    """NaN where the token was not sampled by a call of the path."""

    @property
    def calls(self) -> list[PathCall]:
        """Calls whose outputs are in the row."""
        return [one for one in self.path.calls if one.end <= len(self.ids_T)]

    @property
    def versions(self) -> list[VersionSpan]:
        """Policy versions, in positions of the row."""
        return [span for span in self.path.versions if span.end <= len(self.ids_T)]


def rl_rows(job: Job) -> Iterator[TokenRow]:
    """A row for every trajectory that RL would train, executions in order."""
    for admitted, execution in job.admitted():
        for trajectory in admitted.trajectories:
            row = token_row(job, admitted, trajectory, execution)
            if row.owned_T.any():
                yield row
            else:
                job.left_out["trajectories"]["redacted"] += 1


def token_row(job: Job, admitted: AdmittedExecution, trajectory: AdmittedTrajectory, execution: Execution) -> TokenRow:
    """The tokens of a trajectory as far as they may be told; owned tokens beyond are counted as left out."""
    path = Path(execution, trajectory.leaf)
    tree, every = path.tree, path.nodes
    end = len(every)
    for place, node in enumerate(every.tolist()):
        if tree.counted_N[node] or job.holds_secret(tree, node):
            end = place
            reason = "ids_unknown" if tree.counted_N[node] else "redacted"
            lost = int(tree.num_tokens_N[every[end:]][np.isin(every[end:], trajectory.owned)].sum())
            job.left_out["trained tokens"][reason] += lost
            break
    nodes = every[:end]
    num_N = tree.num_tokens_N[nodes]
    starts_N1 = np.concatenate([[0], np.cumsum(num_N)]).astype(np.int64)
    logprobs_T = np.full(int(starts_N1[-1]), np.nan, np.float32)
    temperatures_T = np.full(int(starts_N1[-1]), np.nan, np.float32)
    for place, node in enumerate(nodes.tolist()):
        part = slice(int(starts_N1[place]), int(starts_N1[place + 1]))
        if (values := tree.logprobs(node)) is not None:
            logprobs_T[part] = values
        if (calls := tree.outputs.get(node)) is not None and calls[0].temperature is not None:
            temperatures_T[part] = calls[0].temperature
    ids = [tree.ids(node) for node in nodes.tolist()]
    return TokenRow(
        admitted=admitted,
        trajectory=trajectory,
        path=path,
        nodes=nodes,
        starts_N1=starts_N1,
        ids_T=np.concatenate(ids) if ids else np.empty(0, np.int32),
        owned_T=np.repeat(np.isin(nodes, trajectory.owned), num_N),
        logprobs_T=logprobs_T,
        temperatures_T=temperatures_T,
    )
