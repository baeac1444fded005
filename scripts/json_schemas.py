"""Writes the JSON Schemas of files that users edit: `python -m scripts.json_schemas`."""

from __future__ import annotations

import json
from pathlib import Path

from flywheel.cli.settings import SCHEMAS, schema_of

ROOT = Path(__file__).parent.parent


if __name__ == "__main__":
    for name, path in SCHEMAS.items():
        (ROOT / path).write_text(json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n")
