"""The proof that a replica answers with an adapter and with no other weights: not its parent's, nor the base model's.

The round measured the log-probabilities of some tokens under all three; the replica must give the adapter's figures,
as exactly as the same weights can be measured twice. What follows from a failed proof is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.errors import ServeError
from flywheel.round import Probe
from flywheel.serving.client import Replica
from flywheel.serving.condition import Condition

NOISE_ALLOWED: Final = 4
"""How many times the noise the adapter's own log-probabilities may be off."""
LEAST_ALLOWED_NATS: Final = 0.005
"""What is always allowed: noise that was measured once may have been small by chance."""
BASE, PARENT = "the base model", "its parent"


@dataclass(frozen=True, slots=True)
class ProbeFigures:
    """Mean absolute differences of log-probabilities, in nats per token: measured to adapter, to base and to parent,
    and of these to the adapter (`apart`). `noise` is the larger difference of two measurements of the same weights:
    of the adapter in the round, and of the base model in the round and on the replica. `allowed` follows from it;
    `indistinct` names what is too near to the adapter to tell which of them answered."""

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
        """What the proof leaves open, in words; empty when nothing."""
        apart = {BASE: self.apart_base, PARENT: self.apart_parent or 0.0}
        told = " and ".join(f"{name} ({apart[name]:.4f} nats apart)" for name in self.indistinct)
        return f"too near to tell it from {told} where {self.allowed:.4f} nats may be noise" if told else ""


def compare(measured: Sequence[float], base: Sequence[float], probe: Probe, tolerance: float) -> ProbeFigures:
    """Judge what a replica measured at the probe's places, under the adapter and under the `base` model.

    It passes when it is as near to the adapter's figures as noise allows, `tolerance` at most, and nearer than to
    those of parent and base, as far as these can be told. A value that is no number passes nothing.
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
    """Measure `model` on the replica. Raises ServeError when it is not what the round trained."""
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
