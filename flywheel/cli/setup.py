"""`flywheel serve`, `init` and `docs`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flywheel import files
from flywheel.cli.app import ConfigOption, app, load_config
from flywheel.errors import ExportError
from flywheel.terminal import quantity

if TYPE_CHECKING:
    from collections.abc import Iterator


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Start vLLM's OpenAI server with LoRA and the alias; this process becomes the server.

    It prints its address when it is ready.
    """
    from flywheel.serving.inference_server import serve as start

    start(load_config(config))


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR")] = Path(),
    systemd: Annotated[bool, typer.Option("--systemd", help="Also write systemd units.")] = False,
) -> None:
    """Write flywheel.yaml, rubrics and filters to edit. Existing files are not changed."""
    written = 0
    try:
        for target, text in _files_to_write(systemd=systemd):
            file = directory / target
            if file.exists():
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            typer.echo(f"wrote {file}")
            written += 1
    except OSError as error:
        raise ExportError(
            f"set up {directory}", error.strerror or str(error), "Choose a directory that you can write to."
        ) from error
    config = directory / "flywheel.yaml"
    typer.echo(f"{quantity(written, 'file')}. Edit {config}, then run `flywheel doctor`.")
    if config.resolve() != Path("flywheel.yaml").resolve():
        typer.echo("To let every command find it:")
        typer.echo(f"export FLYWHEEL_CONFIG={shlex.quote(str(config.absolute()))}")


def _files_to_write(*, systemd: bool) -> Iterator[tuple[Path, str]]:
    """The path below the directory and the text of each file."""
    shipped = files.shipped_folder()
    # The shipped configuration is one folder deeper; its paths are relative to its own folder.
    yield Path("flywheel.yaml"), (shipped / "configs" / "flywheel.yaml").read_text().replace("../", "")
    yield Path("flywheel.schema.json"), (shipped / "configs" / "flywheel.schema.json").read_text()
    for name in ("filters", "rubrics", *(("systemd",) if systemd else ())):
        for source in sorted((shipped / name).iterdir()):
            if source.is_file() and not source.name.startswith("__"):
                yield Path(name, source.name), source.read_text()


@app.command()
def docs(
    page: Annotated[str | None, typer.Argument(metavar="PAGE", help="A page's name; without it, list them.")] = None,
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
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text))
