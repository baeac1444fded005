"""`flywheel config`: the settings in effect and where each comes from, and the JSON Schemas of files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import typer
from pydantic import BaseModel

from flywheel.cli.app import ConfigOption, JsonOption, command_group, load_config, print_json
from flywheel.cli.tables import Row, print_rows, stdout
from flywheel.config.file import Config
from flywheel.config.training import OwnStage
from flywheel.daemon.rounds.suites import tasks_of_suites
from flywheel.judge.file_schemas import config_schema, filters_schema, rubric_schema
from flywheel.secrets import REDACTED, masked
from flywheel.system.terminal import escape_terminal, moment

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
GIVEN: Final = "given"
_WEBHOOK: Final = re.compile(r"notify\.\d+\.url")
"""A setting whose value is a secret: whoever knows the address can send to it."""


class Setting(NamedTuple):
    """The value of one key in effect, and where it comes from: `default`, `given` (the file has it), `--set`, a
    variable, or the key of another program's file that it follows from."""

    key: str
    value: Any
    origin: str


@config_app.command()
def show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every setting in effect and where it comes from; secrets are masked."""
    settings = load_config(config)
    tasks_of_suites(settings)  # refused as by the commands that use them
    in_effect, file, root = [*settings_of(settings)], settings.file, settings.project
    if as_json:
        print_json(
            {
                "file": None if file is None else str(file),
                "project": None if root is None else {"root": str(root.folder), "why": root.why},
                "settings": [setting._asdict() for setting in in_effect],
                "next_cron_times": settings.trigger.next_cron_times,
                "warnings": settings.warnings,
            }
        )
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
    return {"config": config_schema, "rubric": rubric_schema, "filters": filters_schema}[name]()


def settings_of(config: Config) -> Iterator[Setting]:
    """All settings in effect."""
    effective = _effective(config)
    for setting in _walked(config, "", is_given=True):
        key, value, origin = setting
        if config.is_given(key):
            origin = "--set"
        elif origin == GIVEN and (row := config.origins.get(key, config.origins.get(re.sub(r"\.\d+", "", key)))):
            origin = row.place or "AgentJet's default"
        if value is None and key in effective:
            value, origin = effective[key]
        if key.endswith("_env") and value is not None:
            names = [name.strip() for name in value.split("|")]
            unset = [f"${name}" for name in names if not os.environ.get(name)]
            origin += f"; not set: {', '.join(unset)}" if unset else "; set"
        if _WEBHOOK.fullmatch(key) and value is not None:
            value = f"{urlsplit(value).scheme}://{urlsplit(value).hostname}/{REDACTED}"
        yield Setting(key, masked(value), origin)


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


def _walked(value: Any, key: str, *, is_given: bool) -> Iterator[Setting]:
    """The settings in a value: those of a section, or of sections in a list or by names."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            inner = f"{key}.{name}".lstrip(".")
            yield from _walked(getattr(value, name), inner, is_given=name in value.model_fields_set)
        return
    if isinstance(value, list):
        # Of a stage, what it does not set is no default of its own.
        value = [item.model_dump() if isinstance(item, OwnStage) else item for item in value]
    items = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
    if items and all(isinstance(item, BaseModel) for item in items.values()):
        for at, item in items.items():
            yield from _walked(item, f"{key}.{at}", is_given=True)
        return
    yield Setting(key, value, GIVEN if is_given else DEFAULT)


def text_of(value: Any) -> str:
    """A value for a table: a mapping in part."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # A workflow gets its whole file; `--json` has it.
    return text if not isinstance(value, Mapping) or len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
