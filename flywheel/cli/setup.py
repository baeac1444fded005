"""`flywheel serve` and `init`: setting up."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from flywheel import content
from flywheel.cli.app import ConfigOption, app, load_config
from flywheel.errors import ExportError
from flywheel.quantity import quantity


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Start vLLM's OpenAI server with LoRA and the alias inside it; this process becomes the server."""
    from flywheel.serving.server import serve as start

    start(load_config(config))


@app.command()
def init(directory: Annotated[Path, typer.Argument(metavar="DIR")] = Path()) -> None:
    """Lay out configuration, rubrics, filters and systemd units to edit. Existing files are left alone."""
    written = 0
    try:
        for name in content.FOLDERS:
            for source in sorted((content.folder() / name).iterdir()):
                target = directory / name / source.name
                if source.is_dir() or source.name.startswith("__") or target.exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
                typer.echo(f"wrote {target}")
                written += 1
    except OSError as error:
        raise ExportError(
            f"set up {directory}", error.strerror or str(error), "Choose a directory that you may write."
        ) from error
    config = directory / "configs" / "flywheel.yaml"
    typer.echo(f"{quantity(written, 'file')}. Edit {config}, and have it found by every command:")
    typer.echo(f"export FLYWHEEL_CONFIG={shlex.quote(str(config.absolute()))}")
