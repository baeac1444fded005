"""Verdicts, rubric diffs and costs for a person's eyes. Keys and outcomes are never cut; reasons are wrapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

COLOURS: Final = {
    "accepted": "green",
    "rejected": "red",
    "undecided": "yellow",
    "dead": "magenta",
    "held": "blue",
}
WIDE: Final = 110
"""From so many columns on, a reason has room beside its verdict; else it stands below."""
EXCERPT: Final = 240
FLIPS_SHOWN: Final = 10


def verdict_table(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Key, verdict, score, failed criteria and reason of each task."""
    wide = console.width >= WIDE
    names = ["task", "verdict", "score", "failed", *(["reason"] if wide else [])]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=wide, show_edge=False)
    for name in names:
        table.add_column(
            name,
            no_wrap=name in ("task", "verdict", "score"),
            justify="right" if name == "score" else "left",
            overflow="fold",
            ratio={"failed": 1, "reason": 4}.get(name) if wide else None,
        )
    if wide:
        for verdict in verdicts:
            table.add_row(*_cells(verdict), _reason(verdict))
        console.print(table)
        return
    # One table for the columns' widths, and each reason below its line, from edge to edge.
    width = {
        "task": max((len(str(each["task_id"])) for each in verdicts), default=4),
        "verdict": max((len(str(each["outcome"])) for each in verdicts), default=7),
    }
    width["verdict"] = max(width["verdict"], len("verdict"))
    console.print(Text(f"{'task':{width['task']}}  {'verdict':{width['verdict']}}  score  failed", style="bold"))
    for verdict in verdicts:
        key, outcome, score, failed = _cells(verdict)
        line = Text(f"{key:{width['task']}}  ")
        line.append(f"{outcome.plain:{width['verdict']}}", style=outcome.style)
        line.append(f"  {score:>5}  ")
        line.append(failed)
        console.print(line, soft_wrap=False)
        if reason := _reason(verdict):
            console.print(Padding(Text(reason, style="dim", overflow="fold"), (0, 0, 0, 2)))


def _cells(verdict: Mapping[str, Any]) -> tuple[str, Text, str, str]:
    score = "–" if verdict["score"] is None else f"{verdict['score']:.2f}"
    outcome = Text(verdict["outcome"], style=COLOURS[verdict["outcome"]])
    return verdict["task_id"], outcome, score, ", ".join(verdict["failed"]) or "–"


def _reason(verdict: Mapping[str, Any]) -> str:
    return " ".join(str(verdict["reason"]).split())


def totals(report: Mapping[str, Any]) -> Text:
    """How many came out how."""
    line = Text(f"{report['judged']:,} judged: ")
    counted = [(name, report[name]) for name in COLOURS if report[name] or name in ("accepted", "rejected")]
    for place, (name, number) in enumerate(counted):
        line.append(", " if place else "")
        line.append(f"{number:,} {name}", style=COLOURS[name])
    if report["changed"]:
        line.append(f"; {report['changed']:,} decided the other way before")
    return line


def spent(usage: Mapping[str, Any], reused: int, cost: Mapping[str, Any] | None) -> str:
    """What it took."""
    parts = [f"{usage['calls']:,} calls"]
    if usage["calls"]:
        parts.append(f"{usage['prompt_tokens']:,} tokens sent, {usage['completion_tokens']:,} received")
        if cost is not None:
            parts.append(money(cost))
    if reused:
        parts.append(f"{reused:,} verdicts from what is stored")
    return "; ".join(parts)


def money(cost: Mapping[str, Any]) -> str:
    """About so much."""
    amount = cost["amount"]
    figures = (
        "0" if amount == 0 else f"{amount:,.2f}" if amount >= 1 else f"{amount:.2g}" if amount >= 1e-4 else "< 0.0001"
    )
    return f"about {figures} {cost['currency']}"


def estimated(estimate: Mapping[str, Any]) -> str:
    """What it would take."""
    if not estimate["calls"]:
        return "no call"
    sent, received = estimate["prompt_tokens"], estimate["completion_tokens"]
    priced = f", {money(estimate['cost'])}" if estimate["cost"] is not None else ""
    return f"{estimate['calls']:,} calls, about {sent:,} tokens sent and {received:,} received{priced}"


def learned(estimate: Mapping[str, Any]) -> str:
    """How good an estimate is."""
    if estimate["learned_from"]:
        return f"tokens as this judge's last {estimate['learned_from']:,} calls took them"
    return "tokens by rule of thumb: this judge has not been asked yet"


def rubric_diff(console: Console, diff: Mapping[str, Any]) -> None:
    """What changed in the rubric, which verdicts flip and why, and what judging everything again would take."""
    console.print(Text(f"{diff['old']['name']} → {diff['new']['name']}", style="bold"))
    width = max((len(change["criterion"]) for change in diff["changes"]), default=0)
    for change in diff["changes"]:
        console.print(Text(f"  {change['criterion']:{width}}  {change['what']}" if width else f"  {change['what']}"))
    if not diff["changes"]:
        console.print("  nothing that changes a verdict")
    flips = Counter(flip["new"]["outcome"] for flip in diff["flips"])
    line = Text(f"\n{diff['compared']:,} compared: {len(diff['flips']):,} flip", style="bold")
    if diff["flips"]:
        line.append(f" ({flips['accepted']:,} to accepted, {flips['rejected']:,} to rejected)")
    line.append(f", {diff['same']:,} stay as they are")
    if diff["undecided"]:
        line.append(f", {diff['undecided']:,} undecided")
    console.print(line)
    for flip in diff["flips"][:FLIPS_SHOWN]:
        _flip(console, flip)
    if (more := len(diff["flips"]) - FLIPS_SHOWN) > 0:
        console.print(f"\n… and {more:,} more; `--json` lists them all", highlight=False)
    again = diff["again"]
    console.print(
        f"\nto judge all {diff['compared']:,} by the new rubric: {estimated(again['from_nothing'])}"
        f"\nwith what is stored now: {estimated(again['with_what_is_stored'])}"
        f"\n({learned(again['from_nothing'])})",
        highlight=False,
    )


def _flip(console: Console, flip: Mapping[str, Any]) -> None:
    line = Text(f"\n{flip['task_id']}  ")
    for place, side in enumerate((flip["old"], flip["new"])):
        line.append(" → " if place else "")
        line.append(side["outcome"], style=COLOURS[side["outcome"]])
        line.append(f" {side['score']:.2f}")
    console.print(line)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for each in flip["why"]:
        grid.add_row("  why", Text(_why(each)))
    grid.add_row("  question", Text(flip["query"]))
    grid.add_row("  answer", Text(flip["answer"]))
    if flip["new"]["reason"]:
        grid.add_row("  judge", Text(" ".join(flip["new"]["reason"].split())))
    console.print(grid)


def _why(each: Mapping[str, Any]) -> str:
    if not each["criterion"]:
        return str(each["why"])
    gave, gives = ("–" if value is None else f"{value:+.2f}" for value in (each["old"], each["new"]))
    return f"{each['criterion']}: {gave} → {gives} ({each['why']})"


def excerpt(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= EXCERPT else f"{line[: EXCERPT - 1]}…"
