"""`flywheel config`: the settings in effect and where each comes from, and the JSON Schemas of files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import typer

from flywheel.cli.app import ConfigOption, JsonOption, command_group, find_config, load_config, print_json
from flywheel.cli.tables import Row, print_rows, short_path, stdout
from flywheel.secrets import REDACTED, masked
from flywheel.system.terminal import escape_terminal, moment

if TYPE_CHECKING:
    from pydantic import BaseModel

    from flywheel.config.file import Config
    from flywheel.system.yaml_file import YamlDocument

config_app = command_group("config", "Show the settings and their JSON Schemas.")

SCHEMAS: Final[Mapping[str, str]] = {
    "config": "configs/flywheel.schema.json",
    "rubric": "rubrics/rubric.schema.json",
    "filters": "filters/filters.schema.json",
}
"""The shipped schema of each kind of file."""
WIDE: Final = 100
MAX_SHOWN: Final = 200
"""Characters of a mapping that the table shows."""
DEFAULT: Final = "default"
_WEBHOOK: Final = re.compile(r"notify\.\d+\.url")
"""A setting whose value is a secret: whoever knows the address can send to it."""


class Setting(NamedTuple):
    """The value of one key in effect, and where it comes from: `default`, a file with its line, or a variable."""

    key: str
    value: Any
    origin: str


@config_app.command()
def show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every setting in effect and where it comes from; secrets are masked."""
    path = find_config(config)
    settings = load_config(config)
    if settings.gate.suites:
        from flywheel.daemon.rounds.suites import tasks_of_suites

        tasks_of_suites(settings)  # refused as by the commands that use them
    in_effect = [*settings_of(settings, path)]
    root = settings.project
    if as_json:
        file = None if path is None else str(path.absolute())
        project = None if root is None else {"root": str(root.folder), "why": root.why}
        shown = [setting._asdict() for setting in in_effect]
        whole = {"file": file, "project": project, "settings": shown}
        print_json(whole | {"next_cron_times": settings.trigger.next_cron_times, "warnings": settings.warnings})
        return
    if root is not None:
        typer.echo(escape_terminal(f"Relative paths start at {root}.", one_line=True))
    rows = [
        Row((setting.key, escape_terminal(text_of(setting.value), one_line=True), escape_terminal(setting.origin)))
        for setting in in_effect
    ]
    print_rows(stdout(), ("setting", "value", "from"), rows, wide=WIDE, fold=("value",))
    if times := settings.trigger.next_cron_times:
        typer.echo(f"trigger.cron fires next at {', '.join(f'{moment(at)} UTC' for at in times)}.")
    for warning in settings.warnings:
        typer.echo(escape_terminal(f"WARNING {warning}", one_line=True))


@config_app.command()
def schema(
    of: Annotated[
        Literal["config", "rubric", "filters"],
        typer.Argument(metavar="config|rubric|filters", help="The kind of file."),
    ] = "config",
) -> None:
    """Print the JSON Schema of configuration, rubric or filter files, for editors that complete and validate."""
    print_json(schema_of(of))


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema of one kind of file, by a key of `SCHEMAS`."""
    from flywheel.judge.file_schemas import config_schema, filters_schema, rubric_schema

    return {"config": config_schema, "rubric": rubric_schema, "filters": filters_schema}[name]()


def settings_of(config: Config, path: Path | None) -> Iterator[Setting]:
    """All settings in effect, of a configuration that was read from `path`."""
    from flywheel.system.yaml_file import read_yaml

    document = None if path is None else read_yaml(path, f"read configuration {path}", "Name a YAML file.")
    file = "" if path is None else short_path(str(path.absolute()))
    effective = _effective(config)
    for each in _walked(config, (), file, document):
        value, origin = each.value, each.origin
        if config.is_given(each.key):
            origin = "--set"
        elif origin != DEFAULT and document is not None:
            origin = _origin(config, each, file, document)
        if value is None and each.key in effective:
            value, origin = effective[each.key]
        if each.key.endswith("_env") and value is not None:
            names = [name.strip() for name in value.split("|")]
            unset = [f"${name}" for name in names if not os.environ.get(name)]
            origin += f"; not set: {', '.join(unset)}" if unset else "; set"
        if _WEBHOOK.fullmatch(each.key) and value is not None:
            value = f"{urlsplit(value).scheme}://{urlsplit(value).hostname}/{REDACTED}"
        yield Setting(each.key, masked(value), origin)


def _origin(config: Config, setting: Setting, file: str, document: YamlDocument) -> str:
    """The line of a key that has another name in AgentJet's file, and where a relative path starts."""
    row = config.origins.get(setting.key, config.origins.get(re.sub(r"\.\d+", "", setting.key)))
    if row is None:
        return setting.origin
    if not row.place:
        return "AgentJet's default"
    line = f"{file}:{document.position(row.place.split('.'), key=True).line}"
    if (root := config.project) is None or not isinstance(row.made, str) or Path(row.made).is_absolute():
        return line
    is_relative = os.path.normpath(root.folder / row.made) == os.path.normpath(str(setting.value))
    return f"{line}; relative to {root}" if is_relative else line


def _effective(config: Config) -> dict[str, tuple[Any, str]]:
    """What settings without a value stand for, and where that comes from."""
    home, url = os.environ.get("FLYWHEEL_HOME"), os.environ.get("OPENAI_BASE_URL")
    state = "$FLYWHEEL_HOME" if home else "$XDG_STATE_HOME" if os.environ.get("XDG_STATE_HOME") else DEFAULT
    values: dict[str, tuple[Any, str]] = {
        "state.dir": (str(config.state_dir), state),
        "tracking.dir": (str(config.state_dir / "tracking"), DEFAULT),
        "ingest.output": (str(config.task_file), DEFAULT),
        "trigger.min_held_out": (config.gate.min_tasks, DEFAULT),
    }
    if url:
        values["judge.base_url"] = (url, "$OPENAI_BASE_URL")
    return values


def _walked(
    section: BaseModel, above: tuple[str | int, ...], file: str, document: YamlDocument | None
) -> Iterator[Setting]:
    from pydantic import BaseModel

    from flywheel.config.training import OwnStage

    for name in type(section).model_fields:
        path, value = (*above, name), getattr(section, name)
        if isinstance(value, list):
            # Of a stage, what it does not set is no default of its own.
            value = [item.model_dump() if isinstance(item, OwnStage) else item for item in value]
        if isinstance(value, BaseModel):
            yield from _walked(value, path, file, document)
            continue
        items = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
        if items and all(isinstance(item, BaseModel) for item in items.values()):
            for key, item in items.items():
                yield from _walked(item, (*path, key), file, document)
            continue
        origin = DEFAULT
        if name in section.model_fields_set:
            origin = file if document is None else f"{file}:{document.position(path, key=True).line}"
        yield Setting(".".join(map(str, path)), value, origin)


def text_of(value: Any) -> str:
    """A value for a table: a mapping in part."""
    from json import dumps

    text = value if isinstance(value, str) else dumps(value, ensure_ascii=False)
    # A workflow gets its whole file; `--json` has it.
    return text if not isinstance(value, Mapping) or len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
