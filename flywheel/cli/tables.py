"""Facts in two columns, names and what they are: folded to a terminal's width, unbroken where nobody looks.

Nothing is ever shortened here: a path that is too long for its line goes on in the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from flywheel.terminal import quantity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNBROKEN: Final = 1_000_000
"""Columns that no line of ours fills."""
Fact = tuple[str, str]
"""A name and its text, of one line or more."""


def short_path(path: Path | str) -> str:
    """A path as people write it: `~` for the home directory."""
    path = Path(path)
    try:
        home = Path.home()
    except RuntimeError:
        return str(path)
    # A home that is empty or the root would be that of every path.
    is_below = home not in (home.parent, path) and path.is_relative_to(home)
    return str(Path("~", *path.relative_to(home).parts)) if is_below else str(path)


def counted(counts: Mapping[str, int]) -> str:
    """Every count that is not zero, the largest first."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number:,} {name}" for name, number in ranked if number)


def criterion_lines(comparison: Mapping[str, Any]) -> list[str]:
    """How candidate and deployed fared in each criterion. Rounds of an earlier Flywheel did not look."""
    return [
        f"  {each['criterion']}: {each['deployed_mean']:.3f} → {each['candidate_mean']:.3f} on"
        f" {quantity(each['tasks'], 'task')}, gain {each['gain']:+.3f} ({each['lower']:+.3f} … {each['upper']:+.3f})"
        for each in comparison.get("criteria", [])
    ]


def condition(source: Mapping[str, Any]) -> str:
    """That of a source, as it was last read."""
    told = source["condition"] or "not read yet"
    return told if source.get("configured", True) else f"{told}, not in the configuration"


def source_text(source: Mapping[str, Any]) -> str:
    """What `status` or `ingest` knows of a source: its path, condition, what came of it, how it is read."""
    new = f" ({source['new']:,} new)" if "new" in source else ""
    skipped = sum(source["skipped"].values())
    ends = [f"{quantity(source['tasks'], 'task')}{new}", f"{skipped:,} skipped", f"{source['dead']:,} dead"]
    lines = [
        short_path(source["path"]),
        f"{condition(source)}, {source['schema'] or source.get('type') or 'schema not known'}",
        f"{quantity(source['replies'], 'reply', 'replies')} = {' + '.join(ends)}",
    ]
    if skipped:
        lines.append(f"skipped: {counted(source['skipped'])}")
    lines.append(f"{quantity(source['open_traces'], 'open trace')}, longest read {source['longest_read_ms']:,.1f} ms")
    lines += [text for key in ("error", "warning") if (text := source.get(key))]
    return "\n".join(lines)


def replica_text(replica: Mapping[str, Any]) -> str:
    """What `status` knows of an inference server: what it serves, since when it is so, what is wrong."""
    if not replica["condition"]:
        return f"{replica['url']}\nnot looked at yet: the daemon does"
    moments = [f"{name} {moment(replica[key])} UTC" for name, key in _MOMENTS if replica[key]]
    lines = [replica["url"], ", ".join((_served(replica), *moments)), replica["error"]]
    return "\n".join(filter(None, lines))


_MOMENTS: Final = (("since", "since"), ("looked at", "looked_at"))


def replica_line(replica: Mapping[str, Any]) -> str:
    """The same in one line."""
    return f"{replica['url']}: {_served(replica) if replica['condition'] else 'not looked at yet'}"


def _served(replica: Mapping[str, Any]) -> str:
    return f"{replica['condition']}, answers with {replica['serves']}" if replica["serves"] else replica["condition"]


def moment(text: str) -> str:
    """A stored time as people read it, to the second; UTC."""
    return text[:19].replace("T", " ")


def grid(facts: Iterable[Fact]) -> Table:
    """For a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(Text(name, style="bold"), Text(text, overflow="fold"))
    return table


def plain(facts: Sequence[Fact]) -> str:
    """For a file or a pipe: lines that can be searched."""
    width = max((len(name) for name, _ in facts), default=0)
    lines = []
    for name, text in facts:
        first, *rest = text.split("\n")
        lines += [f"{name:<{width}}  {first}", *(f"{'':<{width}}  {line}" for line in rest)]
    return "\n".join(lines)


def stdout() -> Console:
    """Where tables and long lines go: as wide as the terminal; in a file or a pipe nothing is broken.

    `$COLUMNS` counts wherever it is a number.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNBROKEN
    return console


def show(facts: Sequence[Fact]) -> None:
    """Print them on stdout, in the form that is right for it."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(grid(facts))
    else:
        typer.echo(plain(facts))
