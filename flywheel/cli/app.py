"""The command `flywheel`: its options that many commands share, and how errors become messages and exit codes."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from flywheel import __version__, log
from flywheel.disarmed import disarmed
from flywheel.errors import FlywheelError

if TYPE_CHECKING:
    from flywheel.config import Config

T = TypeVar("T")

app = typer.Typer(
    name="flywheel",
    help="A closed loop for AgentScope agents: traces in, judged samples, GRPO rounds, proven adapters out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("-c", "--config", metavar="FILE", help="Configuration. Default: $FLYWHEEL_CONFIG, ./flywheel.yaml."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flywheel {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.", envvar="FLYWHEEL_LOG")] = "INFO",
) -> None:
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    if log_level.upper() not in levels:
        raise typer.BadParameter(f"{log_level!r} is none of {', '.join(levels)}", param_hint="--log-level")
    log.setup(log_level.upper())


def find_config(path: Path | None) -> Path | None:
    """The configuration file that applies: the given one, `$FLYWHEEL_CONFIG`, `flywheel.yaml` here, or none."""
    if path is not None:
        return path
    if named := os.environ.get("FLYWHEEL_CONFIG"):
        return Path(named)
    here = Path("flywheel.yaml")
    return here if here.exists() else None


def load_config(path: Path | None) -> Config:
    from flywheel.config import Config, load

    found = find_config(path)
    return Config() if found is None else load(found)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))


def complain(error: FlywheelError | str) -> None:
    print(f"flywheel: {disarmed(str(error))}", file=sys.stderr)


def main() -> None:
    """Run the command line; every FlywheelError ends with its message and its exit code."""
    # Each module adds its commands to `app` when it is imported; the order is that of `--help`.
    for name in ("run", "ingest", "filter", "rounds", "look", "letters", "tasks", "rubric", "export", "setup"):
        importlib.import_module(f"flywheel.cli.{name}")
    try:
        app()
    except FlywheelError as error:
        complain(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): that is its right.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
