"""The quality bar of CI: what share of replies must be accepted, and the reports on them (JUnit XML, Markdown).

Each judged task is a `Case`, in the order of its file. Nothing here judges.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self
from xml.etree import ElementTree

from flywheel.daemon.judging.judging_report import TaskResult
from flywheel.errors import ConfigError, ExportError, FlywheelError, QualityError
from flywheel.judge.agent_metrics import Attempt, measure, metric_of
from flywheel.records.ground_truth import ground_truth_of
from flywheel.records.task import conversation_key, trace_parts
from flywheel.records.verdict import Outcome, Verdict, is_within_share
from flywheel.store.verdicts import CHAIN
from flywheel.store.views.acceptance import wilson
from flywheel.system.files import write_atomic
from flywheel.system.terminal import excerpt, quantity, score_text
from flywheel.training.gate.intervals import CONFIDENCE, MetricValue, summarise

ROWS: Final = 50
"""Tasks of each kind that a summary lists: GitHub refuses one of more than 1 MiB."""
EXCERPT: Final = 400
"""Characters of a reason in a summary."""
MOST_UNDECIDED: Final = 0.5
"""What --fail-under allows without --max-undecided: one accepted reply among undecided ones is no pass."""
_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML 1.0 document can hold (W3C, XML 1.0, production 2), not even escaped."""
_MARKUP: Final = re.compile(r"([\\`*_{}\[\]()#+!|~-])")


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
        conversation: Its conversation; empty if it is one of its own.
        values: Of each metric that was measured, 0 to 1.
    """

    rubric: str
    task: str
    outcome: CaseOutcome
    score: float | None = None
    failed: tuple[str, ...] = ()
    reason: str = ""
    conversation: str = ""
    values: Mapping[str, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, rubric: str, task: str, verdict: Verdict) -> Self:
        """The case of a reply that the judge was to decide."""
        failed = (
            f"{each.criterion}: {each.choice}" + (f" ({each.reason})" if each.reason else "")
            for each in verdict.results
            if not each.passed
        )
        reason = verdict.reason or verdict.error
        return cls(rubric, task, CaseOutcome(verdict.outcome.value), verdict.score, tuple(failed), reason)

    @classmethod
    def of_result(cls, rubric: str, result: TaskResult) -> Self:
        """The case of a task: filtered if the chain rejected it, undecided if it is a dead letter."""
        verdict, about = result.verdict, result.task.line["metadata"]
        is_filtered = result.held or (
            verdict is not None and verdict.outcome is Outcome.REJECTED and result.rubric_hash.startswith(CHAIN)
        )
        if is_filtered:
            why = verdict.reason if verdict else "a burst of near-identical questions"
            found = cls(rubric, result.task.key, CaseOutcome.FILTERED, reason=why)
        elif verdict is None:
            found = cls(rubric, result.task.key, CaseOutcome.UNDECIDED, reason=result.error)
        else:
            found = cls.of(rubric, result.task.key, verdict)
        return replace(found, conversation=conversation_key(about["conversation_id"], about["trace_id"]))


def measured(case: Case, result: TaskResult, wrong: list[str]) -> Case:
    """The case with the metrics of its reply; those that need the rubric's verdict are None without one. Why a ground
    truth cannot be used is added to `wrong`."""
    line, verdict = result.task.line, result.verdict
    parts = trace_parts(line)
    accepted = None
    if verdict is not None and verdict.outcome is not Outcome.UNDECIDED:
        accepted = verdict.outcome is Outcome.ACCEPTED
    values: dict[str, float | None] = {}
    try:
        values |= measure(Attempt(parts.steps, line["answer"], accepted, errors=parts.errors), ground_truth_of(line))
    except ConfigError as error:
        # The judge's calls for the other tasks are paid.
        wrong.append(str(error))
    values |= {metric_of(each.criterion): each.value for each in (verdict.results if verdict is not None else ())}
    return replace(case, values=values)


def unjudged(cases: Sequence[Case], rubric: str, keys: Sequence[str], error: FlywheelError | None) -> list[Case]:
    """The cases, with those of the tasks `keys` that an error kept from being judged."""
    known = {case.task for case in cases}
    missing = [key for key in keys if key not in known] if error is not None else []
    why = f"not judged: {error}"
    return [*cases, *(Case(rubric, key, CaseOutcome.UNDECIDED, reason=why) for key in missing)]


def metrics_of(cases: Sequence[Case], names: Sequence[str], seed: int) -> dict[str, dict[str, Any]]:
    """Mean, standard deviation, counts and interval of each metric, by name; null where nothing was measured."""
    return {
        name: asdict(
            summarise(
                [MetricValue(each.task, each.values.get(name), each.conversation) for each in cases],
                confidence=CONFIDENCE,
                seed=seed,
            )
        )
        for name in names
    }


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

    @property
    def is_asked(self) -> bool:
        """Whether the command line has any of the options."""
        return self != QualityBar()

    def measure(self, cases: Sequence[Case]) -> Quality:
        """Hold the bar against the cases. Without a decided reply, `fail_under` is missed.

        The lower bound is the one of the two-sided interval with twice the error (E. B. Wilson, 1927).
        """
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
            most, asked = MOST_UNDECIDED, "more than half (the default of --max-undecided)"
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
    root = ElementTree.Element("testsuites", {"name": "flywheel", **_counts(cases)})
    suites: dict[str, list[Case]] = {}
    for case in cases:
        suites.setdefault(case.rubric, []).append(case)
    for rubric, own in suites.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": rubric, **_counts(own)})
        for case in own:
            element = ElementTree.SubElement(suite, "testcase", {"classname": rubric, "name": case.task})
            if (tag := _TAGS.get(case.outcome)) is not None:
                kind = {} if tag == "skipped" else {"type": case.outcome.value}
                made = ElementTree.SubElement(element, tag, {"message": _message(case), **kind})
                made.text = "\n".join((*case.failed, case.reason)) if case.failed else case.reason
    text = _NOT_XML.sub("", ElementTree.tostring(root, encoding="unicode"))
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}".encode()


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
    counts = Counter(_TAGS.get(case.outcome) for case in cases)
    numbers = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    return {"tests": str(len(cases)), **{name: str(counts[tag]) for name, tag in numbers.items()}}


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
