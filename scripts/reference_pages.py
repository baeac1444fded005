"""Writes the generated pages of `docs/reference/`: `python -m scripts.reference_pages`.

The configuration comes from the settings (`scripts.configuration_page`), the command line from the commands, and the
JSON output from the shapes on the architecture page, which tests compare with what the commands print.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from flywheel.cli.app import MODULES, app
from scripts import configuration_page

ROOT = configuration_page.ROOT
CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
JSON_PAGE = ROOT / "docs" / "reference" / "json.md"

CLI_HEAD = """# Command line

This page is generated from the commands (`python -m scripts.reference_pages`); a test compares the two.
`flywheel COMMAND --help` shows the same for the installed version. What each command prints with `--json` is on
[JSON output](json.md).

Exit codes: 0 done; 1 failed; 2 usage; 69 the judge cannot be used: it is unreachable, refuses its calls, or gives
answers that cannot be read; 75 another instance holds the lock; 78 wrong configuration, rubric, filter or labels
file; 130, 143 stopped by SIGINT, SIGTERM before it was done; 141 the reader of stdout closed it.
"""

JSON_HEAD = """# JSON output

`--json` prints one object on stdout and nothing else. After an error that ends the command, the object is
`{"error": …}`, with the message that is also on stderr. Usage errors (exit code 2) are on stderr only.

Below, a key without a value has a text, a number, a list of them, true, false or null; `[{` begins a list of objects
of that shape, and `{name: n}` stands for numbers by name. This page is generated from the
[architecture page](../architecture.md#command-line) (`python -m scripts.reference_pages`), which explains the values;
tests compare those shapes with what the commands print.
"""


def cli_page() -> str:
    for name in MODULES:
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


def json_page() -> str:
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Command line")[1].split("\n## ")[0]
    parts = [JSON_HEAD]
    # A name before a colon begins the shapes of a command: one, or several with words about each.
    names = list(re.finditer(r"((?:`[a-z][a-z -]*`(?:,| and) )*`[a-z][a-z -]* --json`):", section))
    ends = [*(each.start() for each in names[1:]), section.index("\nExit codes")]
    for name, end in sorted(zip(names, ends, strict=True), key=lambda each: each[0][1]):
        parts += [f"## {' '.join(name[1].split())}", ""]
        before = name.end()
        for shape in re.finditer(r"`(\{[^`]*\}|\"[^`]*\})`( or null)?", section[:end]):
            if shape.start() < before:
                continue
            words = " ".join(section[before : shape.start()].split()).strip(" ,;:.").replace("](", "](../")
            if words and before == name.end():
                parts += [f"{words}:", ""]
            elif words:
                parts += [f"… {words}:", ""]
            parts += ["```", *_drawn(shape[1]), "```", ""]
            before = shape.end()
    return "\n".join(parts)


def _drawn(shape: str) -> list[str]:
    """A shape with one key a line."""
    lines, indent = [""], 0
    for token in re.findall(r"\{\w+: n\}|\"[^\"]*\"|[{}\[\],]|[^\s{}\[\],\"]+", shape):
        if token == "{":
            lines[-1] += f" {token}" if lines[-1].endswith(":") else token
            indent += 2
            lines.append(" " * indent)
        elif token == "}":
            indent -= 2
            lines += [" " * indent + token]
        elif token == ",":
            lines[-1] += token
            lines.append(" " * indent)
        elif token in "[]:":
            lines[-1] += token if token != "[" or lines[-1].endswith("[") else f" {token}"
        else:
            lines[-1] += (" " if lines[-1].strip() and not lines[-1].endswith("[") else "") + token
    return [line.rstrip() for line in lines if line.strip()]


if __name__ == "__main__":
    configuration_page.write()
    CLI_PAGE.write_text(cli_page())
    JSON_PAGE.write_text(json_page())
