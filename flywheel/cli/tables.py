"""Output for people: facts in columns, tables that fit the terminal, and short forms of values.

Nothing is cut except excerpts: text that is too long for its column continues on the next line. In a file or a pipe
lines are never broken.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flywheel.system.terminal import quantity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    Cell = str | Text

UNBROKEN: Final = 1_000_000
"""The width, in columns, of a console that is no terminal."""
SMALLEST_AMOUNT: Final = 0.0001
"""Smaller amounts of money are not shown exactly."""
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


def counted(counts: Mapping[str, int]) -> str:
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
    """The result of the gate for each criterion. Rounds of early versions have none."""
    return [
        f"  {each['criterion']}: {each['deployed_mean']:.3f} → {each['candidate_mean']:.3f} on"
        f" {quantity(each['tasks'], 'task')}, gain {each['gain']:+.3f} ({each['lower']:+.3f} … {each['upper']:+.3f})"
        for each in comparison.get("criteria", [])
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
        console.print(rows_table(columns, rows, fold=fold, expand=console.width < UNBROKEN))
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
