"""The command `flywheel`: shared options, access to the state, and errors as messages and exit codes.

`flywheel --help` imports this module and none of a command: what is heavy is imported by the functions that need it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from flywheel import __version__
from flywheel.cli.entry_point import heed_interrupts
from flywheel.errors import ConfigError, ExportError, FlywheelError, StoreError
from flywheel.system import log
from flywheel.system.files import documentation_pages, expanded, tidied
from flywheel.system.terminal import escape_terminal

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from sqlalchemy import Connection

    from flywheel.config.file import Config
    from flywheel.store.kernel.database import Store
    from flywheel.store.requests import RequestKind

T = TypeVar("T")

EXIT_UNREAD: Final = 141
_STDOUT: Final = 1
_STDERR: Final = 2
GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Daily": {
        "init": "init", "demo": "demo.command", "doctor": "doctor", "run": "run", "status": "status",
        "web": "servers", "filter": "filter", "show": "show", "docs": "docs",
    },
    "Data": {
        "ingest": "ingest", "tasks": "tasks", "label": "labels", "labels": "labels", "rubric": "rubric",
        "why": "show", "audit": "audit", "dead-letters": "dead_letters", "export": "export", "forget": "forget",
    },
    "Training": {
        "round": "rounds", "train": "train", "evaluate": "evaluate", "rollouts": "show", "workflow": "workflow",
        "retrieval": "retrieval",
    },
    "Serving": {"serve": "servers", "deploy": "rounds", "rollback": "rounds"},
    "State": {"config": "settings", "migrate": "migrate", "backup": "backup", "restore": "backup", "prune": "prune"},
}  # fmt: skip
"""The commands in the order of `--help`, each with its module."""
COMMANDS: Final[Mapping[str, str]] = {name: module for modules in GROUPS.values() for name, module in modules.items()}
ALIASES: Final[Mapping[str, str]] = {"judge": "filter", "explain": "why"}
"""Other names of commands, which people try first."""
HINTS: Final[Mapping[str, str]] = {
    "start": "run", "daemon": "run", "watch": "status --watch", "metrics": "status --metrics", "vllm": "serve",
    "list": "tasks", "ls": "tasks", "view": "show TASK",
    "release": "tasks release TASK", "retry": "dead-letters retry ID", "calibrate": "rubric calibrate",
    "sft": "train sft", "dpo": "train dpo", "grpo": "train grpo", "promote": "deploy", "undo": "rollback",
    "erase": "forget", "delete": "forget", "settings": "config show", "help": "--help", "version": "--version",
}  # fmt: skip
"""What to type instead of words that are like no command's name."""
OLD_SPELLINGS: Final = re.compile(r"(--conf|--backbone|--with-[\w-]+|agent|train (ppo|rl))([ =]|$)")
"""How command lines of AgentJet's launcher and of SAGE go on behind the program's name."""
_FROM_HOME: Final = re.compile(r"(--[\w-]+=)(~.*)", re.DOTALL)
"""An option with a path whose `~` shells leave to the program."""
_UNCUT: Final = 1_000
"""More characters than the first sentence of any help text has."""


class _Stdout(FileIO):
    """Stdout, which is written no more after an error."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Raises BrokenPipeError where the reader closed the pipe (`| head`), and ExportError otherwise."""
        try:
            return super().write(data)
        except OSError as error:
            _discard(_STDOUT)
            if isinstance(error, BrokenPipeError):
                raise
            why = error.strerror or str(error)
            raise ExportError("write to stdout", why, "Free space on its device.") from error


class CommandGroup(TyperGroup):
    """Commands under one name. `--help` prints the first sentence of each in full."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Like Click, which cuts the sentences."""
        self._format(formatter, "Commands", self.commands)

    def _format(self, formatter: Any, title: str, names: Iterable[str]) -> None:
        width = max(map(len, self.commands))
        rows = [(f"{name:<{width}}", self.commands[name].get_short_help_str(_UNCUT)) for name in names]
        with formatter.section(title):
            formatter.write_dl(rows)


class Commands(CommandGroup):
    """All commands: the module of one is imported when it is run. Those with another name have it too, and words that
    are none lead to one."""

    def __init__(self, *, commands: Mapping[str, Any], **attributes: Any) -> None:
        about = _about()
        known = {name: commands.get(name) or TyperCommand(name, help=about.get(name, "")) for name in COMMANDS}
        super().__init__(commands=known, **attributes)
        self._share(next((each for each in self.params if "--set" in each.opts), None), commands)

    def _share(self, option: Any, commands: Mapping[str, Any]) -> None:
        """Give `--set` to all commands that have `-c`."""
        for command in commands.values():
            named = [each.name for each in command.params]
            if "config" in named:
                command.params.insert(named.index("config") + 1, option)
            self._share(option, getattr(command, "commands", {}))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and OLD_SPELLINGS.match(" ".join(args)):
            from flywheel.config.command_lines import instead_of

            ctx.fail(escape_terminal(instead_of(args), one_line=True))
        return super().parse_args(ctx, [_FROM_HOME.sub(_expanded, each) for each in args])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if hint := HINTS.get(args[0]):
            ctx.fail(f"No such command {args[0]!r}. Use `flywheel {hint}`.")
        if module := COMMANDS.get(ALIASES.get(args[0], args[0])):
            importlib.import_module(f"flywheel.cli.{module}")
            self.commands = get_group(app).commands
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # Typer passes on the words of the library that checks values.
            error.message = error.message.removeprefix("Value error, ")
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in GROUPS.items():
            self._format(formatter, f"{title} commands", names)
        with formatter.section("Other names"):
            formatter.write_dl([(alias, f"The same as `{name}`.") for alias, name in ALIASES.items()])


def _about() -> dict[str, str]:
    """The first paragraph about each command, on the page that is generated from them."""
    page = documentation_pages().get("cli")
    return {} if page is None else dict(re.findall(r"(?m)^### `flywheel ([\w-]+)`\n\n(.+)", page.read_text()))


def _expanded(option: re.Match[str]) -> str:
    return f"{option[1]}{user_path(Path(option[2]))}"


app = typer.Typer(
    name="flywheel",
    cls=Commands,
    help="For LLM agents: judge their replies, train LoRA adapters on accepted ones, deploy better ones.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command_group(name: str, about: str, *, no_args_is_help: bool = True) -> typer.Typer:
    """Commands under one name."""
    group = typer.Typer(cls=CommandGroup, help=about, no_args_is_help=no_args_is_help, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--config",
        metavar="FILE",
        help="The configuration file. Default: $FLYWHEEL_CONFIG, else ./flywheel.yaml.",
        readable=False,  # an unreadable file is a wrong configuration, not wrong usage
    ),
]


_given_settings: ContextVar[tuple[str, ...]] = ContextVar("_given_settings", default=())
"""The single settings that were given before the command and after it."""


def _give(context: typer.Context, values: list[str] | None) -> None:
    before = () if context.parent is None else _given_settings.get()
    _given_settings.set((*before, *(values or ())))


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        callback=_give,
        expose_value=False,
        help="Override one setting: a dotted path and a YAML value, such as judge.model=MODEL. Repeatable.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"flywheel {__version__}")
        raise typer.Exit


_given_first: ContextVar[Path | None] = ContextVar("_given_first", default=None)
"""The configuration that was named before the command."""
_command: ContextVar[str] = ContextVar("_command")
"""The command, by its own name."""


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    log_level: Annotated[
        str,
        typer.Option(metavar="LEVEL", help="Level of the log: DEBUG, INFO, WARNING or ERROR.", envvar="FLYWHEEL_LOG"),
    ] = "INFO",
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="Format of the log: text, or one JSON object per line.", envvar="FLYWHEEL_LOG_FORMAT"),
    ] = "text",
    config: ConfigOption = None,
    given: SetOption = None,
) -> None:
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    if log_level.upper() not in levels:
        raise typer.BadParameter(f"{log_level!r} is none of {', '.join(levels)}", param_hint="--log-level")
    log.setup(log_level.upper(), as_json=log_format == "json")
    _given_first.set(config)
    typed = context.invoked_subcommand or ""
    _command.set(ALIASES.get(typed, typed))


def find_config(path: Path | None) -> Path | None:
    """The configuration file: the one after or before the command, `$FLYWHEEL_CONFIG`, `./flywheel.yaml`, or None."""
    if named := path or _given_first.get() or os.environ.get("FLYWHEEL_CONFIG"):
        return user_path(Path(named))
    return Path("flywheel.yaml") if os.path.exists("flywheel.yaml") else None  # noqa: PTH110 - False if it is denied


NEEDS_SOURCES: Final = frozenset({"run", "round", "ingest", "filter"})
"""Commands that need a configuration, or sources that their options name: the defaults could be another program's."""
NEEDS_STATE: Final = frozenset({"status", "tasks", "audit", "prune", "backup"})
"""Commands that need one of these or a state that exists."""
NEEDS_SETTINGS: Final = frozenset({"evaluate", "retrieval", "serve"})
"""Commands that need one of these, a state or any setting. The others also work on the defaults."""
JUDGES: Final = frozenset({"round", "evaluate", "rubric"})
"""Commands that send texts to the judge. `run` and `filter` log where, as the daemon does."""


def load_config(path: Path | None, *, options: Sequence[str] = (), names_sources: bool = False) -> Config:
    """The configuration, with `options` of the command line as KEY=VALUE above it; without a file, the defaults.
    Commands that judge say on stderr what AgentJet's file stands for where it sets nothing, the judge included.

    Raises ConfigError if the command needs more than those, unless other options of it name what to read.
    """
    from flywheel.config.file import defaults, load

    given = (*given_settings(), *options)
    if (file := find_config(path)) is not None:
        found = load(file, given)
        if found.assumed and _command.get() in JUDGES:
            print_error(escape_terminal(found.assumed, one_line=True))
        return found
    config, command = defaults(given), _command.get()
    if names_sources:
        return config
    if command in NEEDS_SOURCES:
        _require_sources(config, f"run `flywheel {command}`", "it would say what to read")
    if command in NEEDS_STATE | NEEDS_SETTINGS and (missing := missing_state(config)):
        _require_sources(config, f"run `flywheel {command}`", missing)
    return config


def _require_sources(config: Config, attempted: str, why: str) -> None:
    """Raises ConfigError if nobody said what to read, in a file or by options."""
    is_set = _command.get() in NEEDS_SETTINGS and given_settings()
    if config.file is None and "sources" not in config.model_fields_set and not is_set:
        hint = "Name one with -c FILE or $FLYWHEEL_CONFIG, or change to its directory; `flywheel init` writes one."
        raise ConfigError(attempted, f"there is no configuration: {why}", hint)


def _refuse_new_state(config: Config) -> None:
    """Raises ConfigError where a state would be created that no configuration names."""
    if missing := missing_state(config):
        _require_sources(config, "create a state", missing)


def given_settings() -> tuple[str, ...]:
    """The single settings of the command line, each as KEY=VALUE."""
    return _given_settings.get()


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


def user_path(path: Path) -> Path:
    """A path of the command line with `~` expanded. Raises ConfigError."""
    try:
        return expanded(path)
    except ValueError as error:
        raise ConfigError("use a path", str(error), "Name another.") from None


def absolute(path: Path) -> Path:
    """The absolute form of a path on the command line. Raises ConfigError."""
    try:
        return tidied(user_path(path).absolute())
    except OSError as error:
        raise ConfigError(
            f"find {path}", f"the current directory is not there: {error.strerror}", "Name the whole path."
        ) from error


def missing_state(config: Config) -> str:
    """That there is no state where the configuration says; empty if there is one."""
    from flywheel.cli.tables import short_path
    from flywheel.store.kernel.database import STATE_FILE, is_missing

    if not is_missing(config.state_dir):
        return ""
    path = short_path(config.state_dir / STATE_FILE)
    return f"no state at {path}: run `flywheel ingest` first, or check state.dir and $FLYWHEEL_HOME"


def require_state(config: Config, attempted: str) -> None:
    """Raises StoreError if there is no state: a command would create one in the wrong place."""
    if missing := missing_state(config):
        hint = "If another configuration has the state, name that one with -c."
        raise StoreError(attempted, missing, hint)


def require_outside_state(config: Config, *files: Path | None) -> None:
    """Raises ExportError for a file in the directory of the state: an erasure would not know what is in it."""
    from flywheel.cli.tables import short_path

    state = os.path.realpath(config.state_dir)
    for path in files:
        if path is not None and Path(os.path.realpath(absolute(path))).is_relative_to(state):
            why = f"it is in the state directory {short_path(config.state_dir)}"
            raise ExportError(f"write {path}", why, "Name a file elsewhere: `flywheel forget` erases no exports.")


async def read_state(config: Config, question: Callable[[Connection], T], *, warn: bool = True) -> T:
    """Read the state beside a running daemon. With `warn`, stderr says if there is none. Raises StoreError."""
    # Commands that only read their configuration do not wait for the import of the database library.
    from flywheel.store.kernel.database import read_once

    if warn and (missing := missing_state(config)):
        print_error(f"flywheel: {missing}")
    return await read_once(config.state_dir, question)


@contextlib.asynccontextmanager
async def open_state(
    config: Config, how: Literal["open", "view", "copy"] = "open", *, lock: bool = False, **options: int
) -> AsyncIterator[Store]:
    """The state, a read-only view of it, or a copy, with the instance lock or beside a daemon. `options` are those of
    `Store.open`. Raises StoreError, and ConfigError for a new state without a configuration."""
    from flywheel.store.holder import holding
    from flywheel.store.kernel.database import Store
    from flywheel.store.requests import carry_out
    from flywheel.system.lock import instance_lock

    if how == "open":
        _refuse_new_state(config)
    with instance_lock(config.state_dir) if lock else contextlib.nullcontext():
        store: Store = await getattr(Store, how)(config.state_dir, **options)
        try:
            async with holding(store, config.state_dir) if lock else contextlib.nullcontext():
                if how != "view" and (warning := await store.write(_owned, config)):
                    complain(warning)
                if lock:
                    # What was asked for while no daemon was running.
                    await store.write(carry_out)
                yield store
        finally:
            await store.close()


def _owned(conn: Connection, config: Config) -> str:
    """Note which configuration file the state belongs to. A warning if that is another one, else empty.

    A file that is gone or keeps its state elsewhere, after a move or as the original of a copy, owns it no longer.
    """
    from flywheel.cli.tables import short_path
    from flywheel.config.file import load
    from flywheel.store.kernel import database

    if config.file is None:
        return ""
    own, owner = os.path.realpath(config.file), database.noted(conn, database.CONFIGURATION_NOTE)
    if owner and owner != own:
        with contextlib.suppress(ConfigError):
            if os.path.realpath(load(Path(owner)).state_dir) == os.path.realpath(config.state_dir):
                state, owner = short_path(config.state_dir), short_path(owner)
                return (
                    f"warning: {short_path(own)} shares the state {state} with {owner}: replies of both are judged"
                    " and trained on together. To separate them, set state: {dir: state} in one of them."
                )
    database.note(conn, database.CONFIGURATION_NOTE, own)
    return ""


def this_person() -> str:
    """The name of the user who runs the command."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without an entry, as in containers
        return f"user {os.getuid()}"


def ask(config: Config, kind: RequestKind, arguments: Mapping[str, Any], by: str = "") -> dict[str, Any] | None:
    """Have an action done, beside a running daemon too; its result, None if it waits. Raises as `open_state` does."""
    from flywheel.daemon.requests import perform

    _refuse_new_state(config)
    request = run_async(perform(config, kind, arguments, by or this_person()))
    if request.error is not None:
        raise request.error
    result: dict[str, Any] | None = request.result
    return result


def complain(error: FlywheelError | str) -> None:
    print_error(f"flywheel: {escape_terminal(str(error))}")


def print_error(text: str) -> None:
    """Print on stderr. If it is closed, the exit code alone reports an error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def main() -> None:
    """Run the command line. A FlywheelError becomes its message and its exit code."""
    _fill_closed()
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
    except BrokenPipeError:
        code = EXIT_UNREAD
    except ExportError as error:
        complain(error)
        code = error.exit_code
    try:
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
    except SystemExit as end:
        # So Typer and rich end where the reader closed the pipe.
        if isinstance(end.__context__, BrokenPipeError):
            return EXIT_UNREAD
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _fill_closed() -> None:
    """Open /dev/null for each standard stream that is closed: the next file that is opened would get its number, and
    with it what child processes write. A stderr that is closed is one that nobody reads."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(_STDERR, "w", closefd=False)


def _discard(descriptor: int) -> None:
    """Write what is still buffered to /dev/null: at exit it would fail again and change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
