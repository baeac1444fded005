"""Exporting a state that was made for the test, and reading the file as its consumer does."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import Run, flywheel
from tests.training.data.formats.filling import Judged, fill

if TYPE_CHECKING:
    import datasets

__all__ = ["flywheel"]

TRL = importlib.util.find_spec("trl")
TEMPLATES = Path(TRL.origin).parent / "chat_templates" if TRL and TRL.origin else Path("without-trl")
"""The chat templates that TRL ships. TRL and `datasets` take seconds to import: tests do it when they run."""

Exported = Callable[..., Path]
Load = Callable[..., "datasets.Dataset"]


@pytest.fixture
def exported(flywheel: Run, tmp_path: Path) -> Exported:
    """Makes a state of tasks, exports it in a format and gives the file, which lies alone in its directory."""

    def export(name: str, judged: Iterable[Judged], *options: str) -> Path:
        asyncio.run(fill(tmp_path / "home", judged))
        folder = tmp_path / name
        folder.mkdir()
        out = folder / ("train.parquet" if name == "verl" else "train.jsonl")
        ran = flywheel("export", "--format", name, "--out", out, *options)
        assert ran.code == 0, ran.err
        return out

    return export


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`datasets.load_dataset` of one file, with its cache in the test's directory."""

    import datasets

    def load(path: Path, **options: Any) -> datasets.Dataset:
        kind = "parquet" if path.suffix == ".parquet" else "json"
        cache = str(tmp_path / "cache")
        return datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=cache, **options)

    return load
