"""The duration of the judge's calls by this process, as a histogram of Prometheus."""

from __future__ import annotations

from typing import Final

from prometheus_client import Histogram, disable_created_metrics

# One more metric for each label, which nobody asked for.
disable_created_metrics()  # type: ignore[no-untyped-call]

CALL_SECONDS: Final = Histogram(
    "flywheel_judge_call_seconds",
    "Duration of the judge's calls by this process, by endpoint and outcome.",
    # `judge` or `judge.backup`; `answered` or `failed`.
    labelnames=("endpoint", "outcome"),
    buckets=(0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
    registry=None,
)
"""The calls of a round are those of its worker, and not here."""
