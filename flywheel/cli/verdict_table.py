"""Verdicts, rubric diffs and costs for a person's eyes. Keys and outcomes are never cut; reasons are wrapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flywheel.cli.tables import UNBROKEN
from flywheel.terminal import escape_terminal, quantity

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
LEAST: Final = 0.0001
"""Less money than this is not told apart."""
FLIPS_SHOWN: Final = 10
NO_VERDICT: Final = ("undecided", "dead")


def verdict_table(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Key, verdict, score, failed criteria and the judge's reasons for each task."""
    verdicts = _errors_once(escape_terminal(verdicts))
    if WIDE <= console.width < UNBROKEN:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True, show_edge=False)
        for name in ("task", "verdict", "score"):
            table.add_column(name, no_wrap=True, justify="right" if name == "score" else "left")
        table.add_column("failed", overflow="fold", ratio=1)
        table.add_column("reason", overflow="fold", ratio=4)
        for verdict in verdicts:
            table.add_row(*_cells(verdict), Group(*_reasons(verdict)))
        console.print(table)
        return
    # Each reason stands below its line, from edge to edge.
    keys = max((cell_len(verdict["task_id"]) for verdict in verdicts), default=0)
    outcomes = max(len("verdict"), *(len(verdict["outcome"]) for verdict in verdicts))
    console.print(Text(f"{'task':{keys}}  {'verdict':{outcomes}}  score  failed", style="dim"))
    for verdict in verdicts:
        key, outcome, score, failed = _cells(verdict)
        line = Text(f"{set_cell_size(key, keys)}  ", style="bold")
        line.append(f"{outcome.plain:{outcomes}}", style=outcome.style)
        line.append(f"  {score:>5}  {failed}")
        console.print(line)
        for reason in _reasons(verdict):
            console.print(Padding(reason, (0, 0, 0, 2), expand=False))


def _errors_once(verdicts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What kept several tasks from a verdict is told at the first of them, with their number."""
    times = Counter(verdict["reason"] for verdict in verdicts if verdict["outcome"] in NO_VERDICT)
    seen: set[str] = set()

    def told(verdict: Mapping[str, Any]) -> Mapping[str, Any]:
        reason = verdict["reason"]
        if verdict["outcome"] not in NO_VERDICT or times[reason] == 1:
            return verdict
        repeated = "" if reason in seen else f"({quantity(times[reason], 'task')}) {reason}"
        seen.add(reason)
        return {**verdict, "reason": repeated}

    return [told(verdict) for verdict in verdicts]


def _cells(verdict: Mapping[str, Any]) -> tuple[str, Text, str, str]:
    score = "–" if verdict["score"] is None else f"{verdict['score']:.2f}"
    outcome = Text(verdict["outcome"], style=COLOURS[verdict["outcome"]])
    return verdict["task_id"], outcome, score, ", ".join(verdict["failed"]) or "–"


def _reasons(verdict: Mapping[str, Any]) -> list[Text]:
    """One for each failed criterion; where a task is accepted all the same, for each that the judge decided too."""
    accepted = verdict["outcome"] == "accepted"
    results = [each for each in verdict["criteria"] if not each["passed"] or (accepted and each["by_judge"])]
    lines = []
    for each in results:
        line = Text("✓ " if each["passed"] else "✗ ", style="green" if each["passed"] else "red")
        line.append(each["criterion"], style="default")
        line.append(f"  {_line(each['reason'])}", style="default dim")
        lines.append(line)
    # What a filter said, why nothing is decided, and what is about the score alone.
    return lines or [Text(_line(verdict["reason"]), style="dim")] if verdict["reason"] else lines


def _line(text: object) -> str:
    return " ".join(str(text).split())


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
    parts = [quantity(usage["calls"], "call")]
    if usage["calls"]:
        parts.append(f"{quantity(usage['prompt_tokens'], 'token')} sent, {usage['completion_tokens']:,} received")
        if cost is not None:
            parts.append(money(cost))
    if reused:
        parts.append(f"{quantity(reused, 'verdict')} from what is stored")
    return "; ".join(parts)


def money(cost: Mapping[str, Any]) -> str:
    """About so much."""
    amount = cost["amount"]
    if 0 < amount < LEAST:
        return f"less than {LEAST} {cost['currency']}"
    figures = "0" if amount == 0 else f"{amount:,.2f}" if amount >= 1 else f"{amount:.2g}"
    return f"about {figures} {cost['currency']}"


def estimated(estimate: Mapping[str, Any]) -> str:
    """What it would take."""
    if not estimate["calls"]:
        return "no call"
    sent, received = estimate["prompt_tokens"], estimate["completion_tokens"]
    priced = f", {money(estimate['cost'])}" if estimate["cost"] is not None else ""
    told = (
        f"{quantity(estimate['calls'], 'call')}, about {quantity(sent, 'token')} sent, {received:,} received{priced}"
    )
    more = estimate["more_calls_if_close"]
    return f"{told}; up to {quantity(more, 'more call', 'more calls')} where scores are close" if more else told


def foretold(tasks: int, free: int) -> str:
    """Of how many tasks the judge has to be asked."""
    return quantity(tasks, "task") + (f", {free:,} of them without a call" if free else "")


def learned(estimate: Mapping[str, Any]) -> str:
    """How good an estimate is."""
    if estimate["learned_from"]:
        return f"tokens as this judge's last {quantity(estimate['learned_from'], 'call')} took them"
    return "tokens by rule of thumb: this judge has not been asked yet"


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
    line.append(f", {diff['same']:,} stay as they are")
    if diff["undecided"]:
        line.append(f", {diff['undecided']:,} undecided")
    console.print(line)
    others = {
        "a filter or a person decided them, they are held or dead": diff["left_aside"],
        "--limit or a stop came first": diff["not_reached"],
    }
    for why, number in others.items():
        if number:
            console.print(f"{number:,} of {quantity(diff['tasks'], 'task')} not compared: {why}", highlight=False)
    for flip in diff["flips"][:FLIPS_SHOWN]:
        _flip(console, flip)
    if (more := len(diff["flips"]) - FLIPS_SHOWN) > 0:
        console.print(f"\n… and {more:,} more; `--json` lists them all", highlight=False)
    console.print()
    rows = {
        f"to judge all {diff['compared']:,} by the new rubric": diff["again"]["from_nothing"],
        "the same with what is stored now": diff["again"]["with_what_is_stored"],
        "this comparison took": {**diff["usage"], "cost": diff["cost"]},
    }
    _costs(console, rows)
    console.print(f"({learned(diff['again']['from_nothing'])})")


def _costs(console: Console, rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "calls", "sent", "received"):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    priced = any(row["cost"] is not None for row in rows.values())
    if priced:
        table.add_column("cost", no_wrap=True)
    for name, row in rows.items():
        numbers = [f"{row[key]:,}" for key in ("calls", "prompt_tokens", "completion_tokens")]
        table.add_row(name, *numbers, *([money(row["cost"])] if priced else []))
    if Measurement.get(console, console.options.update(max_width=UNBROKEN), table).maximum <= console.width:
        console.print(table)
        return
    for name, row in rows.items():
        priced_at = f", {money(row['cost'])}" if row["cost"] is not None else ""
        sent, received = f"{row['prompt_tokens']:,} sent", f"{row['completion_tokens']:,} received"
        console.print(Text(f"{name}: {quantity(row['calls'], 'call')}, {sent}, {received}{priced_at}"))


def _flip(console: Console, flip: Mapping[str, Any]) -> None:
    line = Text(f"\n{flip['task_id']}  ")
    for place, side in enumerate((flip["old"], flip["new"])):
        line.append(" → " if place else "")
        line.append(side["outcome"], style=COLOURS[side["outcome"]])
        line.append(f" {side['score']:.2f}")
    console.print(line)
    rows = [("" if place else "why", _why(each)) for place, each in enumerate(flip["why"])]
    rows += [("question", flip["query"]), ("answer", flip["answer"])]
    if flip["new"]["reason"]:
        rows.append(("judge", _line(flip["new"]["reason"])))
    if console.width == UNBROKEN:
        for name, text in rows:
            console.print(Text(f"  {name:8} {text}"))
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(f"  {name}" if name else "", Text(text))
    console.print(grid)


def _why(each: Mapping[str, Any]) -> str:
    if not each["criterion"]:
        return str(each["why"])
    gave, gives = ("–" if value is None else f"{value:+.2f}" for value in (each["old"], each["new"]))
    return f"{each['criterion']}: {gave} → {gives} ({each['why']})"


def excerpt(text: str, most: int = EXCERPT) -> str:
    """The beginning of a text, on one line of so many characters at most."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
