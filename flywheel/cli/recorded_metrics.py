"""Metrics of recorded replies against the ground truth of their tasks: `filter --dry-run --metrics`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="NAMES",
        help="Also measure replies against metadata.ground_truth: names separated by commas, `all`, or criteria.",
    ),
]


def requested_metrics(requested: str, criteria: Sequence[str]) -> tuple[str, ...]:
    """The full names of metrics, given names separated by commas or `all`, and the ids of the rubric's criteria.
    Raises ConfigError for another name."""
    from flywheel.judge.agent_metrics import METRICS, metric_names, metric_of

    names = [name.strip() for name in requested.split(",") if name.strip()]
    return metric_names([*METRICS, *map(metric_of, criteria)] if names == ["all"] else names, criteria)


class RecordedMetrics:
    """The metrics of the replies that are judged."""

    def __init__(self, requested: str, criteria: Sequence[str]) -> None:
        """`criteria` are the ids of the rubric's, which are metrics as well. Raises ConfigError for another name."""
        self._values: dict[str, list[Any]] = {name: [] for name in requested_metrics(requested, criteria)}
        self.wrong: list[str] = []
        """Why the ground truth of tasks cannot be used."""

    def add(self, judged: Any) -> None:
        """Count the reply of a `TaskResult`. One that a filter decided, or a person must, is not measured by the
        metrics that need the rubric's verdict."""
        from flywheel.errors import ConfigError
        from flywheel.judge.agent_metrics import Attempt, measure, metric_of
        from flywheel.records.ground_truth import ground_truth_of
        from flywheel.records.task import conversation_key, trace_parts
        from flywheel.records.verdict import Outcome
        from flywheel.training.gate.intervals import MetricValue

        line, verdict = judged.task.line, judged.verdict
        parts, about = trace_parts(line), line["metadata"]
        is_decided = verdict is not None and verdict.outcome is not Outcome.UNDECIDED
        accepted = verdict.outcome is Outcome.ACCEPTED if is_decided else None
        attempt = Attempt(parts.steps, line["answer"], accepted, errors=parts.errors)
        found: dict[str, float | None] = {}
        try:
            found |= measure(attempt, ground_truth_of(line))
        except ConfigError as error:
            # The judge's calls for the other tasks are paid.
            self.wrong.append(str(error))
        found |= {metric_of(each.criterion): each.value for each in (verdict.results if verdict is not None else ())}
        conversation = conversation_key(about["conversation_id"], about["trace_id"])
        for name, values in self._values.items():
            values.append(MetricValue(judged.task.key, found.get(name), conversation))

    def as_json(self, seed: int) -> dict[str, dict[str, Any]]:
        """Mean, standard deviation, counts and interval of each metric, by name; null where nothing was measured."""
        from flywheel.training.gate.intervals import CONFIDENCE, summarise

        return {
            name: asdict(summarise(values, confidence=CONFIDENCE, seed=seed)) for name, values in self._values.items()
        }


def lines_of(metrics: dict[str, dict[str, Any]]) -> list[str]:
    """The metrics for people, one in each line."""
    width = max(map(len, metrics), default=0)
    return [f"{name:<{width}}  {_text(each)}" for name, each in metrics.items()]


def _text(found: dict[str, Any]) -> str:
    if found["mean"] is None:
        return f"not measured ({found['unmeasured']:,} without ground truth or verdict)"
    without = f", {found['unmeasured']:,} not measured" if found["unmeasured"] else ""
    reach = f"{found['lower']:.3f} to {found['upper']:.3f}"
    return f"{found['mean']:.3f} ({reach}), std {found['std']:.3f}, {found['count']:,} measured{without}"
