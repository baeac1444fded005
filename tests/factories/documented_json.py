"""What docs/reference/json-output.json says that `--json` prints, and what was printed compared with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema_rs import Draft202012Validator

FILE = Path(__file__).parents[2] / "docs" / "reference" / "json-output.json"
SCHEMAS = json.loads(FILE.read_text())["$defs"]


def documented(command: str) -> Any:
    """The JSON Schema of what `COMMAND --json` prints, with the shapes that commands share."""
    return {"$ref": f"#/$defs/{command.replace(' ', '%20')}", "$defs": SCHEMAS}


def compare(told: Any, schema: Any, where: str) -> None:
    """What was printed has all keys that the schema requires, and none that it does not name."""
    problems = [f"{where}: {each.instance_path}: {each}" for each in Draft202012Validator(schema).iter_errors(told)]
    assert not problems, "\n".join(problems)
