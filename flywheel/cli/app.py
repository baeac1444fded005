"""The command `flywheel`: its options that many commands share, and how errors become messages and exit codes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Coroutine
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Concatenate, Final, ParamSpec, TextIO, TypeVar

import typer
from typer.core import TyperGroup

from flywheel import __version__, log
from flywheel.cli import EXIT_INTERRUPTED, heed_interrupts
from flywheel.cli.tables import short_path
from flywheel.errors import EXIT_FAILED, ConfigError, ExportError, FlywheelError
from flywheel.files import expanded, tidied
from flywheel.terminal import escape_terminal

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

    from flywheel.config import Config

P = ParamSpec("P")
T = TypeVar("T")

EXIT_UNREAD: Final = 141
_STDOUT: Final = 1
_STDERR: Final = 2
_WHOLE: Final = 1_000
"""Characters that no sentence of ours has."""
_AS_JSON: Final = "flywheel.json"
"""What is noted of a command line with `--json`."""


class _UnreadError(Exception):
    """The reader of our output went away. No OSError: Typer and rich would make a failure of that."""


class _UnwrittenError(OSError):
    """Our own output could not be written, and no other file."""


class _Stdout(FileIO):
    """Stdout, whose errors are known from those of every other file."""

    @classmethod
    def of(cls, stdout: TextIO | None) -> TextIO | None:
        """`stdout` by way of this; as it is, if it is none, or something that a test put there."""
        if stdout is None or stdout is not sys.__stdout__ or not isinstance(stdout, TextIOWrapper):
            return stdout
        return TextIOWrapper(
            BufferedWriter(cls(_STDOUT, "w", closefd=False)),
            encoding=stdout.encoding,
            # What people read is shown as well as their terminal can; what programs read is not written this way.
            errors="replace",
            line_buffering=stdout.line_buffering,
            write_through=stdout.write_through,
        )

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise _UnreadError from None
        except OSError as error:
            raise _UnwrittenError(error.errno, error.strerror) from error


class Group(TyperGroup):
    """Commands under one name, each told in `--help` with the whole sentence that says what it does."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """As Click does it, which would cut the sentences."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(_WHOLE)) for name, each in commands if each])


class _Commands(Group):
    """All commands; with `--json`, an error that ends one is an object on stdout too."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlywheelError as error:
            if ctx.meta.get(_AS_JSON):
                print_json({"error": str(error)})
            raise


app = typer.Typer(
    name="flywheel",
    cls=_Commands,
    help="A closed loop for AgentScope agents: traces in, judged samples, GRPO rounds, proven adapters out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--config",
        metavar="FILE",
        help="Configuration. Default: $FLYWHEEL_CONFIG, ./flywheel.yaml.",
        readable=False,  # one that may not be read is a wrong configuration, and no wrong usage
    ),
]


def _note_json(context: typer.Context, wanted: bool) -> bool:
    if wanted:
        context.meta[_AS_JSON] = True
    return wanted


JsonOption = Annotated[
    bool, typer.Option("--json", callback=_note_json, help="Print one JSON object and nothing else.")
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flywheel {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.", envvar="FLYWHEEL_LOG")
    ] = "INFO",
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
    return Path("flywheel.yaml") if os.path.exists("flywheel.yaml") else None  # noqa: PTH110 - False if it is denied


def load_config(path: Path | None) -> Config:
    from flywheel.config import defaults, load

    found = find_config(path)
    return defaults() if found is None else load(found)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    import asyncio

    with asyncio.Runner() as runner:
        # An event loop that is interrupted while it is made complains when it is taken away.
        runner.get_loop()
        heed_interrupts()
        return runner.run(work)


def print_json(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2)
    try:
        text.encode(sys.stdout.encoding if sys.stdout is not None else "utf-8")
    except UnicodeEncodeError:
        # Halves of surrogate pairs, or a terminal of another encoding: JSON has a way to write both.
        text = json.dumps(value, indent=2)
    print(text)


def binary_stdout() -> BinaryIO:
    """Where bytes that programs read go. Raises ExportError if there is no such place."""
    if sys.stdout is None:
        raise ExportError("write to stdout", "it is closed", "Name a file, or open it.")
    return sys.stdout.buffer


def absolute(path: Path) -> Path:
    """A path of the command line as it is seen from everywhere. Raises ConfigError."""
    try:
        return tidied(expanded(path).absolute())
    except ValueError as error:
        raise ConfigError("use a path", str(error), "Name another.") from None
    except OSError as error:
        raise ConfigError(
            f"find {path}", f"the current directory is not there: {error.strerror}", "Name the whole path."
        ) from error


def complain(error: FlywheelError | str) -> None:
    tell(f"flywheel: {escape_terminal(str(error))}")


def tell(text: str) -> None:
    """Print on stderr. Where nobody can be told, the exit code still tells."""
    if sys.stderr is None:
        # Print would take stdout instead, which may hold an object or records.
        return
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


MODULES: Final = (
    "run", "ingest", "filter", "rounds", "prune", "status", "dead_letters", "tasks", "show", "rubric", "export",
    "setup", "doctor",
)  # fmt: skip
"""Each adds its commands to `app` when it is imported; the order is that of `--help`."""


def main() -> None:
    """Run the command line; every FlywheelError ends with its message and its exit code."""
    for name in MODULES:
        importlib.import_module(f"flywheel.cli.{name}")
    _forget_no_sizes()
    stdout = sys.stdout = _Stdout.of(sys.stdout)
    try:
        code = _run()
        if stdout is not None:
            stdout.flush()
    except (_UnreadError, BrokenPipeError):
        # The reader of our output went away (`| head`): that is its right.
        _let_go(_STDOUT)
        code = EXIT_UNREAD
    except _UnwrittenError as error:
        _let_go(_STDOUT)
        complain(ExportError("write to stdout", error.strerror or str(error), "Make room where it goes."))
        code = EXIT_FAILED
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        _let_go(_STDERR)
    sys.exit(code)


def _forget_no_sizes() -> None:
    """Where these are no size, a terminal is as large as it says itself; by their word, it would have no column."""
    for name in ("COLUMNS", "LINES"):
        size = os.environ.get(name, "")
        if not (size.isascii() and size.isdigit() and int(size)):
            os.environ.pop(name, None)


def _run() -> int:
    try:
        app()
    except FlywheelError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _let_go(descriptor: int) -> None:
    """What is still to be written would fail once more when the program ends, and change its exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flywheel.config import Config


def missing_state(config: Config) -> str:
    """That there is no state where it is looked for, and what that can mean; empty where there is one."""
    path = config.state_dir / "state.db"
    try:
        # One without a byte is what an interrupted copy leaves, or a disk that was full at the first step.
        if path.stat().st_size:
            return ""
    except FileNotFoundError:
        pass
    except OSError:
        return ""  # who looks is told why that may not be known
    return (
        f"there is no state at {short_path(path)}: nothing was read yet, or it is kept elsewhere "
        "(by another configuration, user or $FLYWHEEL_HOME)"
    )


async def read_state_or_warn(
    config: Config, look: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What a question to the state answers; on stderr, if there is none. Raises StoreError."""
    if missing := missing_state(config):
        typer.echo(f"flywheel: {missing}", err=True)
    return await read_state(config, look, *args, **kwargs)


async def read_state(
    config: Config, look: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """The same, by a command that says itself when there is no state."""
    # Not above: commands that only read their configuration must not wait for a database library.
    from flywheel.store.database import Store

    store = await Store.view(config.state_dir)
    try:
        return await store.read(look, *args, **kwargs)
    finally:
        await store.close()
