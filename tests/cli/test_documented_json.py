"""What `--json` prints has the keys that docs/reference/json-output.json names, and no others."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema_rs import meta

from flywheel.cli.app import COMMANDS, app
from tests.cli.conftest import Run
from tests.factories.documented_json import FILE, SCHEMAS, compare, documented
from tests.sources.studio.writer import DATA


@pytest.fixture
def config(flywheel: Run, tmp_path: Path) -> Path:
    database = shutil.copy(DATA / "new_v2.sqlite", tmp_path)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"question": "1+1?", "answer": "2"}\nno JSON\n')
    config = tmp_path / "flywheel.yaml"
    sources = [{"path": database}, {"type": "jsonl", "path": str(lines)}]
    judge = {"base_url": "http://127.0.0.1:1/v1", "max_attempts": 1}
    config.write_text(json.dumps({"state": {"dir": "home"}, "sources": sources, "judge": judge}))
    assert flywheel("ingest").code == 0
    return config


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("status", ["status"]),
        ("ingest", ["ingest"]),
        ("audit", ["audit"]),
        ("dead-letters", ["dead-letters"]),
        ("tasks", ["tasks", "--state", "pending", "--limit", "2"]),
        ("show", ["show", "{task}"]),
        ("label", ["label", "{task}", "accept"]),
        ("labels", ["labels"]),
        ("doctor", ["doctor"]),
        ("doctor --plan", ["doctor", "--plan"]),
        ("backup", ["backup", "copy"]),
        ("filter", ["filter", "--dry-run", "--limit", "1"]),
    ],
)
def test_the_keys_are_those_of_the_schema(flywheel: Run, config: Path, name: str, arguments: list[str]) -> None:
    task = flywheel("tasks", "--limit", "1", "--json").json["tasks"][0]["task_id"]
    told = flywheel(*(each.format(task=task) for each in arguments), "--json", "-c", config).json
    compare(told, documented(name), name)


def test_the_keys_of_a_deep_audit(flywheel: Run, config: Path) -> None:
    compare(flywheel("audit", "--deep", "--json", "-c", config).json, documented("audit --deep"), "audit --deep")


def test_the_keys_of_why(flywheel: Run, config: Path) -> None:
    task = flywheel("tasks", "--state", "pending", "--limit", "1", "--json").json["tasks"][0]["task_id"]
    compare(flywheel("why", task, "--json").json, documented("why"), "why")


def test_the_keys_of_single_actions(flywheel: Run, config: Path, tmp_path: Path) -> None:
    task = flywheel("tasks", "--limit", "1", "--json").json["tasks"][0]["task_id"]
    flywheel("label", task, "accept", "-c", config)
    for name, arguments in (
        ("config show", ["config", "show"]),
        ("dead-letters", ["dead-letters", "show", "1"]),
        ("dead-letters drop", ["dead-letters", "drop", "1"]),
        ("labels --out", ["labels", "--out", str(tmp_path / "labels.jsonl")]),
        ("labels import", ["labels", "import", str(tmp_path / "labels.jsonl")]),
        ("prune", ["prune", "--dry-run"]),
    ):
        ran = flywheel(*arguments, "--json", "-c", config)
        compare(ran.json, documented(name), name)


def test_each_schema_is_one_and_says_whether_other_keys_may_stand_there() -> None:
    meta.validate(json.loads(FILE.read_text()))
    for name, schema in SCHEMAS.items():
        for each in objects(schema):
            assert each["additionalProperties"] is False and set(each["required"]) <= each["properties"].keys(), name


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The objects of a schema whose keys it names."""
    if isinstance(schema, dict):
        if "properties" in schema and isinstance(schema["properties"], dict) and "required" in schema:
            yield schema
        for each in schema.values():
            yield from objects(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from objects(each)


def test_every_command_with_the_option_is_named() -> None:
    for name in COMMANDS.values():
        importlib.import_module(f"flywheel.cli.{name}")
    root = typer.main.get_command(app)
    named = {name for name in with_json("", root) if not name.startswith("train ")}
    assert len(named) > 20
    assert named <= SCHEMAS.keys()


def with_json(name: str, command: Any) -> Iterator[str]:
    if "--json" in {option for each in command.params for option in each.opts}:
        yield name
    for inner, each in getattr(command, "commands", {}).items():
        yield from with_json(f"{name} {inner}".strip(), each)
