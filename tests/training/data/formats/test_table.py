"""The tables of `flywheel export`: a row for each reply, a column for each criterion of each rubric."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, insert, select, update

from flywheel.records.states import Split, TaskState
from flywheel.records.verdict import Outcome
from flywheel.store.kernel.schema import tasks, verdicts
from flywheel.store.verdicts import point
from flywheel.store.views.task_list import ExportedTask
from flywheel.training.data.export_formats import csv_rows, named, parquet_rows, row
from tests.cli.conftest import Run
from tests.factories.state import write_state
from tests.factories.trace import START, reply
from tests.training.data.formats.filling import Judged, bad, every_kind, exported, fill, good, line

TEXT = st.text(st.characters(), max_size=30) | st.sampled_from(
    [
        "=1+1",
        "+49",
        "-5",
        "@home",
        'say "no", or\r\nyes',
        "六 🎉\x00\u2028",
        "lone \ud800",
        "",
        " ",
        "a\rb",
        "NA",
        "1.0",
    ]
)
HASHES = {"first": "a" * 64, "second": "b" * 64, "chain": "chain:" + "c" * 64}


def result(criterion: str, value: float, *, passed: bool) -> dict[str, Any]:
    return {"criterion": criterion, "choice": "", "value": value, "passed": passed, "reason": ""}


def judged(conn: Connection) -> None:
    """The first task by one rubric, the second by another with the same criterion, the third by a filter chain."""
    given = [
        (
            1,
            HASHES["first"],
            Outcome.ACCEPTED,
            [result("correct", 1.0, passed=True), result("kind", 0.5, passed=False)],
        ),
        (2, HASHES["second"], Outcome.REJECTED, [result("correct", 0.25, passed=False)]),
        (3, HASHES["chain"], Outcome.REJECTED, []),
    ]
    for number, rubric, outcome, results in given:
        conn.execute(
            insert(verdicts).values(
                task_id=number, rubric_hash=rubric, judge_hash="judge", outcome=outcome.value, score=0.75,
                results=results, created_at=START.isoformat(),
            )
        )  # fmt: skip
    point(conn, [number for number, *_ in given])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    entries = [
        Judged(reply(1), TaskState.CONSUMED, None),
        bad(reply(2)),
        bad(reply(3)),
        Judged(reply(4), TaskState.DEAD, None),
        Judged(reply(5), TaskState.HELD, None, Split.HELD_OUT),
        Judged(reply(6), TaskState.WITHDRAWN, None),
    ]
    home = tmp_path / "home"
    asyncio.run(
        fill(home, [entry if entry.score is None else Judged(entry.reply, entry.state, None) for entry in entries])
    )
    write_state(home, judged)
    return home


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_reply_and_columns_for_the_criteria_of_each_rubric(flywheel: Run, home: Path) -> None:
    ran = flywheel("export", "--format", "csv", "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["out"], ran.json["lines"], ran.json["state"], ran.json["split"]) == (
        "replies.csv",
        5,
        "all",
        "all",
    )
    found = rows_of(home.parent / "replies.csv")
    criteria = ["passed.aaaaaaaa.correct", "value.aaaaaaaa.correct", "passed.aaaaaaaa.kind", "value.aaaaaaaa.kind",
                "passed.bbbbbbbb.correct", "value.bbbbbbbb.correct"]  # fmt: skip
    assert [name for name in found[0] if "." in name] == criteria
    assert [[each[name] for name in criteria] for each in found] == [
        ["True", "1.0", "False", "0.5", "", ""],
        ["", "", "", "", "False", "0.25"],
        *([[""] * 6] * 3),
    ]
    shown = [(each["state"], each["accepted"], each["score"], each["split"]) for each in found]
    assert shown == [
        ("consumed", "True", "0.75", "train"),
        ("rejected", "False", "0.75", "train"),
        ("rejected", "False", "0.75", "train"),
        ("dead", "", "", "train"),
        ("held", "", "", "held-out"),
    ]
    assert [each["rubric"] for each in found] == [*HASHES.values(), "", ""]
    assert found[0]["task_id"] == line(reply(1))["task_id"]
    assert json.loads(found[0]["prompt"]) == line(reply(1))["prompt"]


def test_criteria_of_one_rubric_are_named_without_it(flywheel: Run, home: Path) -> None:
    write_state(home, lambda conn: conn.execute(update(verdicts).where(verdicts.c.task_id == 2).values(results=[])))
    assert flywheel("export", "--format", "csv").code == 0
    names = [name for name in rows_of(home.parent / "replies.csv")[0] if "." in name]
    assert names == ["passed.correct", "value.correct", "passed.kind", "value.kind"]


def test_a_selection_applies_to_a_table_too(flywheel: Run, home: Path) -> None:
    ran = flywheel(
        "export", "--format", "csv", "--state", "rejected", "--split", "train", "--json", "--out", "bad.csv"
    )
    assert (ran.json["lines"], len(rows_of(home.parent / "bad.csv"))) == (2, 2)


@pytest.mark.training
def test_parquet_has_the_same_with_types(flywheel: Run, home: Path) -> None:
    import pyarrow.parquet

    for name in ("csv", "parquet"):
        assert flywheel("export", "--format", name).code == 0
    found = pyarrow.parquet.read_table(home.parent / "replies.parquet").to_pylist()
    texts = [{name: "" if each is None else str(each) for name, each in one.items()} for one in found]
    assert texts == rows_of(home.parent / "replies.csv")
    assert found[0]["passed.aaaaaaaa.correct"] is True
    assert found[1]["passed.aaaaaaaa.correct"] is None
    assert found[3]["score"] is None


def sample(question: str, answer: str, criterion: str) -> ExportedTask:
    made = line(reply(1))
    made = {**made, "question": question, "answer": answer}
    return exported(made, 0.5, [result(criterion, 0.1, passed=True)], HASHES["first"])


def stored(text: str) -> str:
    """UTF-8 has no lone surrogates."""
    return text.encode("utf-8", "replace").decode()


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5), st.text(min_size=1, max_size=5))
def test_any_text_comes_back_from_csv(texts: list[tuple[str, str]], criterion: str) -> None:
    records = [row(sample(*pair, criterion)) for pair in texts]
    file = io.BytesIO()
    with csv_rows(file, frozenset(records[0])) as write:
        for record in records:
            write(record)
    found = list(csv.DictReader(io.StringIO(file.getvalue().decode(), newline="")))
    assert [(each["question"], each["answer"]) for each in found] == [tuple(map(stored, pair)) for pair in texts]
    assert {each[f"value.{stored(criterion)}"] for each in found} == {"0.1"}
    assert file.getvalue().count(b"\r\n") >= len(texts) + 1


@pytest.mark.training
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_pandas_and_pyarrow_read_what_the_state_has(texts: list[tuple[str, str]]) -> None:
    import pandas
    import pyarrow.parquet

    records = [row(sample(*pair, "correct")) for pair in texts]
    expected = [tuple(map(stored, pair)) for pair in texts]
    files = io.BytesIO(), io.BytesIO()
    for file, writer in zip(files, (csv_rows, parquet_rows), strict=True):
        with writer(file, frozenset(records[0])) as write:
            for record in records:
                write(record)
        file.seek(0)
    table = pyarrow.parquet.read_table(files[1]).to_pylist()
    assert [(each["question"], each["answer"]) for each in table] == expected
    frame = pandas.read_csv(files[0], keep_default_na=False, dtype={"question": str, "answer": str})
    assert list(zip(frame["question"], frame["answer"], strict=True)) == expected
    assert list(frame["value.correct"]) == [0.1] * len(texts)


def test_names_of_criteria_that_look_like_columns() -> None:
    columns = {"value.aaaaaaaa.score", "passed.aaaaaaaa.score", "value.aaaaaaaa.a.b", "passed.aaaaaaaa.a.b"}
    names = list(named(frozenset(row(sample("", "", "x"))) | columns).values())
    assert len(names) == len(set(names))
    assert {"score", "value.score", "value.a.b", "value.x"} <= {*names}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["csv", pytest.param("parquet", marks=pytest.mark.training)])
def test_many_replies_need_little_memory(flywheel: Run, tmp_path: Path, name: str) -> None:
    answer = "\\boxed{1} " + "because " * 500
    told = [good(reply(number, answer=f"{number} {answer}")) for number in range(6_000)]
    asyncio.run(fill(tmp_path / "home", told))
    del told
    size = 6_000 * len(answer)
    # The first run imports what writes the file.
    assert flywheel("export", "--format", name).code == 0
    tracemalloc.start()
    try:
        assert flywheel("export", "--format", name, "--force").code == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / f"replies.{name}").exists()
    assert peak < size, f"{peak:,} of {size:,} bytes"


def test_every_kind_of_reply_is_in_the_table(flywheel: Run, tmp_path: Path) -> None:
    """Also those that trainers cannot use: with images, structured output, without an answer."""
    asyncio.run(fill(tmp_path / "home", [good(told) for told in every_kind()]))
    ran = flywheel("export", "--format", "csv", "--json")
    assert (ran.json["lines"], ran.json["left_out"]) == (10, {})
    keys = write_state(
        tmp_path / "home", lambda conn: list(conn.execute(select(tasks.c.key).order_by(tasks.c.id)).scalars())
    )
    assert [each["task_id"] for each in rows_of(tmp_path / "replies.csv")] == keys
