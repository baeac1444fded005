"""The command `flywheel`: shared options, access to the state, and errors as messages and exit codes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal, TypeVar

import typer
from typer.core import TyperGroup

from flywheel import __version__, log
from flywheel.cli import EXIT_INTERRUPTED, heed_interrupts
from flywheel.cli.tables import short_path
from flywheel.errors import EXIT_FAILED, ConfigError, ExportError, FlywheelError, StoreError
from flywheel.files import expanded, tidied
from flywheel.terminal import escape_terminal

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer
    from sqlalchemy import Connection

    from flywheel.config import Config
    from flywheel.store.database import Store

T = TypeVar("T")

EXIT_UNREAD: Final = 141
_STDOUT: Final = 1
_STDERR: Final = 2
_UNCUT: Final = 1_000
"""More characters than the first sentence of any help text has."""


class _UnreadError(Exception):
    """The reader of stdout closed the pipe. Not an OSError, which Typer and rich would report as a failure."""


class _UnwrittenError(OSError):
    """Stdout could not be written, as opposed to any other file."""


class _Stdout(FileIO):
    """Stdout with errors of its own class, to tell them from the errors of other files."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise _UnreadError from None
        except OSError as error:
            raise _UnwrittenError(error.errno, error.strerror) from error


class Group(TyperGroup):
    """Commands under one name. `--help` prints the first sentence of each in full."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Like Click, which cuts the sentences."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(_UNCUT)) for name, each in commands if each])


app = typer.Typer(
    name="flywheel",
    cls=Group,
    help="A closed loop for AgentScope agents: traces, judged samples, GRPO rounds, tested adapters.",
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
        readable=False,  # an unreadable file is a wrong configuration, not wrong usage
    ),
]


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flywheel {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print version.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.", envvar="FLYWHEEL_LOG")
    ] = "INFO",
) -> None:
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    if log_level.upper() not in levels:
        raise typer.BadParameter(f"{log_level!r} is none of {', '.join(levels)}", param_hint="--log-level")
    log.setup(log_level.upper())


def find_config(path: Path | None) -> Path | None:
    """The configuration file: the given one, `$FLYWHEEL_CONFIG`, `./flywheel.yaml`, or None for the defaults."""
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
        # An event loop that is interrupted while it is created warns when it is collected.
        runner.get_loop()
        heed_interrupts()
        return runner.run(work)


def print_json(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2)
    try:
        text.encode(sys.stdout.encoding if sys.stdout is not None else "utf-8")
    except UnicodeEncodeError:
        # Lone surrogates, or another encoding: escaped, JSON can be written anywhere.
        text = json.dumps(value, indent=2)
    print(text)


def binary_stdout() -> BinaryIO:
    """Stdout for bytes. Raises ExportError if it is closed."""
    if sys.stdout is None:
        raise ExportError("write to stdout", "it is closed", "Name a file, or open stdout.")
    return sys.stdout.buffer


def absolute(path: Path) -> Path:
    """The absolute form of a path on the command line. Raises ConfigError."""
    try:
        return tidied(expanded(path).absolute())
    except ValueError as error:
        raise ConfigError("use a path", str(error), "Name another.") from None
    except OSError as error:
        raise ConfigError(
            f"find {path}", f"the current directory is not there: {error.strerror}", "Name the whole path."
        ) from error


def missing_state(config: Config) -> str:
    """That there is no state where the configuration says, and what that can mean; empty if there is one."""
    path = config.state_dir / "state.db"
    try:
        # An interrupted copy, or a full disk at the first start, leaves an empty file.
        if path.stat().st_size:
            return ""
    except FileNotFoundError:
        pass
    except OSError:
        return ""  # opening it will report why
    return (
        f"there is no state at {short_path(path)}: nothing was read yet, or it is kept elsewhere "
        "(by another configuration, user or $FLYWHEEL_HOME)"
    )


def require_state(config: Config, attempted: str) -> None:
    """Raises StoreError if there is no state: a command would create one in the wrong place."""
    if missing := missing_state(config):
        hint = "Name the configuration with -c, or set state.dir or $FLYWHEEL_HOME to where the daemon has it."
        raise StoreError(attempted, missing, hint)


async def read_state(config: Config, question: Callable[[Connection], T], *, warn: bool = True) -> T:
    """Read the state beside a running daemon. With `warn`, stderr says if there is none. Raises StoreError."""
    # Commands that only read their configuration do not wait for the import of the database library.
    from flywheel.store.database import read_once

    if warn and (missing := missing_state(config)):
        print_error(f"flywheel: {missing}")
    return await read_once(config.state_dir, question)


@contextlib.asynccontextmanager
async def open_state(
    config: Config, how: Literal["open", "view", "copy"] = "open", *, lock: bool = False
) -> AsyncIterator[Store]:
    """The state, a read-only view of it, or a copy, with the instance lock or beside a daemon. Raises StoreError."""
    from flywheel.daemon.lock import instance_lock
    from flywheel.store.database import Store

    with instance_lock(config.state_dir) if lock else contextlib.nullcontext():
        store: Store = await getattr(Store, how)(config.state_dir)
        try:
            yield store
        finally:
            await store.close()


async def change_state(config: Config, change: Callable[[Connection], T], *, lock: bool) -> T:
    """Change the state in one transaction. Raises StoreError."""
    async with open_state(config, lock=lock) as store:
        return await store.write(change)


def complain(error: FlywheelError | str) -> None:
    print_error(f"flywheel: {escape_terminal(str(error))}")


def print_error(text: str) -> None:
    """Print on stderr. If it is closed, the exit code alone reports an error."""
    if sys.stderr is None:
        # print() would use stdout, which may hold JSON or records.
        return
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


MODULES: Final = (
    "run", "ingest", "filter", "rounds", "rollouts", "prune", "status", "audit", "why", "dead_letters", "tasks",
    "show", "rubric", "export", "setup", "doctor",
)  # fmt: skip
"""Each adds its commands to `app` when it is imported, in the order of `--help`."""


def main() -> None:
    """Run the command line. A FlywheelError becomes its message and its exit code."""
    for name in MODULES:
        importlib.import_module(f"flywheel.cli.{name}")
    for name in ("COLUMNS", "LINES"):
        size = os.environ.get(name, "")
        # rich takes these for the size of the terminal even if they are not numbers above 0.
        if not (size.isascii() and size.isdigit() and int(size)):
            os.environ.pop(name, None)
    stdout = sys.stdout
    # Others, such as a test's stream, stay as they are.
    if stdout is sys.__stdout__ and isinstance(stdout, TextIOWrapper):
        stdout = sys.stdout = TextIOWrapper(
            BufferedWriter(_Stdout(_STDOUT, "w", closefd=False)),
            encoding=stdout.encoding,
            # People see what their terminal can show. Programs read JSON, which escapes what cannot be encoded.
            errors="replace",
            line_buffering=stdout.line_buffering,
            write_through=stdout.write_through,
        )
    try:
        code = _run()
        if stdout is not None:
            stdout.flush()
    except (_UnreadError, BrokenPipeError):
        # The reader closed the pipe (`| head`).
        _discard(_STDOUT)
        code = EXIT_UNREAD
    except _UnwrittenError as error:
        _discard(_STDOUT)
        complain(ExportError("write to stdout", error.strerror or str(error), "Free space on its device."))
        code = EXIT_FAILED
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        _discard(_STDERR)
    sys.exit(code)


def _run() -> int:
    try:
        app()
    except FlywheelError as error:
        if "--json" in sys.argv:
            print_json({"error": str(error)})
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _discard(descriptor: int) -> None:
    """Write what is still buffered to /dev/null: at exit it would fail again and change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
