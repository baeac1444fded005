"""The screenshots: each is shown by a page, and `python -m scripts.screenshots` writes it again."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"


def constants_of(script: Path) -> dict[str, Any]:
    """The literals of a script, which needs a browser's library to be imported."""
    found = {}
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def test_every_screenshot_is_shown_and_written_by_the_script() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r'(?:\]\(|srcset="|src=")([^)":]+\.png)', page.read_text())
    }
    assert {path for path in shown if path.parent == IMAGES} == set(IMAGES.iterdir())
    script = constants_of(ROOT / "scripts" / "screenshots.py")
    written = {f"{name}-light.png" for name in script["PAGES"]} | {f"{name}-dark.png" for name in script["DARK"]}
    assert written == {path.name for path in IMAGES.iterdir()}
