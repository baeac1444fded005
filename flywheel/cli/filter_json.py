"""What `flywheel filter --json` says, and what its tables are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flywheel.daemon.estimate import Cost
    from flywheel.daemon.judging import Filtering
    from flywheel.daemon.rubric_diff import Compared
    from flywheel.daemon.task_result import FilterReport, Judged
    from flywheel.verdict import CriterionResult


def told(judged: Judged, filtering: Filtering, tokens: int) -> dict[str, Any]:
    verdict, repeats = judged.verdict, judged.repeats
    return {
        "task_id": judged.task.key,
        "span_id": judged.task.line["metadata"]["span_id"],
        "outcome": verdict.outcome.value if verdict else "held" if judged.held else "dead",
        "score": verdict.score if verdict else None,
        "failed": list(verdict.failed) if verdict else [],
        "reason": (verdict.reason or verdict.error) if verdict else judged.error,
        "criteria": [_criterion(result, filtering) for result in verdict.results] if verdict else [],
        "estimated_tokens": tokens,
        "reused": judged.reused,
        "repeats": repeats and {"task_id": repeats.key, "similarity": repeats.similarity, "method": repeats.method},
    }


def _criterion(result: CriterionResult, filtering: Filtering) -> dict[str, Any]:
    return {
        "criterion": result.criterion,
        "by_judge": result.criterion in filtering.grader.hashes,
        "choice": result.choice,
        "value": result.value,
        "passed": result.passed,
        "reason": result.reason,
    }


def report(
    report: FilterReport, due: int, verdicts: list[dict[str, Any]], dry_run: bool, cost: dict[str, Any] | None
) -> dict[str, Any]:
    """`due` tasks were there to be judged before the first of them was."""
    return {
        "due": due,
        "judged": report.judged,
        "accepted": report.accepted,
        "rejected": report.rejected,
        "undecided": report.undecided,
        "dead": report.dead,
        "held": report.held,
        "reused": report.reused,
        "changed": report.changed,
        "verdicts": verdicts,
        "usage": {
            "calls": report.calls,
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": report.completion_tokens,
        },
        "cost": cost,
        "estimated_tokens": sum(verdict["estimated_tokens"] for verdict in verdicts),
        "dry_run": dry_run,
        "error": str(report.error) if report.error else None,
    }


def flip(compared: Compared, old: Filtering, new: Filtering) -> dict[str, Any]:
    from flywheel.cli.verdict_table import excerpt
    from flywheel.daemon.rubric_diff import contributions

    line = compared.task.line
    before, after = old.rubric.threshold, new.rubric.threshold
    why = [
        {"criterion": each.criterion, "old": each.old, "new": each.new, "why": each.why}
        for each in contributions(old.rubric, new.rubric, compared.old, compared.new)
    ]
    if before != after:
        why.insert(0, {"criterion": "", "old": before, "new": after, "why": f"threshold {before:g} → {after:g}"})
    return {
        "task_id": compared.task.key,
        "state": compared.task.was.value,
        **{
            side: {"outcome": verdict.outcome.value, "score": verdict.score, "reason": verdict.reason}
            for side, verdict in (("old", compared.old), ("new", compared.new))
        },
        "why": why,
        "query": excerpt(line["main_query"]),
        "answer": excerpt(line["answer"]),
    }


def estimated(cost: Cost) -> dict[str, Any]:
    return {
        "calls": cost.calls,
        "prompt_tokens": cost.prompt_tokens,
        "completion_tokens": cost.completion_tokens,
        "cost": cost.price,
        "learned_from": cost.learned_from,
        "more_calls_if_close": cost.more,
    }
