"""The documentation says what is true."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from flywheel.config import parse
from scripts.configuration_page import PAGE, page

ROOT = Path(__file__).parent.parent


def test_the_configuration_page_is_the_settings() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.configuration_page"


def test_every_link_between_pages_leads_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


def test_every_configuration_in_the_pages_is_valid() -> None:
    found = 0
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"```yaml\n# flywheel\.yaml\n(.*?)```", document.read_text(), re.S):
            parse(yaml.safe_load(block), str(document), ROOT)
            found += 1
    assert found > 0
