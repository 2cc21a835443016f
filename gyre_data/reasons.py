"""Why something is not trained: every code with the rule behind it and what to do about it.

docs/admission.md lists them, and a test holds it against this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

__all__ = ["REASONS", "Meaning", "Reason"]


class Reason(StrEnum):
    """Why something is not trained. A report groups by these; `detail` of what is left out says more."""

    # an execution
    RUNNING = "running"
    INFRA_FAULT = "infra_fault"
    NO_CALLS = "no_calls"
    INCONSISTENT = "inconsistent"
    NO_ELIGIBLE_OUTPUT = "no_eligible_output"
    NOTHING_TRAINABLE = "nothing_trainable"
    NO_SCORE = "no_score"
    EVALUATOR_FAILED = "evaluator_failed"
    NOT_A_NUMBER = "not_a_number"
    NO_GROUP = "no_group"
    GROUP_TOO_SMALL = "group_too_small"
    GROUP_RUNNING = "group_running"
    ZERO_VARIANCE = "zero_variance"
    # a call
    CALL_FAILED = "call_failed"
    CALL_ABORTED = "call_aborted"
    NO_OUTPUT = "no_output"
    UNDELIVERED = "undelivered"
    DELIVERY_UNKNOWN = "delivery_unknown"
    ROLE_SIDE = "role_side"
    ROLE_UNKNOWN = "role_unknown"
    HOSTED = "hosted"
    TEXT_ONLY = "text_only"
    REDACTED = "redacted"
    NO_LOGPROBS = "no_logprobs"
    LOGPROB_NOT_FINITE = "logprob_not_finite"
    TEMPERATURE_UNKNOWN = "temperature_unknown"
    GREEDY = "greedy"
    TOP_P = "top_p"
    TOP_K = "top_k"
    CONSTRAINED = "constrained"
    # a trajectory
    ROLE_NOT_WANTED = "role_not_wanted"
    NOTHING_NEW = "nothing_new"
    BEYOND_J_MAX = "beyond_j_max"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """What a reason is about, the rule behind it in a sentence, and what one may do."""

    level: Literal["execution", "call", "trajectory"]
    rule: str
    mend: str


def _execution(rule: str, mend: str) -> Meaning:
    return Meaning(level="execution", rule=rule, mend=mend)


def _call(rule: str, mend: str) -> Meaning:
    return Meaning(level="call", rule=rule, mend=mend)


def _trajectory(rule: str, mend: str) -> Meaning:
    return Meaning(level="trajectory", rule=rule, mend=mend)


REASONS: dict[Reason, Meaning] = {
    Reason.RUNNING: _execution(
        "an execution that has not ended is not trained", "wait for its end, or `include_running=True`"
    ),
    Reason.INFRA_FAULT: _execution(
        "a fault of the infrastructure says nothing about the policy", "`gyre run` starts it anew"
    ),
    Reason.NO_CALLS: _execution("no model call was recorded", "see whether the harness used the base URL it was given"),
    Reason.INCONSISTENT: _execution(
        "rows that contradict each other are not trained, and do not stop the rest", "`gyre verify` says which rows"
    ),
    Reason.NO_ELIGIBLE_OUTPUT: _execution(
        "an output counts when the harness had it and its role is trained", "see the reasons of its calls"
    ),
    Reason.NOTHING_TRAINABLE: _execution("none of its outputs may enter the loss", "see the reasons of its calls"),
    Reason.NO_SCORE: _execution("RL needs a verdict: append one with `gyre score`", "score it; SFT needs no score"),
    Reason.EVALUATOR_FAILED: _execution(
        "a failed evaluator is never a zero: score it again", "mend the evaluator, then `gyre score`"
    ),
    Reason.NOT_A_NUMBER: _execution("a score that is no finite number is no score", "score it again"),
    Reason.NO_GROUP: _execution("an advantage compares the executions of one group", "record with a group; or SFT"),
    Reason.GROUP_TOO_SMALL: _execution("a group needs two valid scores to compare", "score more of the group"),
    Reason.GROUP_RUNNING: _execution(
        "a group's mean would still change: a member has not ended", "wait, or `include_running=True`"
    ),
    Reason.ZERO_VARIANCE: _execution("equal scores teach nothing", "`drop_zero_variance=False` keeps them, with A = 0"),
    Reason.CALL_FAILED: _call("a failed call gave the harness nothing", "nothing: its retry counts"),
    Reason.CALL_ABORTED: _call("an aborted reply is not what the policy would have said", "nothing: its retry counts"),
    Reason.NO_OUTPUT: _call("nothing was sampled", "nothing"),
    Reason.UNDELIVERED: _call("the harness never had the reply, and nothing goes on from it", "nothing"),
    Reason.DELIVERY_UNKNOWN: _call(
        "nobody knows whether the harness had the reply", "nothing; the proxy was killed before it could say"
    ),
    Reason.ROLE_SIDE: _call("side calls (titles, classifiers) are never trained", "nothing"),
    Reason.ROLE_UNKNOWN: _call(
        "whose call it is is not known, so it is never trained", "let the harness say so: header X-Gyre-Role"
    ),
    Reason.HOSTED: _call("a hosted API gives no token ids: only SFT on the text", "`gyre export` as chat"),
    Reason.TEXT_ONLY: _call("imported text has no sampled token ids: only SFT on it", "`gyre export` as chat"),
    Reason.REDACTED: _call("its context lost token ids with a secret", "train from the run it was exported from"),
    Reason.NO_LOGPROBS: _call(
        "RL needs the log-probs of the policy that sampled; SFT does not", "record through an engine that gives them"
    ),
    Reason.LOGPROB_NOT_FINITE: _call(
        "a log-prob that is no finite number cannot enter the loss", "report it to the engine's makers"
    ),
    Reason.TEMPERATURE_UNKNOWN: _call("log-probs are taken at the temperature used", "record with this release"),
    Reason.GREEDY: _call("sampled at temperature 0: not a sample of the policy", "`allow` takes it in"),
    Reason.TOP_P: _call("top_p below 1 cuts the policy that was recorded", "`allow` takes it in"),
    Reason.TOP_K: _call("top_k cuts the policy that was recorded", "`allow` takes it in"),
    Reason.CONSTRAINED: _call("a grammar or schema limited what could be sampled", "`allow` takes it in"),
    Reason.ROLE_NOT_WANTED: _trajectory("its role is not in role_order", "name the role in `role_order`"),
    Reason.NOTHING_NEW: _trajectory("all that it could train has an owner already", "nothing: no token is lost"),
    Reason.BEYOND_J_MAX: _trajectory("J_max trajectories were kept before it", "raise `j_max`"),
}
