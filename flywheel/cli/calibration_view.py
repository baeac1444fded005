"""A calibration as one JSON object, and as a person sees it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flywheel.quantity import quantity
from flywheel.terminal import disarmed

if TYPE_CHECKING:
    from flywheel.judge.calibration import Calibration, Disagreement
    from flywheel.judge.labels import Labels
    from flywheel.rubric import Rubric

SHOWN = 300
"""Characters of a text that are shown of a disagreement."""


def told(
    file: Path, rubric: Rubric, judge: str, given: Labels, outcome: Calibration, shortfall: str | None
) -> dict[str, Any]:
    """The report as JSON has it, but for the cost."""
    table, kappa = outcome.confusion, outcome.kappa
    return {
        "rubric": rubric.id,
        "file": str(file),
        "rubric_hash": rubric.hash,
        "judge": judge,
        "labels": len(given.labels),
        "left_out": given.left_out,
        "judged": outcome.n,
        "undecided": [{"name": label.name, "error": error} for label, error in outcome.undecided],
        "confusion": {
            "accept": {"accepted": table.accept_accept, "rejected": table.accept_reject},
            "reject": {"accepted": table.reject_accept, "rejected": table.reject_reject},
        },
        "agreement": table.agreement,
        "base_rate": table.base_rate,
        "judge_rate": table.judge_rate,
        "kappa": {"value": kappa.value, "low": kappa.low, "high": kappa.high},
        "repeats": outcome.repeats,
        "consistency": {"pairs": outcome.consistency, "unanimous": outcome.unanimous},
        "worst": [_disagreement(each) for each in outcome.worst],
        "usage": {
            "calls": outcome.calls,
            "prompt_tokens": outcome.prompt_tokens,
            "completion_tokens": outcome.completion_tokens,
        },
        "shortfall": shortfall,
    }


def _disagreement(each: Disagreement) -> dict[str, Any]:
    return {
        "name": each.label.name,
        "query": each.label.exchange.query,
        "answer": each.label.exchange.answer,
        "label": "accept" if each.label.accept else "reject",
        "label_reason": each.label.reason,
        "verdict": each.verdict.outcome.value,
        "score": each.verdict.score,
        "failed": list(each.verdict.failed),
        "reason": each.verdict.reason,
        "margin": each.margin,
    }


def show(report: dict[str, Any]) -> None:
    """The report for a person."""
    from rich.console import Console
    from rich.table import Table

    from flywheel.cli.verdict_table import money

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    report = disarmed(report)
    told = quantity(report["judged"], "reply", "replies")
    if report["left_out"]:
        told += f", {quantity(report['left_out'], 'line')} without an answer or a verdict left out"
    console.print(f"rubric {report['rubric']} judged by {report['judge']}: {told}")
    table = Table("", "judge accepts", "judge rejects")
    for label, row in report["confusion"].items():
        table.add_row(f"people {label}", str(row["accepted"]), str(row["rejected"]))
    console.print(table)
    kappa = report["kappa"]
    if kappa["value"] is None:
        console.print("Cohen's kappa is not defined: labels and verdicts are all alike")
    else:
        interval = "" if kappa["low"] is None else f" (95 % interval {kappa['low']:.2f} to {kappa['high']:.2f})"
        console.print(f"Cohen's kappa {kappa['value']:.2f}{interval}")
    base = report["base_rate"]
    console.print(
        f"agreement {report['agreement']:.0%}; people accept {base:.0%}, the judge {report['judge_rate']:.0%};"
        f" always saying the same would agree on {max(base, 1 - base):.0%}"
    )
    if (pairs := report["consistency"]["pairs"]) is not None:
        unanimous = report["consistency"]["unanimous"]
        console.print(
            f"over {report['repeats']} repeats the judge agrees with itself on {pairs:.0%} of pairs,"
            f" and on {unanimous:.0%} of replies every time"
        )
    for each in report["undecided"]:
        console.print(f"undecided: {each['name']}: {each['error']}")
    if report["worst"]:
        console.print(f"\nthe worst disagreements ({len(report['worst'])}):")
    for number, each in enumerate(report["worst"], 1):
        reason = f" ({each['label_reason']})" if each["label_reason"] else ""
        console.print(f"\n{number}. {each['name']}: people {each['label']}{reason}; judge: {each['verdict']}", end="")
        console.print("" if each["score"] is None else f", score {each['score']:.2f}")
        console.print(f"   question: {_short(each['query'])}\n   answer:   {_short(each['answer'])}")
        console.print(f"   judge:    {_short(each['reason'])}")
    usage = report["usage"]
    tokens = usage["prompt_tokens"] + usage["completion_tokens"]
    priced = f", {money(report['cost'])}" if report["cost"] is not None else ""
    console.print(f"\n{quantity(usage['calls'], 'call')}, {quantity(tokens, 'token')}{priced}")
    if report["shortfall"]:
        console.print(report["shortfall"])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"
