"""Verdicts, rubric diffs and costs for people. Keys and outcomes are never cut; reasons continue on the next line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from flywheel.cli.tables import UNBROKEN, Row, facts_grid, facts_text, money, print_rows
from flywheel.system.terminal import escape_terminal, excerpt, quantity, score_text

COLOURS: Final = {
    "accepted": "green",
    "rejected": "red",
    "undecided": "yellow",
    "dead": "magenta",
    "held": "blue",
}
WIDE: Final = 110
"""Terminals of this width have room for the reasons beside the verdict."""
FLIPS_SHOWN: Final = 10
REASONS_SHOWN: Final = 5
NO_VERDICT: Final = ("undecided", "dead")


def verdict_table(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Print the key, verdict, score, failed criteria and reasons of each task."""
    rows = []
    verdicts = escape_terminal(verdicts)
    # An error that left several tasks without a verdict is shown at the first of them, with their number.
    times = Counter(verdict["reason"] for verdict in verdicts if verdict["outcome"] in NO_VERDICT)
    shown: set[str] = set()
    for verdict in verdicts:
        reason = verdict["reason"]
        if times[reason] > 1 and verdict["outcome"] in NO_VERDICT:
            repeated = "" if reason in shown else f"({quantity(times[reason], 'task')}) {reason}"
            verdict = {**verdict, "reason": repeated}  # noqa: PLW2901
            shown.add(reason)
        outcome = Text(verdict["outcome"], style=COLOURS[verdict["outcome"]])
        failed = ", ".join(verdict["failed"]) or "–"
        rows.append(Row((verdict["task_id"], outcome, score_text(verdict["score"]), failed), _reasons(verdict)))
    columns = ("task", "verdict", "score", "failed", "reason")
    # In a pipe reasons stand below their verdict too.
    wide = WIDE if console.width < UNBROKEN else UNBROKEN + 1
    print_rows(console, columns, rows, wide=wide, fold=("failed", "reason"))


def reasons_without_verdict(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Print why tasks got no verdict, the most frequent reasons first."""
    found = Counter((each["outcome"], each["reason"]) for each in verdicts if each["outcome"] in NO_VERDICT)
    for (outcome, reason), number in found.most_common(REASONS_SHOWN):
        console.print(Text.assemble(f"{number:,} ", (outcome, COLOURS[outcome]), f": {escape_terminal(reason)}"))


def _reasons(verdict: Mapping[str, Any]) -> list[Text]:
    """The reason of each failed criterion; for an accepted task those of all criteria that the judge decided."""
    accepted = verdict["outcome"] == "accepted"
    lines = []
    for each in verdict["criteria"]:
        if not each["passed"] or (accepted and each["by_judge"]):
            line = Text("✓ " if each["passed"] else "✗ ", style="green" if each["passed"] else "red")
            line.append(each["criterion"], style="default")
            line.append(f"  {excerpt(each['reason'])}", style="default dim")
            lines.append(line)
    # The reason of a filter, of an undecided task, or of the score alone.
    return lines or [Text(excerpt(verdict["reason"]), style="dim")] if verdict["reason"] else lines


def totals(report: Mapping[str, Any]) -> Text:
    """The number of tasks with each outcome."""
    line = Text(f"{report['judged']:,} judged: ")
    counts = [(name, report[name]) for name in COLOURS if report[name] or name in ("accepted", "rejected")]
    line.append(Text(", ").join(Text(f"{number:,} {name}", style=COLOURS[name]) for name, number in counts))
    if report["changed"]:
        line.append(f"; {report['changed']:,} had the opposite verdict before")
    return line


def spent(usage: Mapping[str, Any], reused: int, cost: Mapping[str, Any] | None) -> str:
    """Calls, tokens and cost."""
    parts = [quantity(usage["calls"], "call")]
    if usage["calls"]:
        parts.append(f"{quantity(usage['prompt_tokens'], 'token')} sent, {usage['completion_tokens']:,} received")
        if cost is not None:
            parts.append(money(cost))
    if reused:
        parts.append(f"{quantity(reused, 'verdict')} reused")
    return "; ".join(parts)


def estimated(estimate: Mapping[str, Any]) -> str:
    """Expected calls, tokens and cost."""
    if not estimate["calls"]:
        return "no call"
    text = _calls_and_tokens(estimate, about="about ")
    more = estimate["more_calls_if_close"]
    return f"{text}; up to {quantity(more, 'more call', 'more calls')} if scores are close" if more else text


def _calls_and_tokens(used: Mapping[str, Any], about: str = "") -> str:
    priced = f", {money(used['cost'])}" if used["cost"] is not None else ""
    tokens = f"{about}{quantity(used['prompt_tokens'], 'token')} sent, {used['completion_tokens']:,} received"
    return f"{quantity(used['calls'], 'call')}, {tokens}{priced}"


def tasks_to_judge(tasks: int, free: int) -> str:
    """`free` of the tasks need no call."""
    return quantity(tasks, "task") + (f", {free:,} of them without a call" if free else "")


def estimate_basis(estimate: Mapping[str, Any]) -> str:
    """What the estimated tokens are based on."""
    if estimate["learned_from"]:
        return f"tokens are based on this judge's last {quantity(estimate['learned_from'], 'call')}"
    return "tokens are a rough guess: this judge has not been asked yet"


def rubric_diff(console: Console, diff: Mapping[str, Any]) -> None:
    """What changed in the rubric, which verdicts flip and why, and what judging everything again would take."""
    diff = escape_terminal(diff)
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
    line.append(f", {diff['same']:,} unchanged")
    if diff["undecided"]:
        line.append(f", {diff['undecided']:,} undecided")
    console.print(line)
    others = {
        "a filter or a person decided them, or they are held or dead": diff["left_aside"],
        "--limit or a stop came first": diff["not_reached"],
    }
    for why, number in others.items():
        if number:
            console.print(f"{number:,} of {quantity(diff['tasks'], 'task')} not compared: {why}", highlight=False)
    for flip in diff["flips"][:FLIPS_SHOWN]:
        _print_flip(console, flip)
    if (more := len(diff["flips"]) - FLIPS_SHOWN) > 0:
        console.print(f"\n… and {more:,} more; `--json` lists them all", highlight=False)
    used = {
        f"judge all {diff['compared']:,} with the new rubric": diff["judge_all"]["without_cache"],
        "the same with what is stored now": diff["judge_all"]["with_cache"],
        "this comparison took": {**diff["usage"], "cost": diff["cost"]},
    }
    console.print()
    for name, each in used.items():
        console.print(Text(f"{name}: {_calls_and_tokens(each)}"))
    console.print(f"({estimate_basis(diff['judge_all']['without_cache'])})")


def _print_flip(console: Console, flip: Mapping[str, Any]) -> None:
    line = Text(f"\n{flip['task_id']}  ")
    before, after = (
        Text.assemble((each["outcome"], COLOURS[each["outcome"]]), f" {each['score']:.2f}")
        for each in (flip["old"], flip["new"])
    )
    console.print(Text.assemble(line, before, " → ", after))
    facts = [("  " if number else "  why", _change(each)) for number, each in enumerate(flip["why"])]
    facts += [("  question", flip["query"]), ("  answer", flip["answer"])]
    if flip["new"]["reason"]:
        facts.append(("  judge", excerpt(flip["new"]["reason"])))
    console.print(Text(facts_text(facts)) if console.width == UNBROKEN else facts_grid(facts))


def _change(each: Mapping[str, Any]) -> str:
    """What a criterion contributed to the score before and now; without a criterion, the change of the threshold."""
    if not each["criterion"]:
        return str(each["why"])
    old, new = ("–" if value is None else f"{value:+.2f}" for value in (each["old"], each["new"]))
    return f"{each['criterion']}: {old} → {new} ({each['why']})"
