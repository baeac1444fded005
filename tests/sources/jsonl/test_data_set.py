"""Data sets of every form, and what is said of those that cannot be read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import ConfigError, TrainError
from flywheel.sources.jsonl.data_set import DataSet, lines_of, trainer_python
from flywheel.tuner import DatasetConfig

ROWS = [{"question": f"What is {n} plus 1?", "answer": str(n + 1), "level": n} for n in range(3)]
PYTHON = Path(sys.executable)


def read(given: Any) -> list[dict[str, Any]]:
    with lines_of(DataSet.of(given), PYTHON, "read it") as lines:
        return [json.loads(line) for line in lines]


def refusal(given: Any, python: Path = PYTHON) -> str:
    with pytest.raises((ConfigError, TrainError)) as refused, lines_of(DataSet.of(given), python, "read it"):
        pass
    return str(refused.value)


@pytest.fixture
def forms(tmp_path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.csv").write_text(
        "question,answer,level\n" + "".join(f"{r['question']},{r['answer']},{r['level']}\n" for r in ROWS)
    )
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for subset in ("main", "other"):
        folder = tmp_path / "folder" / subset
        folder.mkdir(parents=True)
        for split, rows in (("train", ROWS), ("test", ROWS[:1])):
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}-00000.parquet")
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n"
        + "".join(f"  - {{split: {split}, path: {name}/{split}-*}}\n" for split in ("train", "test"))
        for name in ("main", "other")
    )
    (tmp_path / "folder" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.training
def test_every_form_has_the_same_rows(forms: Path) -> None:
    for name in ("rows.jsonl", "rows.json", "rows.parquet"):
        assert read(forms / name) == ROWS
    assert read(pytest.importorskip("datasets").Dataset.from_list(ROWS)) == ROWS
    assert read(forms / "rows.csv") == [{**row, "answer": int(str(row["answer"]))} for row in ROWS]
    folder = str(forms / "folder")
    assert read(DatasetConfig(path=folder, name="main")) == ROWS
    assert read({"path": folder, "name": "main", "split": "test"}) == ROWS[:1]
    assert read({"path": str(forms / "rows.jsonl"), "split": "train[:2]"}) == ROWS[:2]
    (forms / "lines").mkdir()
    (forms / "lines" / "train.jsonl").write_text((forms / "rows.jsonl").read_text())
    assert read(forms / "lines") == ROWS
    assert DatasetConfig(path=folder, name="other").preview(2) == ROWS[:2]
    assert "Unknown split" in refusal({"path": folder, "name": "main", "split": "dev"})


@pytest.mark.slow
@pytest.mark.training
def test_a_data_set_of_the_hub_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    writer = pytest.importorskip("datasets.arrow_writer").ArrowWriter
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    # As `load_dataset` leaves it there.
    cached = tmp_path / "datasets" / "someone___sums" / "main" / "0.0.0" / ("a" * 40)
    cached.mkdir(parents=True)
    features = datasets.Dataset.from_list(ROWS).features
    lines = writer(path=str(cached / "sums-train.arrow"), features=features)
    for row in ROWS:
        lines.write(row)
    lines.finalize()
    split = {"name": "train", "num_bytes": 1, "num_examples": len(ROWS), "dataset_name": "sums"}
    datasets.DatasetInfo(
        features=features,
        builder_name="parquet",
        dataset_name="sums",
        config_name="main",
        version="0.0.0",
        splits={"train": split},
    ).write_to_directory(str(cached))
    assert read(DatasetConfig(path="someone/sums", name="main")) == ROWS


@pytest.mark.slow
@pytest.mark.training
def test_a_data_set_of_the_hub_needs_a_cache_without_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    said = refusal(DatasetConfig(path="someone/sums", name="main"))
    assert "that can be reached or is in the cache" in said
    assert f"{PYTHON} -c \"import datasets; datasets.load_dataset('someone/sums', 'main')\"" in said


@pytest.mark.slow
def test_a_missing_file_is_named_and_so_is_an_interpreter_that_cannot_read(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.jsonl")
    (tmp_path / "rows.json").write_text("[]")
    assert "does not start" in refusal(tmp_path / "rows.json", tmp_path / "no-python")
    (tmp_path / "python").write_text("#!/bin/sh\necho 'No module named flywheel' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    assert "cannot run Flywheel: No module named flywheel" in refusal(tmp_path / "rows.json", tmp_path / "python")


def test_question_and_right_answer_have_the_keys_that_are_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"problem": "1+1?", "solution": 2, "metadata": {"a": 1}}) + "\n")
    assert read({"path": str(rows), "prompt_key": "problem", "response_key": "solution"}) == [
        {
            "problem": "1+1?",
            "solution": 2,
            "main_query": "1+1?",
            "answer": 2,
            "metadata": {"a": 1, "reference": 2},
        }
    ]


def test_the_interpreter_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLYWHEEL_TRAINER_PYTHON", raising=False)
    assert trainer_python(None) == PYTHON
    monkeypatch.setenv("FLYWHEEL_TRAINER_PYTHON", "of/the/environment")
    assert trainer_python(None) == Path.cwd() / "of/the/environment"
    assert trainer_python("/given") == Path("/given")
