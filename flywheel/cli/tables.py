"""Output for people: facts in columns, tables that fit the terminal, and short forms of values.

Nothing is cut except excerpts: text that is too long for its column continues on the next line. In a file or a pipe
lines are never broken.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flywheel.system.terminal import escape_terminal, excerpt, quantity, score_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from flywheel.daemon.forecast import Forecast

    Cell = str | Text

UNBROKEN: Final = 1_000_000
"""The width, in columns, of a console that is no terminal."""
SMALLEST_AMOUNT: Final = 0.0001
"""Smaller amounts of money are not shown exactly."""
COLOURS: Final = {
    "accepted": "green",
    "rejected": "red",
    "undecided": "yellow",
    "dead": "magenta",
    "held": "blue",
}
WIDE_VERDICTS: Final = 110
"""Terminals of this width have room for the reasons beside the verdict."""
FLIPS_SHOWN: Final = 10
REASONS_SHOWN: Final = 5
NO_VERDICT: Final = ("undecided", "dead")
Fact = tuple[str, ...]
"""Names, and as the last item a text of one line or more."""


class Row(NamedTuple):
    """A row of a table. `details` are its last column, or lines below the row where that column has no room."""

    cells: Sequence[Cell]
    details: Sequence[Cell] = ()


def short_path(path: Path | str) -> str:
    """A path with `~` for the home directory."""
    path = Path(path)
    try:
        home = Path.home()
    except RuntimeError:
        return str(path)
    # A home directory that is empty or the root would shorten every path.
    is_below = home not in (home.parent, path) and path.is_relative_to(home)
    return str(Path("~", *path.relative_to(home).parts)) if is_below else str(path)


def counted(counts: Mapping[Any, int]) -> str:
    """Every count that is not zero, the largest first."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number:,} {name}" for name, number in ranked if number)


def money(cost: Mapping[str, Any]) -> str:
    """`about 0.12 USD`, with as many digits as an estimate is worth."""
    amount = cost["amount"]
    if 0 < amount < SMALLEST_AMOUNT:
        return f"less than {SMALLEST_AMOUNT} {cost['currency']}"
    figures = "0" if amount == 0 else f"{amount:,.2f}" if amount >= 1 else f"{amount:.2g}"
    return f"about {figures} {cost['currency']}"


def source_text(source: Mapping[str, Any]) -> str:
    """A source of `status` or `ingest`: path, condition, how its replies add up, and how it is read."""
    new = f" ({source['new']:,} new)" if "new" in source else ""
    skipped = sum(source["skipped"].values())
    ends = f"{quantity(source['tasks'], 'task')}{new} + {skipped:,} skipped + {source['dead']:,} dead"
    ends += f" + {source['erased']:,} erased" if source["erased"] else ""
    ends += f" + {source['pending']:,} pending" if source["pending"] else ""
    lines = [
        short_path(source["path"]),
        f"{source_condition(source)}, {source['schema'] or source.get('type') or 'schema not known yet'}",
        f"{quantity(source['replies'], 'reply', 'replies')} = {ends}",
        f"skipped: {counted(source['skipped'])}" if skipped else "",
        f"{quantity(source['open_traces'], 'open trace')}, longest read {source['longest_read_ms']:,.1f} ms",
        source.get("error"),
        source.get("warning"),
    ]
    return "\n".join(filter(None, lines))


def source_condition(source: Mapping[str, Any]) -> str:
    """Its condition when it was last read."""
    condition = source["condition"] or "not read yet"
    return condition if source.get("configured", True) else f"{condition}, not in the configuration"


def criterion_lines(comparison: Mapping[str, Any]) -> list[str]:
    """The result of the gate for each criterion, suite and tripwire."""
    from flywheel.training.gate.gate import TRIPWIRES

    suites = ({**each, "criterion": f"suite {each['name']}"} for each in comparison["suites"])
    wires = (
        {**each, "criterion": f"tripwire {TRIPWIRES[each['criterion']].label}"} for each in comparison["tripwires"]
    )
    return [
        f"  {each['criterion']}: {each['deployed_mean']:.3f} → {each['candidate_mean']:.3f} on"
        f" {quantity(each['tasks'], 'task')}, gain {each['gain']:+.3f} ({each['lower']:+.3f} … {each['upper']:+.3f})"
        for each in (*comparison["criteria"], *suites, *wires)
    ]


def stdout() -> Console:
    """Standard output, as wide as the terminal or `$COLUMNS`; without both, lines are never broken."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNBROKEN
    return console


def print_facts(facts: Sequence[Fact], styles: Mapping[str, str] | None = None) -> None:
    """Print facts in columns. `styles` are those of certain names; others are bold."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(facts_grid(facts, styles))
    else:
        print(facts_text(facts))


def facts_grid(facts: Iterable[Fact], styles: Mapping[str, str] | None = None) -> Table:
    """The facts for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for *names, text in facts:
        if not table.columns:
            for _ in names:
                table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
        cells = [Text(name, style=(styles or {}).get(name, "bold")) for name in names]
        table.add_row(*cells, Text(text, overflow="fold"))
    return table


def facts_text(facts: Sequence[Fact]) -> str:
    """The facts for a file or a pipe, where every line can be searched."""
    if not facts:
        return ""
    widths = [max(map(len, names)) for names in list(zip(*facts, strict=True))[:-1]]
    lines = []
    for *names, text in facts:
        first, *rest = text.split("\n")
        head = "".join(f"{name:<{width}}  " for name, width in zip(names, widths, strict=True))
        lines += [f"{head}{first}", *(f"{'':<{len(head)}}{line}" for line in rest)]
    return "\n".join(lines)


def print_rows(
    console: Console, columns: Sequence[str], rows: Sequence[Row], *, wide: int, fold: Collection[str]
) -> None:
    """Print a table if the console has `wide` columns or more, otherwise each row with its details below.

    `columns` names the cells and the details. Cells of the columns in `fold` may continue on the next line.
    """
    if wide <= console.width:
        table = rows_table(columns, rows, fold=fold)
        # Columns share the width by their ratio only where their texts do not all fit.
        unbroken = console.options.update(max_width=UNBROKEN)
        table.expand = console.width < console.measure(table, options=unbroken).maximum
        console.print(table)
    else:
        _print_lines(console, columns, rows)


def rows_table(columns: Sequence[str], rows: Iterable[Row], *, fold: Collection[str], expand: bool = False) -> Table:
    """The rows as a table. With `expand` it is as wide as the console."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=expand)
    for name in columns:
        justify: Any = "right" if name == "score" else "left"
        ratio = None if name not in fold else 4 if name == columns[-1] else 1
        table.add_column(name, no_wrap=name not in fold, overflow="fold", justify=justify, ratio=ratio)
    for row in rows:
        details = [Group(*(Text.assemble(each) for each in row.details))] if row.details else []
        table.add_row(*(Text.assemble(cell) for cell in row.cells), *details)
    return table


def _print_lines(console: Console, columns: Sequence[str], rows: Sequence[Row]) -> None:
    from rich.cells import cell_len
    from rich.padding import Padding
    from rich.text import Text

    cells = [[Text.assemble(cell) for cell in row.cells] for row in rows]
    names = [Text(name, style="dim") for name in columns[: len(cells[0]) if cells else 0]]
    widths = [max(cell_len(each.plain) for each in column) for column in zip(names, *cells, strict=True)]
    if sum(widths) + 2 * len(widths) <= console.width:
        # Aligned below a header, if that has room.
        for line in (names, *cells):
            for cell, width in zip(line[:-1], widths, strict=False):
                cell.pad_right(width - cell_len(cell.plain))
        console.print(Text("  ").join(names))
    for line, row in zip(cells, rows, strict=True):
        console.print(Text("  ").join(line))
        for detail in row.details:
            console.print(Padding(Text.assemble(detail), (0, 0, 0, 2), expand=False))


def verdict_table(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Print the key, verdict, score, failed criteria and reasons of each task."""
    from rich.text import Text

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
    wide = WIDE_VERDICTS if console.width < UNBROKEN else UNBROKEN + 1
    print_rows(console, columns, rows, wide=wide, fold=("failed", "reason"))


def reasons_without_verdict(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Print why tasks got no verdict, the most frequent reasons first."""
    from rich.text import Text

    reasons = Counter((each["outcome"], each["reason"]) for each in verdicts if each["outcome"] in NO_VERDICT)
    for (outcome, reason), number in reasons.most_common(REASONS_SHOWN):
        console.print(Text.assemble(f"{number:,} ", (outcome, COLOURS[outcome]), f": {escape_terminal(reason)}"))


def _reasons(verdict: Mapping[str, Any]) -> list[Text]:
    """The reason of each failed criterion; for an accepted task those of all criteria that the judge decided."""
    from rich.text import Text

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
    from rich.text import Text

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


def forecast_text(found: Forecast) -> str:
    """The forecast in one or more sentences: each reason counts all training tasks that it applies to, the last
    number those with at least one of the reasons."""
    text = (
        f"{quantity(found.tasks, 'task')}: {found.held_out:,} held out; of {found.for_training:,} for training"
        f" {found.usable:,} usable."
    )
    if not found.reasons:
        return text
    reasons = "; ".join(
        f"{each.reason}{f' (`{each.setting}`)' if each.setting else ''}: {each.tasks:,}" for each in found.reasons
    )
    text += f" {reasons[0].upper()}{reasons[1:]}."
    return f"{text} {_TOGETHER[len(found.reasons)]} together: {found.left_out:,}." if found.reasons[1:] else text


_TOGETHER: Final = ("", "", "Both", *(f"All {number}" for number in ("three", "four", "five", "six", "seven")))


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
    console.print(f"{diff['old']['name']} → {diff['new']['name']}", style="bold")
    width = max((len(change["criterion"]) for change in diff["changes"]), default=0)
    for change in diff["changes"]:
        console.print(f"  {change['criterion']:{width}}  {change['what']}" if width else f"  {change['what']}")
    if not diff["changes"]:
        console.print("  nothing that changes a verdict")
    flips = Counter(flip["new"]["outcome"] for flip in diff["flips"])
    line = f"\n{diff['compared']:,} compared: {len(diff['flips']):,} flip"
    if diff["flips"]:
        line += f" ({flips['accepted']:,} to accepted, {flips['rejected']:,} to rejected)"
    line += f", {diff['same']:,} unchanged"
    if diff["undecided"]:
        line += f", {diff['undecided']:,} undecided"
    console.print(line, style="bold")
    if diff["accepted"]["tasks"]:
        console.print(accepted_shares(diff))
    others = {
        "decided by a filter or a person, held, or a dead letter": diff["left_aside"],
        "--limit or a stop came first": diff["not_reached"],
    }
    for why, number in others.items():
        if number:
            console.print(f"{number:,} of {quantity(diff['tasks'], 'task')} not compared: {why}")
    for flip in diff["flips"][:FLIPS_SHOWN]:
        _print_flip(console, flip)
    if (more := len(diff["flips"]) - FLIPS_SHOWN) > 0:
        console.print(f"\n… and {more:,} more; `--json` lists them all")
    without_cache, with_cache = (diff["judge_all"][name] for name in ("without_cache", "with_cache"))
    console.print(f"\njudge all {diff['compared']:,} with the new rubric: {_calls_and_tokens(without_cache)}")
    console.print(f"the same with what is stored now: {_calls_and_tokens(with_cache)}")
    console.print(f"this comparison took: {_calls_and_tokens({**diff['usage'], 'cost': diff['cost']})}")
    console.print(f"({estimate_basis(without_cache)})")


def accepted_shares(diff: Mapping[str, Any]) -> str:
    """The accepted shares of both sides, and the interval of their difference."""
    shares = diff["accepted"]
    return (
        f"accepted {shares['old']:.3f} → {shares['new']:.3f} of {quantity(shares['tasks'], 'task')} that both decided"
        f" (difference from {shares['lower']:+.3f} to {shares['upper']:+.3f} at 95 %)"
    )


def _print_flip(console: Console, flip: Mapping[str, Any]) -> None:
    from rich.text import Text

    before, after = (
        Text.assemble((verdict["outcome"], COLOURS[verdict["outcome"]]), f" {verdict['score']:.2f}")
        for verdict in (flip["old"], flip["new"])
    )
    console.print(Text.assemble(f"\n{flip['task_id']}  ", before, " → ", after))
    facts = [("  " if number else "  why", _change(part)) for number, part in enumerate(flip["why"])]
    facts += [("  question", flip["query"]), ("  answer", flip["answer"])]
    if flip["new"]["reason"]:
        facts.append(("  judge", excerpt(flip["new"]["reason"])))
    console.print(facts_text(facts) if console.width == UNBROKEN else facts_grid(facts))


def _change(each: Mapping[str, Any]) -> str:
    """What a criterion contributed to the score before and now; without a criterion, the change of the threshold."""
    if not each["criterion"]:
        return str(each["why"])
    old, new = ("–" if value is None else f"{value:+.2f}" for value in (each["old"], each["new"]))
    return f"{each['criterion']}: {old} → {new} ({each['why']})"
