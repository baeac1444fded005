"""`flywheel serve` and `docs`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from flywheel.cli.app import ConfigOption, app, complain, load_config, read_state, run_async
from flywheel.errors import StoreError
from flywheel.system import files


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Start vLLM's OpenAI server with LoRA and the alias; this process becomes the server.

    It prints its address when it is ready.
    """
    from flywheel.serving.client.adapter_swap import version_name
    from flywheel.serving.server.inference_server import serve as start
    from flywheel.store import deployments

    settings = load_config(config)
    try:
        rows = run_async(read_state(settings, deployments.all_active, warn=False))
    except StoreError as error:  # the server's own file is enough where it names the deployed version
        complain(error)
        rows = []
    start(settings, {row.alias: version_name(row.alias, row.adapter) for row in rows if row.adapter})


@app.command()
def docs(
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="Name of a page. Default: list all pages.")
    ] = None,
) -> None:
    """Show a page of the documentation."""
    pages = files.documentation_pages()
    if page is None:
        width = max(map(len, pages)) + 2
        for name, path in pages.items():
            title = path.read_text().partition("\n")[0].lstrip("# ")
            typer.echo(f"{name:<{width}}{title}")
        return
    if page not in pages:
        raise typer.BadParameter(f"{page!r} is none of {', '.join(pages)}", param_hint="PAGE")
    text = pages[page].read_text()
    if not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    _page(re.sub(r"(?m)^!\[.*\]\(.*\)\n", "", text))


def _page(markdown: str) -> None:
    """Show a text in the user's pager, in colour where the pager is `less`, which is told to pass colours on."""
    from rich.console import Console
    from rich.markdown import Markdown

    pager = os.environ.get("MANPAGER") or os.environ.get("PAGER") or "less"
    in_colour = Path(pager.split()[0]).name == "less" and shutil.which(pager.split()[0]) is not None
    if in_colour:
        os.environ["LESS"] = f"{os.environ.get('LESS', '')} -R".strip()
    console = Console()
    with console.pager(styles=in_colour):
        console.print(Markdown(markdown, hyperlinks=False))
