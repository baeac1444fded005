"""Verifies that a replica answers with an adapter's weights, and not with those of its parent, of the base model or
of another adapter.

The round recorded log-probabilities of some tokens under all of them, twice. The replica measures the same tokens
under the adapter and under its own base model, and a regression says how much of the recorded differences it shows.
Callers decide what follows from a failure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flywheel.errors import Condition, ServeError
from flywheel.records.round import Probe
from flywheel.serving.client.replica_client import Replica

if TYPE_CHECKING:
    import numpy as np

PLACES: Final = (64, 128, 256, 512)
"""Numbers of tokens, tried in this order until the standard error is small enough."""
LARGEST_ERROR: Final = 0.07
"""Maximum standard error of a slope. With 0.08, half of an adapter passed in 8 of 192,000 simulated draws."""
LEAST_NOISE: Final = 0.1
"""Noise of a replica in nats per token that a probe has tokens for, however small that of the engine of its round."""
LEAST_SLOPE, LARGEST_SLOPE = 0.75, 1.33
NOISE_ALLOWED: Final = 4.0
UNEXPLAINED_ALLOWED: Final = 0.01
"""Maximum of the residuals' mean square: so many times that of the noise, plus this share of that of the smallest
recorded difference."""


@dataclass(frozen=True, slots=True)
class ProbeFigures:
    """How much of the recorded differences a replica shows: 1 for the right weights.

    `parent_slope` is for the difference of the parent to the base model, None without a parent, and `adapter_slope`
    for that of the adapter to its parent, or to the base model; `standard_error` is the larger one of theirs.
    `noise` and `residual` are root mean squares in nats per token: of the larger one of the differences between the
    two recordings and between the replica's and the recorded base model, and of what the slopes do not explain.
    `indistinct` if the standard error is too large to tell.
    """

    tokens: int
    parent_slope: float | None
    adapter_slope: float
    standard_error: float
    noise: float
    residual: float
    indistinct: bool
    passed: bool

    @property
    def tokens_needed(self) -> int | None:
        """About how many such tokens would make the standard error small enough; None if no number would."""
        wanted = self.tokens * (self.standard_error / LARGEST_ERROR) ** 2
        return max(PLACES[0], math.ceil(wanted)) if math.isfinite(wanted) else None


def compare(measured: Sequence[float], base: Sequence[float], probe: Probe) -> ProbeFigures:
    """Evaluate a replica's log-probabilities at the first places of the probe, under the adapter and the base model.

    With m for the replica's figures and a, p, b for those of adapter, parent and base model in the second recording:
    m − m_base = β₁ (p − b) + β₂ (a − p) + error, without a constant, and without a parent only β (a − b). Right
    weights give (1, 1), the parent's (1, 0), the base model (0, 0), half of the adapter a half. What the replica's
    precision and kernels do to both models cancels. Noise in the regressors would draw the slopes towards 0, so the
    same differences of the first recording, whose noise is independent, are the instruments (the first recording has
    also chosen the places; its noise is independent of both others, so that does not bias the slopes).

    Just-identified instrumental variables: β = (Z'X)⁻¹ Z'y, with the sandwich covariance of White, "Instrumental
    variables regression with independent observations", Econometrica 50 (1982), because noise differs by token.
    Residuals are divided by 1 − x (Z'X)⁻¹ z, which makes them those without their own token (the HC3 of MacKinnon and
    White, Journal of Econometrics 29 (1985)), because few tokens have most of the leverage.

    Slopes near 1 do not exclude another adapter that contains this one, for example one trained on from it: the
    residuals do, as far as they exceed the noise. NaN never passes.
    """
    # Not at the top: a daemon that waits does without it.
    import numpy as np

    tokens = len(measured)
    z, x, inverse = regressors(probe, tokens)
    with np.errstate(all="ignore"):
        y = np.array(measured) - np.array(base)
        slopes = inverse @ z.T @ y
        residuals = y - x @ slopes
        error = standard_error(residuals, z, x, inverse)
        shift = np.array(base) - probe.second.base[:tokens]
        noise = float(max(np.mean((x - z).sum(1) ** 2), np.mean(shift**2)))
        residual = float(residuals @ residuals / max(1, tokens - len(slopes)))
        signal = float(np.abs(np.mean(x * z, axis=0)).min())
    misfit = residual > NOISE_ALLOWED * noise + UNEXPLAINED_ALLOWED * signal
    is_distinct = tokens >= PLACES[0] and error <= LARGEST_ERROR
    return ProbeFigures(
        tokens=tokens,
        parent_slope=None if probe.second.parent is None else float(slopes[0]),
        adapter_slope=float(slopes[-1]),
        standard_error=error if math.isfinite(error) else math.inf,
        noise=math.sqrt(noise),
        residual=math.sqrt(residual),
        indistinct=not is_distinct and bool(np.isfinite(y).all()),
        passed=is_distinct and not misfit and all(LEAST_SLOPE <= slope <= LARGEST_SLOPE for slope in slopes),
    )


def regressors(probe: Probe, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the first tokens, the differences of each version to the one before it in the first recording, Z, and in the
    second, X, both (T, 1 or 2), and (Z'X)⁻¹, which is NaN where the versions do not differ."""
    import numpy as np

    z, x = (np.diff(each.versions, axis=0).T[:tokens] for each in (probe.first, probe.second))
    try:
        inverse = np.linalg.inv(z.T @ x)
    except np.linalg.LinAlgError:
        inverse = np.full((x.shape[1],) * 2, np.nan)
    return z, x, inverse


def standard_error(residuals: np.ndarray, z: np.ndarray, x: np.ndarray, inverse: np.ndarray) -> float:
    """The larger standard error of the slopes, HC3 as in `compare`. NaN where it cannot be computed."""
    import numpy as np

    influence = (residuals / (1 - np.einsum("ti,ij,tj->t", x, inverse, z)))[:, None] * z @ inverse.T
    return float(np.sqrt((influence**2).sum(0)).max())


def expected_error(probe: Probe) -> float:
    """The standard error of the slopes that a noisy replica would have (`compare`).

    Its noise is taken as twice that of the engine that recorded the probe, and at least as `LEAST_NOISE`.
    """
    import numpy as np

    z, x, inverse = regressors(probe, len(probe.places))
    noise = max(2 * math.sqrt(np.mean((x - z).sum(1) ** 2)), LEAST_NOISE)
    error = standard_error(np.full(len(x), noise), z, x, inverse)
    return error if math.isfinite(error) else math.inf


def can_prove(probe: Probe) -> bool:
    """Whether a probe has tokens enough to tell its adapter from others on a noisy replica."""
    return len(probe.places) >= PLACES[0] and expected_error(probe) <= LARGEST_ERROR


async def prove(replica: Replica, model: str, base_model: str, probe: Probe) -> ProbeFigures:
    """Measure `model` on the replica. Raises ServeError if its weights are not those of the round, or cannot be told
    from others."""
    attempted = f"prove {model} on {replica.url}"
    measured: list[float] = []
    base: list[float] = []
    for tokens in PLACES:
        contexts = [probe.texts[text][: at + 1] for text, at in probe.places[len(measured) : tokens]]
        # One after the other: in a batch with an adapter, vLLM 0.32 may apply it to the base model on a CPU.
        measured += await replica.logprobs(model, contexts)
        base += await replica.logprobs(base_model, contexts)
        figures = compare(measured, base, probe)
        if not figures.indistinct or len(measured) < tokens:
            break
    if figures.passed:
        return figures
    others = "the base model" if figures.parent_slope is None else "its parent and the base model"
    if figures.indistinct:
        needed = figures.tokens_needed
        raise ServeError(
            attempted,
            f"the {figures.tokens} tokens of its probe cannot distinguish it from {others}: the standard error is"
            f" {figures.standard_error:.2f}, and must be {LARGEST_ERROR}; "
            + (f"about {needed} such tokens would tell" if needed else "no number of tokens would tell"),
            "It differs too little for this precision. Train further from the version that serves.",
        )
    shown = f"{figures.adapter_slope:z.2f} of the adapter's recorded difference"
    if figures.parent_slope is not None:
        shown = f"{figures.parent_slope:z.2f} of its parent's recorded difference to the base model and {shown}"
    raise ServeError(
        attempted,
        f"it shows {shown} (allowed: {LEAST_SLOPE} to {LARGEST_SLOPE}), with {figures.residual:.4f} nats per token"
        f" unexplained, where {figures.noise:.4f} may be noise",
        "See that the server has the round's base model, precision and adapter folder.",
    ).of_condition(Condition.WRONG_WEIGHTS)
