"""Options of the quality bar and of metrics, which `filter` and `evaluate` share, and the lines of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flywheel.daemon.judging.quality_bar import QualityBar

FailUnderOption = Annotated[
    float | None,
    typer.Option(
        "--fail-under", min=0, max=1, metavar="SHARE", help="Exit 100 if a smaller share of replies is accepted."
    ),
]
ConfidenceOption = Annotated[
    float | None,
    typer.Option(
        "--confidence",
        min=0.5,
        max=0.999999,
        metavar="LEVEL",
        help="Confidence level: the lower bound of the share (Wilson, one-sided) must reach --fail-under.",
    ),
]
MaxUndecidedOption = Annotated[
    float | None,
    typer.Option(
        "--max-undecided",
        min=0,
        max=1,
        metavar="SHARE",
        help="Exit 100 if a larger share is undecided (ungraded). Default with --fail-under: 0.5.",
    ),
]
JunitOption = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Write the verdicts as JUnit XML: a suite for each rubric."),
]
SummaryOption = Annotated[
    Path | None,
    typer.Option("--summary", metavar="FILE", help="Write a Markdown summary, for example to $GITHUB_STEP_SUMMARY."),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="NAMES",
        help="Also measure replies against metadata.ground_truth: names separated by commas, `all`, or criteria.",
    ),
]


def quality_bar(
    fail_under: float | None,
    confidence: float | None,
    max_undecided: float | None,
    junit: Path | None,
    summary: Path | None,
) -> QualityBar:
    """What a command line asks for. Raises BadParameter, before anything is paid for that could not be reported."""
    if confidence is not None and fail_under is None:
        raise typer.BadParameter("it belongs to --fail-under", param_hint="--confidence")
    for name, path in (("--junit", junit), ("--summary", summary)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            why = "it is a folder" if path.is_dir() else "its folder is not there"
            raise typer.BadParameter(f"{path} cannot be written: {why}", param_hint=name)
    return QualityBar(fail_under, confidence, max_undecided, junit, summary)


def metric_lines(metrics: dict[str, dict[str, Any]]) -> list[str]:
    """The metrics for people, one in each line."""
    width = max(map(len, metrics), default=0)
    return [f"{name:<{width}}  {_text(each)}" for name, each in metrics.items()]


def _text(found: dict[str, Any]) -> str:
    if found["mean"] is None:
        return f"not measured ({found['unmeasured']:,} without ground truth or verdict)"
    without = f", {found['unmeasured']:,} not measured" if found["unmeasured"] else ""
    reach = f"{found['lower']:.3f} to {found['upper']:.3f}"
    return f"{found['mean']:.3f} ({reach}), std {found['std']:.3f}, {found['count']:,} measured{without}"
