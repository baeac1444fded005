"""The proof that a replica answers with an adapter and not with the base model or another adapter's weights.

The round measured the log-probabilities of some tokens under the adapter and under its base; the replica must give
the adapter's figures. What follows from a failed proof is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from flywheel.errors import ServeError
from flywheel.round import Probe
from flywheel.serving.client import Replica
from flywheel.serving.condition import Condition

PRACTICALLY_EQUAL_NATS = 0.01
"""An adapter that differs less from its base than this cannot be told from it by another numeric precision."""


@dataclass(frozen=True, slots=True)
class ProbeFigures:
    """Mean absolute differences of log-probabilities, in nats: measured to adapter, measured to base, adapter to
    base. `distinct` is whether adapter and base are far enough apart to tell which of them answered."""

    tokens: int
    to_adapter: float
    to_base: float
    apart: float
    tolerance: float
    distinct: bool
    passed: bool


def compare(measured: list[float], probe: Probe, tolerance: float) -> ProbeFigures:
    """Judge measured log-probabilities: near enough to the adapter's and, where that can be told, nearer than to the
    base's. A value that is no number passes nothing."""
    to_adapter = _mean_difference(measured, probe.adapter_logprobs)
    to_base = _mean_difference(measured, probe.base_logprobs)
    apart = _mean_difference(probe.adapter_logprobs, probe.base_logprobs)
    distinct = apart > PRACTICALLY_EQUAL_NATS
    passed = to_adapter <= tolerance and (not distinct or to_adapter < to_base)
    return ProbeFigures(len(measured), to_adapter, to_base, apart, tolerance, distinct, passed)


async def prove(replica: Replica, model: str, probe: Probe, tolerance: float) -> ProbeFigures:
    """Measure `model` on the replica. Raises ServeError when it is not what the round trained."""
    attempted = f"prove {model} on {replica.url}"
    if not probe.token_ids:
        raise ServeError(attempted, "the round wrote down no tokens to compare", "Train the adapter again.")
    measured = await replica.logprobs(model, probe.prompt_token_ids, probe.token_ids)
    figures = compare(measured, probe, tolerance)
    if not figures.passed:
        raise ServeError(
            attempted,
            f"its log-probabilities are {figures.to_adapter:.3f} nats from the adapter's and {figures.to_base:.3f} "
            f"from the base model's (allowed: {tolerance:g}, and nearer to the adapter)",
            "See that the server has the round's base model, precision and adapter folder.",
        ).of_condition(Condition.WRONG_WEIGHTS)
    return figures


def _mean_difference(left: list[float], right: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)
