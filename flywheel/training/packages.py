"""Which packages this interpreter lacks: `python -P -m flywheel.training.packages`, with JSON on standard input."""

from __future__ import annotations

import importlib.util
import json
import sys


def main() -> None:
    missing = [name for name in json.load(sys.stdin)["packages"] if importlib.util.find_spec(name) is None]
    print(json.dumps({"missing": missing}))


if __name__ == "__main__":
    main()
