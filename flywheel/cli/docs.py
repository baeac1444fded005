"""`flywheel docs`: the pages of the documentation."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markdown import Markdown

from flywheel.cli.app import app
from flywheel.system.files import documentation_pages, shipped_folder

DATA: Final[Mapping[str, str]] = {
    "json-output.json": "JSON Schemas of what `--json` prints",
    "foreign-keys.tsv": "What becomes of each key of AgentJet, ASTuner and Trinity-RFT, and of their command lines",
    "sage-options.tsv": "SAGE's options, with both defaults and why they differ",
}
"""Files of the reference that are no pages of prose."""


@app.command()
def docs(
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="Name of a page. Default: list all pages.")
    ] = None,
) -> None:
    """Show a page of the documentation."""
    reference = shipped_folder() / "docs" / "reference"
    data = {Path(name).stem: about for name, about in DATA.items()}
    pages = documentation_pages() | {Path(name).stem: reference / name for name in DATA}
    if page is None:
        width = max(map(len, pages)) + 2
        for name, path in pages.items():
            title = data.get(name) or path.read_text().partition("\n")[0].lstrip("# ")
            typer.echo(f"{name:<{width}}{title}")
        return
    if page not in pages:
        raise typer.BadParameter(f"{page!r} is none of {', '.join(pages)}", param_hint="PAGE")
    text = pages[page].read_text()
    if page in data or sys.stdout is None or not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    console = Console()
    # Not every pager shows colours.
    with console.pager(styles=False):
        console.print(Markdown(re.sub(r"(?m)^!\[.*\]\(.*\)\n", "", text), hyperlinks=False))
