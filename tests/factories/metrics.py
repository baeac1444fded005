"""Metrics as Prometheus reads them, and what its own tool says of files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def parsed(text: str) -> dict[str, list[Sample]]:
    found = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in found)
    assert len({family.name for family in found}) == len(found)
    return {family.name: family.samples for family in found}


def by(samples: list[Sample], *labels: str) -> dict[str, float]:
    return {" ".join(sample.labels[label] for label in labels): sample.value for sample in samples}


PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus has it)"
)


def promtool(*arguments: str | Path, text: str | None = None) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout + done.stderr
