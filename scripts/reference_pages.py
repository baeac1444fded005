"""Writes the generated pages of `docs/reference/`: `python -m scripts.reference_pages`.

The configuration comes from the settings (`scripts.configuration_page`), the command line from the commands, states
and metrics from their definitions, and the keys of other programs and the conventions of traces from the tables that
translate them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperGroup

from flywheel.cli.app import COMMANDS, GROUPS, app
from flywheel.config.agentjet import AGENTJET
from flywheel.config.command_lines import AGENT, LAUNCHER
from flywheel.config.foreign import Only, Refusal, Without
from flywheel.config.trinity import TRINITY
from flywheel.daemon import prometheus
from flywheel.judge.call_seconds import CALL_SECONDS
from flywheel.records import states
from flywheel.sources.otlp import conventions
from scripts import configuration_page

ROOT = configuration_page.ROOT
CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
FILES_PAGE = ROOT / "docs" / "reference" / "files.md"
FOREIGN_KEYS = ROOT / "docs" / "reference" / "foreign-keys.tsv"
FOREIGN = {
    "AgentJet, ASTuner": AGENTJET,
    "Trinity-RFT, AgentScope's tuner": TRINITY,
    "ajet, astuner, launcher.py (command line)": LAUNCHER,
    "sage-dev agent (command line)": AGENT,
}
"""By program, the tables that translate its keys; SAGE's are in a file with both defaults."""
OTLP_PAGE = ROOT / "docs" / "connect" / "traces.md"

CLI_HEAD = """# Command line

This page is generated from the commands (`python -m scripts.reference_pages`). `flywheel COMMAND --help` shows the
same for the installed version.

`run`, `round`, `ingest` and `filter` need a configuration, or `sources` by `--set` or `--source`. `filter --tasks`
needs none. `status`, `tasks`, `audit`, `prune` and `backup` need a configuration or a state that exists. `evaluate`,
`retrieval` and `serve` need one of these or any setting. The other commands also work on the defaults; of them only
`restore`, `demo` and `train` write files. What judges needs `judge.base_url` (or `$OPENAI_BASE_URL`) and a model.
`judge` is another name of `filter`, and `explain` of `why`.

An error message says what was attempted, why it failed and what to do.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed |
| 2 | usage |
| 69 | the judge cannot be used: it is unreachable, refuses its calls, or gives answers that cannot be read |
| 75 | try again: another instance holds the lock, or erased text is not yet purged |
| 78 | wrong configuration, rubric, filter, labels or task file |
| 100 | replies are below the quality bar (`--fail-under`, `--max-undecided`) |
| 130, 143 | stopped by SIGINT, SIGTERM; `flywheel run` without `--once` ends with 0 |
| 141 | the reader of stdout closed it (`\\| head`) |
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
    names = ", ".join(name.replace(" ", "\xa0") for name in _with_json("", root))
    named = [line.replace("\xa0", " ") for line in textwrap.wrap(names, 110, break_on_hyphens=False)]
    with_json = "These commands take `--json`, which prints one [JSON object](files.md#json-output) and nothing else:"
    parts = [CLI_HEAD, "## Options of all commands", "", "They may stand before or after the command.", ""]
    parts += [*_options(root.params), "", with_json, "", *(f"    {line}" for line in named), ""]
    for title, modules in GROUPS.items():
        parts += [f"## {title} commands", ""]
        for name in modules:
            parts += _command(f"flywheel {name}", root.commands[name], "###")
    return "\n".join(parts)


def _with_json(name: str, command: Any) -> Iterator[str]:
    if any("--json" in each.opts for each in command.params):
        yield name
    for inner, each in sorted(getattr(command, "commands", {}).items()):
        yield from _with_json(f"{name} {inner}".strip(), each)


def _command(name: str, command: Any, level: str, shared: Sequence[str] = ()) -> Iterator[str]:
    if getattr(command, "hidden", False):
        return
    yield from (f"{level} `{name}`", "", _sentence(command.help), "")
    group = isinstance(command, TyperGroup)
    if not group or command.invoke_without_command:
        # Arguments first, as they are typed.
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        if arguments:
            yield from ("    " + " ".join([name, *map(_argument, arguments), "[OPTIONS]"]), "")
        own = [option for option in _options(_own(command)) if option not in shared]
        if own:
            yield from (*own, "")
    if group:
        inner = list(command.commands.values())
        common = [
            option
            for option in _options(_own(inner[0]))
            if len(inner) > 2 and all(option in _options(_own(each)) for each in inner)
        ]
        if common:
            yield from ("Each has these options:", "", *common, "")
        for each in inner:
            yield from _command(f"{name} {each.name}", each, f"{level}#", common)


def _own(command: Any) -> list[Any]:
    """The parameters of a command without those that are the same everywhere."""
    return [each for each in command.params if not {"--config", "--set", "--json"} & {*each.opts}]


def _argument(parameter: Any) -> str:
    name = parameter.metavar or (parameter.name or "").upper()
    name = name.strip("[].…")
    return (name if parameter.required else f"[{name}]") + ("…" if parameter.nargs == -1 else "")


def _options(parameters: Iterable[Any]) -> list[str]:
    rows = []
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            if text := getattr(parameter, "help", None):
                rows.append(f"- `{_argument(parameter).strip('[]…')}`: {' '.join(text.split())}")
        elif not parameter.hidden and parameter.name != "help":
            names = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
            value = "" if parameter.is_flag else f" `{_value(parameter)}`"
            rows.append(f"- {names}{value}{_default(parameter)}: {' '.join((parameter.help or '').split())}")
    return rows


def _value(parameter: Any) -> str:
    return " ".join((parameter.metavar or str(parameter.display_type(None)).strip("<>")).split())


def _default(parameter: Any) -> str:
    value = parameter.default
    shown = value not in (None, False, (), [], "") and not callable(value)
    return f" (default `{getattr(value, 'value', value)}`)" if shown else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str | None) -> str:
    return "\n\n".join(" ".join(each.split()) for each in (text or "").split("\n\n"))


def files_page() -> str:
    """The page with its written part as it is, and the states and the metrics that the code has."""
    text = _replaced(FILES_PAGE.read_text(), "## States", _states())
    return _replaced(text, "### All metrics", _metrics())


def _replaced(page: str, heading: str, body: Iterable[str]) -> str:
    """The page with this body below a heading, up to the next one of its level or above."""
    before, _, rest = page.partition(f"{heading}\n")
    end = re.search(rf"^#{{1,{heading.count('#')}}} ", rest, re.MULTILINE)
    assert end is not None
    return "\n".join([before + heading, "", *body, "", rest[end.start() :]])


def _states() -> Iterator[str]:
    yield "These states are in lists and in JSON output; those of tasks are on [monitor](../operate/monitor.md)."
    for kind in states.TRANSITIONS:
        if kind not in (states.RequestState, states.TaskState):
            said = _docstrings(states, kind.__name__)
            yield from ("", f"{_sentence(kind.__doc__).removesuffix('.')}:", "")
            yield from (f"- `{state.value}`: {' '.join(said[state.name].split())}" for state in kind)


def _metrics() -> Iterator[str]:
    for line in prometheus.METRICS.strip().splitlines():
        name, path, text = line.split(" | ")
        labels = [each for each in re.findall(r"{(\w+)}", path) if each != "target"]
        yield _metric(f"flywheel_{name}", labels, text.replace(", of the last step", ""))
    [seconds] = CALL_SECONDS.describe()
    yield _metric(seconds.name, ["endpoint", "outcome"], f"Histogram. {seconds.documentation}")


def _metric(name: str, labels: Sequence[str], text: str) -> str:
    named = f" ({', '.join(labels)})" if labels else ""
    return f"- `{name}`{named}: {text}"


def foreign_keys() -> str:
    """Each key of another program and each option of its command lines, with what becomes of it."""
    lines = ["program\tkey or option\toutcome\tFlywheel's key\treason\tinstead"]
    for program, table in FOREIGN.items():
        mark = "--" if program.endswith("(command line)") else ""
        for name, entry in table.entries.items():
            shown = f"{mark}{name.replace('=', ': ')}"
            match entry:
                case Without():
                    told = ("without effect", "", str(entry), "")
                case Refusal(why, hint):
                    told = ("refused", "", why, hint)
                case Only(possible, why, _):
                    choices = " or ".join(str(each).lower() for each in possible)
                    told = ("refused but for", table.uses.get(name, ""), why, choices)
                case _:
                    told = ("used", table.uses[name], "", "")
            lines.append("\t".join([program, shown, *(" ".join(each.split()) for each in told)]))
    return "\n".join(lines) + "\n"


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
    FILES_PAGE.write_text(files_page())
    FOREIGN_KEYS.write_text(foreign_keys())
    OTLP_PAGE.write_text(otlp_page())
