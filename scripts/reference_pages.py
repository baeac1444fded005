"""Writes the generated pages of `docs/reference/`: `python -m scripts.reference_pages`.

The configuration comes from the settings (`scripts.configuration_page`), the command line from the commands, the
states and tables from the schema and its docstrings, and the keys of AgentJet and of AgentScope's tuner and the
conventions of traces from the tables that translate them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperGroup

from flywheel.cli.app import COMMANDS, app
from flywheel.config.agentjet import AGENTJET, DEFAULTS
from flywheel.config.foreign import Only, Refusal, Table, Without
from flywheel.config.trinity import TRINITY
from flywheel.records import states
from flywheel.sources.otlp import conventions
from flywheel.store.kernel import schema
from scripts import configuration_page

ROOT = configuration_page.ROOT
CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
STATE_PAGE = ROOT / "docs" / "reference" / "state.md"
AGENTJET_PAGE = ROOT / "docs" / "how-to" / "agentjet.md"
TUNER_PAGE = ROOT / "docs" / "how-to" / "agentscope-tuner.md"
OTLP_PAGE = ROOT / "docs" / "connect" / "traces.md"

CLI_HEAD = """# Command line

This page is generated from the commands (`python -m scripts.reference_pages`); a test compares the two.
`flywheel COMMAND --help` shows the same for the installed version. What each command prints with `--json` is on
[JSON output](json.md).

Exit codes: 0 done; 1 failed; 2 usage; 69 the judge cannot be used: it is unreachable, refuses its calls, or gives
answers that cannot be read; 75 try again: another instance holds the lock, or erased text is not yet purged; 78
wrong configuration, rubric, filter, labels or task file; 100 replies are below the quality bar (`--fail-under`,
`--max-undecided`); 130, 143 stopped by SIGINT, SIGTERM before it was done (`flywheel run` without `--once` ends
with 0); 141 the reader of stdout closed it (`| head`). An error message says what was attempted, why it failed
and what to do. A user's mistake never causes a traceback.

`-c FILE` and `--set KEY=VALUE` may stand before or after a command. `run`, `round`, `ingest` and `filter` need a
configuration, or `sources` by `--set` or the databases of `--source` (`filter --tasks` reads no source);
`status`, `tasks`, `audit`, `prune` and `backup` need that or a state that exists, `evaluate`, `retrieval` and `serve`
one of these or any setting.
The other commands also work on the defaults, on which only `restore`, `demo` and `train` create a state or files of
it. What judges needs `judge.base_url` (or `$OPENAI_BASE_URL`) and a model. `judge` is another name of `filter` and
`explain` of `why`.
`--install-completion` and `--show-completion` install and print completion for bash, zsh or fish.
"""

STATE_HEAD = """# States and tables

This page is generated from `flywheel/store/kernel/schema.py` and `flywheel/records/states.py`
(`python -m scripts.reference_pages`); a test compares them. Programs should read `flywheel status --json` or
[`flywheel export`](export.md) instead: the tables can change with each version.
"""

AGENTJET_HEAD = """## Every key

This section is generated from `flywheel/config/agentjet.py` (`python -m scripts.reference_pages`); a test
compares the two. Names are relative to the root, `ajet:` or `astuner:`; `feedback_tracing` may also be below the root
itself, or at the root of the file. What a file does not set has Flywheel's default, except for the judge and
[what is trained on](#what-is-trained-on).
"""

TUNER_HEAD = """## Every key

This section is generated from `flywheel/config/trinity.py` (`python -m scripts.reference_pages`); a test compares the
two. Names without a section are fields of `TunerModelConfig` and `AlgorithmConfig`, or short names in a mapping;
`train_dataset.…` is a field of the data set. What nothing sets has Flywheel's default.
"""

OTLP_HEAD = """## Conventions

Where a span has several conventions, the first in the table counts, attribute by attribute. Models, token counts and
tool calls are read as well. N is a number. `python -m scripts.reference_pages` generates the table.
"""


def otlp_page() -> str:
    before, _, rest = OTLP_PAGE.read_text().partition(OTLP_HEAD.splitlines()[0])
    rows = [
        f"| {each.name} | {', '.join(each.read_from)} | {each.limits} | {each.tested} |"
        for each in conventions.CONVENTIONS
    ]
    table = ["| convention | read from | limits | tested with |", "|---|---|---|---|", *rows]
    return before + OTLP_HEAD + "\n" + "\n".join(table) + "\n\n## " + rest.partition("\n## ")[2]


def cli_page() -> str:
    for name in COMMANDS.values():
        importlib.import_module(f"flywheel.cli.{name}")
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    parts = [CLI_HEAD, "## Options of all commands", "", *_options(root), ""]
    for name, command in sorted(root.commands.items()):
        parts += _command(f"flywheel {name}", command)
    return "\n".join(parts)


def _command(name: str, command: Any) -> Iterator[str]:
    if getattr(command, "hidden", False):
        return
    yield from (f"## `{name}`", "", _sentence(command.help), "")
    # Arguments first, as they are typed.
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join([name, *(_argument(each) for each in arguments)])
    group = isinstance(command, TyperGroup)
    if group and not command.invoke_without_command:
        for inner, each in command.commands.items():
            yield from _command(f"{name} {inner}", each)
        return
    yield from ("```", f"{usage} [OPTIONS]", "```", "")
    yield from _options(command)
    yield ""
    if group:
        for inner, each in command.commands.items():
            yield from _command(f"{name} {inner}", each)


def _argument(parameter: Any) -> str:
    name = parameter.metavar or (parameter.name or "").upper()
    name = name.strip("[].…")
    return (name if parameter.required else f"[{name}]") + ("…" if parameter.nargs == -1 else "")


def _options(command: Any) -> Iterator[str]:
    rows = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            if text := getattr(parameter, "help", None):
                rows.append((f"`{_cell(_argument(parameter).strip('[]…'))}`", "–", _cell(text)))
        elif not parameter.hidden and parameter.name != "help":
            names = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
            value = "" if parameter.is_flag else f" `{_value(parameter)}`"
            rows.append((names + value, _default(parameter), _cell(parameter.help or "")))
    if rows:
        yield "| option | default | meaning |"
        yield "|---|---|---|"
        yield from (f"| {name} | {default} | {text} |" for name, default, text in rows)
    else:
        yield "It has no options."


def _value(parameter: Any) -> str:
    return _cell(parameter.metavar or str(parameter.display_type(None)).strip("<>"))


def _default(parameter: Any) -> str:
    value = parameter.default
    shown = value not in (None, False, (), []) and not callable(value)
    return f"`{getattr(value, 'value', value)}`" if shown else "–"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str | None) -> str:
    return "\n\n".join(" ".join(each.split()) for each in (text or "").split("\n\n"))


def state_page() -> str:
    parts = [STATE_HEAD, "## States", "", _sentence(states.__doc__), ""]
    for kind, following in states.TRANSITIONS.items():
        said = _docstrings(states, kind.__name__)
        parts += [
            f"### {kind.__name__}",
            "",
            _sentence(kind.__doc__),
            "",
            "| state | meaning | may become |",
            "|---|---|---|",
        ]
        for state in kind:
            after = ", ".join(f"`{each.value}`" for each in kind if each in following[state]) or "–"
            parts.append(f"| `{state.value}` | {_cell(said.get(state.name, ''))} | {after} |")
        parts.append("")
    parts += ["## Tables", "", _sentence(schema.__doc__), ""]
    names = _docstrings(schema)
    for name, table in schema.metadata.tables.items():
        parts += [f"### `{name}`", "", _sentence(names.get(name)), "", "| column | type | |", "|---|---|---|"]
        for column in table.columns:
            notes = [*(["primary key"] if column.primary_key else []), *(["unique"] if column.unique else [])]
            notes += [f"→ `{key.target_fullname}`" for key in column.foreign_keys]
            notes += ["may be NULL"] if column.nullable else []
            parts.append(f"| `{column.name}` | {column.type} | {', '.join(notes)} |")
        parts.append("")
    return "\n".join(parts)


def agentjet_page() -> str:
    """The page with its written part as it is, and the tables and AgentJet's defaults after it."""
    defaults = ["### Defaults", "", "Workflows and judges read these, where the file does not set them.", ""]
    return _page_of(AGENTJET_PAGE, AGENTJET_HEAD, AGENTJET, [*defaults, "```", DEFAULTS.strip(), "```", ""])


def tuner_page() -> str:
    """The page with its written part as it is, and the tables after it."""
    return _page_of(TUNER_PAGE, TUNER_HEAD, TRINITY, [])


def _page_of(page: Path, head: str, table: Table, rest: list[str]) -> str:
    def rows(by_name: Mapping[str, Any], kind: type) -> Iterator[tuple[str, Any]]:
        for what, each in groupby(by_name.items(), itemgetter(1)):
            if isinstance(what, kind):
                yield ", ".join(f"`{name.replace('=', ': ')}`" for name, _ in each), what

    parts = [page.read_text().partition(head.splitlines()[0])[0] + head]
    parts += ["### Used", "", "Of several keys in a row, the last that a file sets counts.", ""]
    parts += ["| key | here |", "|---|---|"]
    parts += [f"| {names} | `{ours}` |" for names, ours in rows(table.uses, str)]
    parts += ["", "### Refused", "", "| value | because | instead |", "|---|---|---|"]
    parts += [f"| {names} | {_cell(why)} | {_cell(hint)} |" for names, (why, hint) in rows(table.entries, Refusal)]
    for names, (possible, why, _) in rows(table.entries, Only):
        choices = " or ".join(f"`{str(each).lower()}`" for each in possible)
        parts.append(f"| {names}, another value | {_cell(why)} | {choices or '–'} |")
    parts += [
        "",
        "### Without effect",
        "",
        "A key stands for those below it, too.",
        "",
        "| key | because |",
        "|---|---|",
    ]
    parts += [f"| {names} | {_cell(why)} |" for names, why in rows(table.entries, Without)]
    return "\n".join([*parts, "", *rest])


def _docstrings(module: ModuleType, class_name: str = "") -> dict[str, str]:
    """The texts that follow assignments in a module, or in one of its classes, by name."""
    body = ast.parse(inspect.getsource(module)).body
    if class_name:
        (body,) = [each.body for each in body if isinstance(each, ast.ClassDef) and each.name == class_name]
    found = dict[str, str]()
    for node, following in pairwise(body):
        if (
            isinstance(node, ast.Assign)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            names = [each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)]
            found |= dict.fromkeys(names, str(following.value.value))
    return found


if __name__ == "__main__":
    configuration_page.write()
    CLI_PAGE.write_text(cli_page())
    STATE_PAGE.write_text(state_page())
    AGENTJET_PAGE.write_text(agentjet_page())
    TUNER_PAGE.write_text(tuner_page())
    OTLP_PAGE.write_text(otlp_page())
