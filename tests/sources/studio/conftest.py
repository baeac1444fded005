"""An empty database, a reader of it and what has been stored of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flywheel.sources.studio.reader import StudioReader
from tests.sources.studio.reading import QUICK, Ledger
from tests.sources.studio.writer import Studio


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    return Studio(tmp_path / "studio.sqlite")


@pytest.fixture
def reader(studio: Studio) -> Iterator[StudioReader]:
    made = StudioReader(studio.path, QUICK)
    yield made
    made.close()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()
