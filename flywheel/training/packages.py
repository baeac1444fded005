"""Which packages an interpreter lacks: `python -P -m flywheel.training.packages`, with JSON on standard input."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable


def missing_of(packages: Iterable[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def main() -> None:
    print(json.dumps({"missing": missing_of(json.load(sys.stdin)["packages"])}))


if __name__ == "__main__":
    main()
