"""The quality bar of CI: what share of replies must be accepted, and the reports on them (JUnit XML, Markdown).

A command makes a `Case` of each task that it judged, in the order of its file. Nothing here judges.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from flywheel.errors import ExportError, QualityError
from flywheel.system.files import write_atomic
from flywheel.system.terminal import excerpt, quantity, score_text

if TYPE_CHECKING:
    from flywheel.records.verdict import Verdict

ROWS: Final = 50
"""Tasks of each kind that a summary lists: GitHub refuses one of more than 1 MiB."""
EXCERPT: Final = 400
"""Characters of a reason in a summary."""
MOST_UNDECIDED: Final = 0.5
"""What --fail-under allows without --max-undecided: one accepted reply among undecided ones is no pass."""
_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML 1.0 document can hold (W3C, XML 1.0, production 2), not even escaped."""
_MARKUP: Final = re.compile(r"([\\`*_{}\[\]()#+!|~-])")

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
        help="The one-sided lower bound of the share (Wilson) must reach --fail-under, at this level.",
    ),
]
MaxUndecidedOption = Annotated[
    float | None,
    typer.Option(
        "--max-undecided",
        min=0,
        max=1,
        metavar="SHARE",
        help="Exit 100 if a larger share is left undecided. With --fail-under, half by default.",
    ),
]
JunitOption = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Write the verdicts as JUnit XML: a suite for each rubric."),
]
SummaryOption = Annotated[
    Path | None,
    typer.Option("--summary", metavar="FILE", help="Write the result as Markdown, as $GITHUB_STEP_SUMMARY has it."),
]


class CaseOutcome(StrEnum):
    """An outcome of the judge, or `filtered`: the filter chain excluded the task."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNDECIDED = "undecided"
    FILTERED = "filtered"


@dataclass(frozen=True, slots=True)
class Case:
    """One task of a report.

    Attributes:
        rubric: The id of its rubric, the name of its suite.
        task: Its id.
        score: 0 to 1; None without a verdict of the judge.
        failed: Each criterion that failed, with its choice and the reason.
        reason: Why it was rejected or filtered, or what left it undecided.
    """

    rubric: str
    task: str
    outcome: CaseOutcome
    score: float | None = None
    failed: tuple[str, ...] = ()
    reason: str = ""

    @classmethod
    def of(cls, rubric: str, task: str, verdict: Verdict) -> Self:
        """The case of a task that the judge was to decide."""
        failed = (
            f"{each.criterion}: {each.choice}" + (f" ({each.reason})" if each.reason else "")
            for each in verdict.results
            if not each.passed
        )
        reason = verdict.reason or verdict.error
        return cls(rubric, task, CaseOutcome(verdict.outcome.value), verdict.score, tuple(failed), reason)


@dataclass(frozen=True, slots=True)
class Quality:
    """The result of a bar. `share` is accepted / (accepted + rejected), None without a decided reply; `lower_bound`
    is None without a level of confidence. `failures` say what the bar is missed by; empty if it is reached."""

    counts: Counter[CaseOutcome]
    share: float | None
    lower_bound: float | None
    failures: tuple[str, ...]

    @property
    def sentence(self) -> str:
        accepted, decided = self.counts[CaseOutcome.ACCEPTED], self.counts[CaseOutcome.REJECTED]
        decided += accepted
        text = f"{accepted:,} of {quantity(decided, 'decided reply', 'decided replies')} accepted"
        if self.share is not None:
            text += f" ({self.share:.4g}"
            text += f", lower bound {self.lower_bound:.4g})" if self.lower_bound is not None else ")"
        return f"{text}, {self.counts[CaseOutcome.UNDECIDED]:,} undecided"

    @property
    def error(self) -> QualityError | None:
        """The error of a command whose bar is missed."""
        if not self.failures:
            return None
        hint = "Read the reasons of the rejected and undecided replies: --junit and --summary have them."
        return QualityError("reach the quality bar", "; ".join(self.failures), hint)

    def json(self) -> dict[str, Any]:
        counts = {outcome.value: self.counts[outcome] for outcome in CaseOutcome}
        bounds = {"share": self.share, "lower_bound": self.lower_bound}
        return {**counts, **bounds, "failures": list(self.failures)}


@dataclass(frozen=True, slots=True)
class QualityBar:
    """What a command line asks of the quality of replies, and which reports.

    Attributes:
        fail_under: The share of decided replies that must be accepted; None for any.
        confidence: The one-sided level at which the share must be shown; None for the observed share.
        max_undecided: The largest share of replies, without filtered ones, that may be undecided; None for any, or
            for half of them with `fail_under`.
    """

    fail_under: float | None = None
    confidence: float | None = None
    max_undecided: float | None = None
    junit: Path | None = None
    summary: Path | None = None

    def __post_init__(self) -> None:
        """Raises BadParameter, before anything is paid for that could not be reported."""
        if self.confidence is not None and self.fail_under is None:
            raise typer.BadParameter("it belongs to --fail-under", param_hint="--confidence")
        for name, path in (("--junit", self.junit), ("--summary", self.summary)):
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                why = "it is a folder" if path.is_dir() else "its folder is not there"
                raise typer.BadParameter(f"{path} cannot be written: {why}", param_hint=name)

    @property
    def is_asked(self) -> bool:
        """Whether the command line has any of the options."""
        return self != QualityBar()

    def measure(self, cases: Sequence[Case]) -> Quality:
        """Hold the bar against the cases. Without a decided reply, `fail_under` is missed.

        The lower bound is the one of the two-sided interval with twice the error (E. B. Wilson, 1927).
        """
        # Imported here: `--help` does not wait for the database library.
        from flywheel.records.verdict import is_within_share
        from flywheel.store.views.acceptance import wilson

        counts = Counter(case.outcome for case in cases)
        accepted, undecided = counts[CaseOutcome.ACCEPTED], counts[CaseOutcome.UNDECIDED]
        decided = accepted + counts[CaseOutcome.REJECTED]
        share = accepted / decided if decided else None
        bound = wilson(accepted, decided, 2 * self.confidence - 1)[0] if decided and self.confidence else None
        failures = []
        if self.fail_under is not None:
            reached = share if self.confidence is None else bound
            if share is None:
                failures.append(f"no reply was decided, and --fail-under is {self.fail_under:g}")
            elif not (reached is not None and reached >= self.fail_under):
                what = f"{accepted:,} of {quantity(decided, 'decided reply', 'decided replies')} accepted"
                figures = f"{share:.4g}"
                if bound is not None:
                    figures += f", at least {bound:.4g} with confidence {self.confidence:g}"
                failures.append(f"{what} ({figures}), and --fail-under is {self.fail_under:g}")
        judged = decided + undecided
        most, asked = self.max_undecided, f"and --max-undecided is {self.max_undecided or 0:g}"
        if most is None and self.fail_under is not None:
            most, asked = MOST_UNDECIDED, "more than half, and there is no --max-undecided"
        if most is not None and not is_within_share(undecided, judged, most):
            what = f"{undecided:,} of {quantity(judged, 'reply', 'replies')} undecided"
            failures.append(f"{what} ({undecided / judged:.4g}), {asked}")
        return Quality(counts, share, bound, tuple(failures))

    def report(
        self, cases: Sequence[Case], *, notes: Sequence[str] = (), failures: Sequence[str] = (), error: str = ""
    ) -> Quality:
        """Measure, and write the reports that are asked for. `notes` are further lines of the summary, `failures`
        what else misses the bar; `error` is what kept cases from being judged. Raises ExportError."""
        quality = self.measure(cases)
        quality = replace(quality, failures=(*failures, *quality.failures))
        if self.junit is not None:
            _write(self.junit, junit_xml(cases))
        if self.summary is not None:
            _write(self.summary, summary_text(cases, quality, notes, error).encode("utf-8", "replace"))
        return quality


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomic(path, data)
    except OSError as error:
        raise ExportError(f"write {path}", error.strerror or str(error), "Name another file.") from error


def junit_xml(cases: Sequence[Case]) -> bytes:
    """The cases as JUnit XML: a suite for each rubric, a case for each task. Rejected ones have a `failure`,
    undecided ones an `error`, and filtered ones are `skipped`. Characters that XML cannot hold are removed."""
    # Imported here: every command imports this module.
    from xml.etree import ElementTree

    root = ElementTree.Element("testsuites", {"name": "flywheel", **_counts(cases)})
    suites: dict[str, list[Case]] = {}
    for case in cases:
        suites.setdefault(case.rubric, []).append(case)
    for rubric, own in suites.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": _storable(rubric), **_counts(own)})
        for case in own:
            names = {"classname": _storable(rubric), "name": _storable(case.task)}
            element = ElementTree.SubElement(suite, "testcase", names)
            if (tag := _TAGS.get(case.outcome)) is not None:
                message = _storable(_message(case))
                attributes = {"message": message} if tag == "skipped" else {"message": message, "type": case.outcome}
                detail = "\n".join((*case.failed, case.reason)) if case.failed else case.reason
                ElementTree.SubElement(element, tag, attributes).text = _storable(detail)
    data: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return data


_TAGS: Final = {
    CaseOutcome.REJECTED: "failure",
    CaseOutcome.UNDECIDED: "error",
    CaseOutcome.FILTERED: "skipped",
}


def _message(case: Case) -> str:
    """What a list of cases shows of one that was not accepted."""
    failed = "; ".join(case.failed)
    score = f"score {case.score:.2f}" if case.score is not None and case.outcome is CaseOutcome.REJECTED else ""
    return excerpt(": ".join(filter(None, (score, failed or case.reason))))


def _counts(cases: Sequence[Case]) -> dict[str, str]:
    counts = Counter(case.outcome for case in cases)
    numbers = {"failures": CaseOutcome.REJECTED, "errors": CaseOutcome.UNDECIDED, "skipped": CaseOutcome.FILTERED}
    return {"tests": str(len(cases)), **{name: str(counts[outcome]) for name, outcome in numbers.items()}}


def _storable(text: str) -> str:
    return _NOT_XML.sub("", text)


def summary_text(cases: Sequence[Case], quality: Quality, notes: Sequence[str], error: str) -> str:
    """The result in Markdown. Texts of traces, judges and models are inert in it."""
    rubrics = ", ".join(dict.fromkeys(_inert(case.rubric) for case in cases)) or "no task"
    ended = "not finished" if error else "below the quality bar" if quality.failures else "passed"
    lines = [f"## Flywheel: {rubrics}: {ended}", "", f"{quality.sentence}.", ""]
    lines += [f"- {_inert(each)}" for each in (*quality.failures, *notes, *filter(None, (error,)))]
    lines += ["", "| accepted | rejected | undecided | filtered |", "|---|---|---|---|"]
    lines.append("| " + " | ".join(f"{quality.counts[outcome]:,}" for outcome in CaseOutcome) + " |")
    for outcome in _TAGS:
        chosen = [case for case in cases if case.outcome is outcome]
        if not chosen:
            continue
        lines += ["", f"### {outcome.value.capitalize()}", "", "| task | score | why |", "|---|---|---|"]
        for case in chosen[:ROWS]:
            why = _inert(excerpt("; ".join(case.failed) or case.reason, EXCERPT))
            lines.append(f"| {_inert(case.task)} | {score_text(case.score)} | {why} |")
        if len(chosen) > ROWS:
            lines += ["", f"… and {len(chosen) - ROWS:,} more."]
    return "\n".join(lines) + "\n"


def _inert(text: str) -> str:
    return _MARKUP.sub(r"\\\1", html.escape(excerpt(text), quote=False))
