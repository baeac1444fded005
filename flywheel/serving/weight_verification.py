"""Verifies that a replica answers with an adapter's weights, and not with those of its parent or of the base model.

The round measured log-probabilities of some tokens under all three. The replica must return the adapter's figures,
within the difference of repeated measurements of the same weights. Callers decide what follows from a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.errors import ServeError
from flywheel.round import Probe
from flywheel.serving.replica_client import Replica
from flywheel.serving.replica_condition import Condition

NOISE_ALLOWED: Final = 4
"""Tolerance as a multiple of the measured noise."""
LEAST_ALLOWED_NATS: Final = 0.005
"""Minimum tolerance in nats per token: a single measurement of the noise may be small by chance."""
BASE, PARENT = "the base model", "its parent"


@dataclass(frozen=True, slots=True)
class ProbeFigures:
    """Mean absolute differences of log-probabilities in nats per token: of the measurement to adapter, base and
    parent, and of these to the adapter (`apart`). `noise` is the larger difference of two measurements of the same
    weights: of the adapter in the round, and of the base model in the round and on the replica. `allowed` is the
    tolerance computed from it; `indistinct` names models that are too similar to the adapter to distinguish."""

    tokens: int
    to_adapter: float
    to_base: float
    to_parent: float | None
    apart_base: float
    apart_parent: float | None
    noise: float
    allowed: float
    indistinct: tuple[str, ...]
    passed: bool

    @property
    def doubt(self) -> str:
        """A sentence on models that could not be distinguished; empty if there are none."""
        apart = {BASE: self.apart_base, PARENT: self.apart_parent or 0.0}
        told = " and ".join(f"{name} ({apart[name]:.4f} nats apart)" for name in self.indistinct)
        return f"too near to tell it from {told} where {self.allowed:.4f} nats may be noise" if told else ""


def compare(measured: Sequence[float], base: Sequence[float], probe: Probe, tolerance: float) -> ProbeFigures:
    """Evaluate a replica's measurements at the probe's positions, under the adapter and under the `base` model.

    They pass if the difference to the adapter's figures is within the noise and `tolerance`, and smaller than to
    those of parent and base, if these can be distinguished. NaN never passes.
    """

    def at(logprobs: list[float]) -> list[float]:
        return [logprobs[place] for place in probe.compared]

    adapter = at(probe.adapter_logprobs)
    others = {BASE: at(probe.base_logprobs)}
    if probe.parent_logprobs is not None:
        others[PARENT] = at(probe.parent_logprobs)
    noise = max(probe.noise, _mean_difference(base, others[BASE]))
    allowed = min(tolerance, max(LEAST_ALLOWED_NATS, NOISE_ALLOWED * noise))
    to_adapter = _mean_difference(measured, adapter)
    to = {name: _mean_difference(measured, logprobs) for name, logprobs in others.items()}
    apart = {name: _mean_difference(adapter, logprobs) for name, logprobs in others.items()}
    indistinct = tuple(name for name in others if apart[name] <= allowed)
    return ProbeFigures(
        tokens=len(measured),
        to_adapter=to_adapter,
        to_base=to[BASE],
        to_parent=to.get(PARENT),
        apart_base=apart[BASE],
        apart_parent=apart.get(PARENT),
        noise=noise,
        allowed=allowed,
        indistinct=indistinct,
        passed=to_adapter <= allowed and all(to_adapter < to[name] for name in others if name not in indistinct),
    )


async def prove(replica: Replica, model: str, base_model: str, probe: Probe, tolerance: float) -> ProbeFigures:
    """Measure `model` on the replica. Raises ServeError if its weights are not those of the round."""
    attempted = f"prove {model} on {replica.url}"
    if not probe.token_ids:
        raise ServeError(attempted, "the round wrote down no tokens to compare", "Train the adapter again.")
    measured = await replica.logprobs(model, probe.prompt_token_ids, probe.token_ids, probe.compared)
    base = await replica.logprobs(base_model, probe.prompt_token_ids, probe.token_ids, probe.compared)
    figures = compare(measured, base, probe, tolerance)
    if not figures.passed:
        distances = [f"{figures.to_base:.3f} from the base model's"]
        if figures.to_parent is not None:
            distances.insert(0, f"{figures.to_parent:.3f} from its parent's")
        raise ServeError(
            attempted,
            f"its log-probabilities are {figures.to_adapter:.3f} nats from the adapter's, {' and '.join(distances)}"
            f" (allowed: {figures.allowed:.3f}, and nearest to the adapter; the same weights measured twice differ by"
            f" {figures.noise:.4f})",
            "See that the server has the round's base model, precision and adapter folder.",
        ).of_condition(Condition.WRONG_WEIGHTS)
    return figures


def _mean_difference(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)
