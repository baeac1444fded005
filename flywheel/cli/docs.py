"""`flywheel docs`: the pages of the documentation."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markdown import Markdown

from flywheel.cli.app import app
from flywheel.system.files import documentation_pages, shipped_folder

SCHEMAS: Final = "json-output"
"""The schemas of what `--json` prints, which are no page of prose."""


@app.command()
def docs(
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="Name of a page. Default: list all pages.")
    ] = None,
) -> None:
    """Show a page of the documentation."""
    pages = documentation_pages() | {SCHEMAS: shipped_folder() / "docs" / "reference" / f"{SCHEMAS}.json"}
    if page is None:
        width = max(map(len, pages)) + 2
        for name, path in pages.items():
            about = "JSON Schemas of what `--json` prints"
            title = about if name == SCHEMAS else path.read_text().partition("\n")[0].lstrip("# ")
            typer.echo(f"{name:<{width}}{title}")
        return
    if page not in pages:
        raise typer.BadParameter(f"{page!r} is none of {', '.join(pages)}", param_hint="PAGE")
    text = pages[page].read_text()
    if page == SCHEMAS or sys.stdout is None or not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    console = Console()
    # Not every pager shows colours.
    with console.pager(styles=False):
        console.print(Markdown(re.sub(r"(?m)^!\[.*\]\(.*\)\n", "", text), hyperlinks=False))
