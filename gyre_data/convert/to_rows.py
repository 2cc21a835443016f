"""Rows for other trainers, one JSON object a line: samples of slime and miles, training samples of prime-rl.

They hold what RL would train: admitted trajectories, and 1 in the mask on the tokens that this row owns. A reward is
the execution's; the advantage is the one of our admission, whose groups count executions, never rows.
"""

from __future__ import annotations

from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .export_job import Job, json_line
from .to_chat import chat_message
from .token_rows import TokenRow, rl_rows

__all__ = ["write_prime_rl", "write_slime"]


def write_slime(job: Job, file: IO[bytes]) -> None:
    """Samples as `Sample.from_dict` of slime and miles takes them."""
    groups: dict[str | None, int] = {}
    rollouts: dict[str, int] = {}
    for index, row in enumerate(rl_rows(job)):
        admitted = row.admitted
        group = groups.setdefault(admitted.group_id, len(groups))
        rollout = rollouts.setdefault(admitted.execution_id, len(rollouts))
        file.write(json_line(_sample(job, row, index, group, rollout)))
        _count(job, row)


def _sample(job: Job, row: TokenRow, index: int, group: int, rollout: int) -> dict[str, Any]:
    begin = int(row.owned_T.argmax())  # what is before the first trained token is the prompt
    calls, versions = row.calls, row.versions
    admitted, info = row.admitted, row.path.execution.info
    cut = bool(calls) and calls[-1].call.finish_reason == "length"
    return {
        "group_index": group,
        "index": index,
        "rollout_id": rollout,
        "prompt": _prompt(job, row, begin),
        "tokens": row.ids_T.tolist(),
        "response": "",
        "response_length": len(row.ids_T) - begin,
        "label": None,
        "reward": admitted.reward,
        "loss_mask": row.owned_T[begin:].astype(np.int8).tolist(),
        "weight_versions": [str(n) for n in dict.fromkeys(span.n for span in versions)],
        "rollout_log_probs": _filled(row.logprobs_T[begin:], 0.0),
        "remove_sample": False,
        "status": "truncated" if cut else "completed",
        "metadata": job.clean(
            {
                "execution_id": admitted.execution_id,
                "group_id": admitted.group_id,
                "task_id": admitted.task_id,
                "trajectory": row.trajectory.index,
                "agent_role": str(row.trajectory.role),
                "advantage": admitted.advantage,
                "policies": [f"{span.policy_id}:{span.n}" for span in versions],
                "end_reason": info.end_reason and str(info.end_reason),
            }
        ),
    }


def _prompt(job: Job, row: TokenRow, begin: int) -> list[dict[str, Any]]:
    """The messages that end where the response begins."""
    before = [one for one in row.path.conversation if one.end <= begin and one.value is not None]
    return [chat_message(job.clean(one.value), job.left_out["blocks"]) for one in before]


def write_prime_rl(job: Job, file: IO[bytes]) -> None:
    """Keyword arguments of prime-rl's `TrainingSample`; all of its arrays are one element per token."""
    for row in rl_rows(job):
        admitted = row.admitted
        advantages_T = np.where(row.owned_T, np.float64(admitted.advantage or 0.0), 0.0)
        sample = {
            "token_ids": row.ids_T.tolist(),
            "mask": row.owned_T.tolist(),
            "logprobs": _filled(row.logprobs_T, 0.0),
            "temperatures": _filled(row.temperatures_T, 1.0),
            "env_name": job.clean(admitted.task_id or admitted.group_id or ""),
            "advantages": advantages_T.tolist(),
        }
        file.write(json_line(sample))
        _count(job, row)


def _filled(values: npt.NDArray[np.float32], instead: float) -> list[float]:
    """Finite numbers: where a token has none it is context, and the number is not looked at."""
    filled: list[float] = np.where(np.isfinite(values), values, np.float32(instead)).tolist()
    return filled


def _count(job: Job, row: TokenRow) -> None:
    job.num_rows["rows"] += 1
    job.num_rows["tokens"] += len(row.ids_T)
    job.num_rows["trained tokens"] += int(row.owned_T.sum())
