"""Names of languages, in `language_names.json`: by ISO 639-1 code the English name, then stems of other names.

The stems are of the language's own name and of its names in neighbouring languages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

NAMES: Final[Mapping[str, list[str]]] = json.loads(
    Path(__file__).with_name("language_names.json").read_text(encoding="utf-8")
)


def code_of(name: str) -> str | None:
    """The code of a language by its code (`de`, `de-AT`), English name or own name; None if it is unknown."""
    wanted = name.strip().casefold()
    if (code := wanted.replace("_", "-").partition("-")[0]) in NAMES:
        return code
    return next((code for code, names in NAMES.items() if wanted in map(str.casefold, names)), None)
