"""The shapes that docs/reference/json.md gives for what `--json` prints, and what was printed compared with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()


def blocks(command: str) -> list[str]:
    """The shapes in the section of a command."""
    section = re.search(rf"^## `{command} --json`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None, command
    return re.findall(r"```\n(.*?)```", section[1], re.DOTALL)


def documented(command: str) -> Any:
    """The shape that `COMMAND --json` prints, with every key that stands alone leading to null."""
    return parsed(blocks(command)[0])


def parsed(text: str) -> Any:
    text = " ".join(text.split())
    # `"key": "one" | "other"` names the values, `{"name": n}` any name: neither has keys of its own.
    text = re.sub(r"\{\w+: n\}|(?<=: )\"[\w -]+\"(?: \| \"[\w -]+\")*", "null", text).replace(" or null", "")
    text = re.sub(r"(\"\w+\")(?=\s*[,}\]])", r"\1: null", text)
    return json.loads(text)


def compare(told: Any, shape: Any, where: str, may_lack: frozenset[str] = frozenset()) -> None:
    if isinstance(shape, list) and told:
        for each in told:
            compare(each, shape[0], f"{where}[]", may_lack)
    elif isinstance(shape, dict) and told is not None:
        assert set(told) - set(shape) == set(), f"{where} has keys that the page does not name"
        assert set(shape) - set(told) <= may_lack, f"{where} lacks keys that the page names"
        for key, value in shape.items():
            if key in told:
                compare(told[key], value, f"{where}.{key}", may_lack)
