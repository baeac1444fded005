"""Writes `tests/seconds.tsv` from pytest's reports (`--junitxml`): python -m scripts.test_seconds REPORT [REPORT …].

Modules that no report has keep their seconds; those that are gone are left out.
"""

from __future__ import annotations

import sys
from collections import Counter

from junitparser import JUnitXml

from tests.circles import SECONDS_FILE, all_modules, seconds_of_modules


def main(reports: list[str]) -> None:
    modules = {module.removesuffix(".py").replace("/", "."): module for module in all_modules()}
    measured: Counter[str] = Counter()
    for report in reports:
        for suite in JUnitXml.fromfile(report):
            for case in suite:
                if module := modules.get(case.classname or ""):
                    measured[module] += case.time
    seconds = {module: measured.get(module, old) for module, old in seconds_of_modules().items()} | measured
    lines = [f"{module}\t{seconds[module]:.1f}\n" for module in modules.values() if module in seconds]
    SECONDS_FILE.write_text("".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
