"""Judging from Python gives the verdicts of `flywheel filter`, in a notebook's event loop too."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flywheel as package
from flywheel.errors import ConfigError, JudgeError
from flywheel.notebook import judging
from flywheel.records.verdict import Verdict
from tests.cli.filter_bench import CRITERIA, Bench, says
from tests.factories.judge_server import JudgeServer
from tests.waiting import until

GOOD = "good: \\boxed{1}"
ANSWERS = ["good: \\boxed{1}", "bad: \\boxed{0}", "good: nothing boxed", "good: \\boxed{1}"]
REPLIES: list[dict[str, Any]] = [{"main_query": f"{n} + 1?", "answer": text} for n, text in enumerate(ANSWERS)]
RUBRIC = {"id": "r", "threshold": 0.7, "criteria": CRITERIA}


def outcomes(found: list[Verdict]) -> list[str]:
    return [each.outcome.value for each in found]


def test_verdicts_are_those_of_filter_in_the_order_of_the_replies(tmp_path: Path, bench: Bench) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({**each, "task_id": f"t{n}"}) + "\n" for n, each in enumerate(REPLIES)))
    shown = bench.filter("--dry-run", "--tasks", file)
    by_id = {each["task_id"]: each for each in shown["verdicts"]}
    expected = [by_id[f"t{n}"] for n in range(len(REPLIES))]
    for way in (tmp_path / "flywheel.yaml", {"base_url": bench.judge.base_url, "model": "judge"}):
        found = package.judge_replies(tmp_path / "rubric.yaml", REPLIES, judge=way)
        assert outcomes(found) == [each["outcome"] for each in expected]
        assert [each.score for each in found] == [each["score"] for each in expected]
        names = [[result.criterion for result in each.results] for each in found]
        assert names == [[criterion["id"] for criterion in CRITERIA]] * len(REPLIES)
    assert not (tmp_path / "state").exists()


async def test_it_works_in_a_running_event_loop() -> None:
    with JudgeServer(says) as judge:
        settings = {"base_url": judge.base_url, "model": "judge"}
        here = await package.ajudge_replies(RUBRIC, REPLIES, judge=settings)
        # As the cell of a notebook does, which waits.
        assert outcomes(package.judge_replies(RUBRIC, REPLIES, judge=settings)) == outcomes(here)
        assert outcomes(here) == ["accepted", "rejected", "accepted", "accepted"]


def test_a_cache_asks_about_the_same_reply_once_and_about_another_one_of_the_same_id_again(tmp_path: Path) -> None:
    with JudgeServer(says) as judge:
        settings = {"base_url": judge.base_url, "model": "judge"}

        def judged(*answers: str, rubric: dict[str, Any] = RUBRIC) -> list[str]:
            replies = [{"main_query": "1 + 1?", "answer": text, "task_id": f"t{n}"} for n, text in enumerate(answers)]
            return outcomes(package.judge_replies(rubric, replies, judge=settings, cache=tmp_path / "cache"))

        assert judged(*ANSWERS[:2]) == ["accepted", "rejected"]
        calls = judge.calls
        assert judged(*ANSWERS[:2]) == ["accepted", "rejected"]
        assert judge.calls == calls
        assert judged(ANSWERS[1], ANSWERS[0]) == ["rejected", "accepted"]
        assert judge.calls == calls, "the order does not matter"
        assert judged("bad: \\boxed{9}") == ["rejected"]
        assert judge.calls == calls + 1
        # A changed rubric asks about its new criterion.
        more = {**RUBRIC, "criteria": [*CRITERIA, {"id": "short", "value": "It is short.", "weight": 1}]}
        assert judged(*ANSWERS[:2], rubric=more) == ["accepted", "rejected"]
        assert judge.calls == calls + 3
        assert judged(*ANSWERS[:2]) == ["accepted", "rejected"]
        assert judge.calls == calls + 3


@pytest.mark.slow
async def test_what_was_judged_before_an_interruption_is_kept(tmp_path: Path) -> None:
    with JudgeServer(says) as judge:
        judge.hold(after=6)
        settings = {"base_url": judge.base_url, "model": "judge", "max_thread": 1}
        replies = [{"main_query": f"{n} + 1?", "answer": GOOD} for n in range(40)]
        cell = asyncio.create_task(package.ajudge_replies(RUBRIC, replies, judge=settings, cache=tmp_path / "cache"))
        await until(lambda: judge.calls > 6, "some calls")
        cell.cancel()
        await asyncio.sleep(0)  # it is told to stop
        judge.let_go()
        with pytest.raises(asyncio.CancelledError):
            await cell
        asked = judge.calls
        again = await package.ajudge_replies(RUBRIC, replies, judge=settings, cache=tmp_path / "cache")
        assert outcomes(again) == ["accepted"] * 40
        assert judge.calls - asked < 40


class Frame:
    """What a DataFrame of pandas has of the interface that is used: it iterates over the names of its columns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.columns = list(dict.fromkeys(name for row in rows for name in row))
        self.rows = [{name: row.get(name, math.nan) for name in self.columns} for row in rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def to_dict(self, orient: str = "dict") -> list[dict[str, Any]]:
        assert orient == "records"
        return self.rows


def frame_of_pandas(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pandas").DataFrame(rows)


def records_of_pandas(rows: list[dict[str, Any]]) -> Any:
    return frame_of_pandas(rows).to_dict("records")


@pytest.mark.parametrize("table", [Frame, frame_of_pandas, records_of_pandas, lambda rows: Frame(rows).rows])
def test_a_data_frame_with_missing_values_is_judged_as_its_rows_are(tmp_path: Path, table: Any) -> None:
    rows: list[dict[str, Any]] = [
        {**REPLIES[0], "tools": [{"type": "function", "function": {"name": "add"}}]},
        {**REPLIES[1], "metadata": {"user_id": "u1", "score": 0.5}},
        {"messages": [{"role": "user", "content": "2 + 1?"}, {"role": "assistant", "content": ANSWERS[2]}]},
    ]
    with JudgeServer(says) as judge:
        settings = {"base_url": judge.base_url, "model": "judge"}
        expected = package.judge_replies(RUBRIC, rows, judge=settings, cache=tmp_path / "cache")
        calls = judge.calls
        found = package.judge_replies(RUBRIC, table(rows), judge=settings, cache=tmp_path / "cache")
        assert outcomes(found) == outcomes(expected) == ["accepted", "rejected", "accepted"]
        assert judge.calls == calls, "the same replies have the same verdicts"
        assert package.judge_replies(RUBRIC, table([]), judge=settings) == []


def test_values_of_numpy_and_pandas_are_those_of_python() -> None:
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    said = numpy.array([{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": GOOD}])
    metadata = {
        "turn": numpy.int64(3),
        "scores": numpy.array([[0.5, numpy.nan]]),
        "is_new": numpy.True_,
        "at": pandas.Timestamp("2026-11-20T10:00:00Z"),
        "gone": [pandas.NA, pandas.NaT, None],
    }
    [line] = judging._lines(pandas.DataFrame([{"messages": said, "metadata": metadata, "tools": pandas.NA}]))
    assert json.loads(line) == {
        "messages": said.tolist(),
        "metadata": {
            "turn": 3,
            "scores": [[0.5, None]],
            "is_new": True,
            "at": "2026-11-20T10:00:00+00:00",
            "gone": [None, None, None],
        },
        "task_id": json.loads(line)["task_id"],
    }


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("answer", "reply 2: it is of the type str, not a mapping"),
        (None, "reply 2: it is of the type NoneType, not a mapping"),
        ({"main_query": {1}, "answer": "2"}, "reply 2: `main_query` is of the type set, which is not JSON"),
        ({"answer": "2", "metadata": {"a": [1, b"x"]}}, r"reply 2: `metadata\.a\[1\]` is of the type bytes"),
        ({"answer": "2", "metadata": {"a": math.inf}}, r"reply 2: `metadata\.a` is infinite"),
        ({"main_query": "1 + 1?", "answer": math.nan}, "reply 2: it has no answer"),
        ({"main_query": math.nan, "answer": "2"}, "reply 2: .*question"),
        ({"messages": [{"role": 3}], "answer": "2"}, r"reply 2: `messages\[0\]\.role` is a number"),
        ({"main_query": "1 + 1?", "answer": "2", "extra": nested(100_000)}, "reply 2: it is nested too deeply"),
    ],
)
def test_what_a_reply_cannot_be_is_named_by_its_place_and_field(wrong: Any, why: str) -> None:
    settings = {"base_url": "http://127.0.0.1:9", "model": "judge"}
    with pytest.raises(ConfigError, match=why):
        package.judge_replies(RUBRIC, [REPLIES[0], wrong], judge=settings)


def test_a_column_or_one_reply_in_place_of_replies_is_refused() -> None:
    pandas = pytest.importorskip("pandas")
    settings = {"base_url": "http://127.0.0.1:9", "model": "judge"}
    for given in (pandas.Series(ANSWERS), REPLIES[0]):
        with pytest.raises(ConfigError, match="reply 1: it is of the type str, not a mapping"):
            package.judge_replies(RUBRIC, given, judge=settings)


def test_a_reply_that_cannot_be_judged_is_undecided_and_says_why() -> None:
    with JudgeServer(says, behaviour=["good", "unknown choice", "unknown choice"]) as judge:
        settings = {"base_url": judge.base_url, "model": "judge", "max_attempts": 1, "max_thread": 1}
        found = package.judge_replies(RUBRIC, REPLIES[:2], judge=settings)
        assert outcomes(found) == ["accepted", "undecided"]
        assert "cannot be used" in found[1].error


def test_what_is_wrong_is_said() -> None:
    with JudgeServer(says, behaviour="html") as judge:
        settings = {"base_url": judge.base_url, "model": "judge", "max_attempts": 1}
        with pytest.raises(JudgeError):
            package.judge_replies(RUBRIC, REPLIES, judge=settings)
        with pytest.raises(ConfigError, match=r"reply 2: it has no answer\. Give it one in 'answer'"):
            package.judge_replies(RUBRIC, [*REPLIES[:1], {"main_query": "1 + 1?", "answer": ""}], judge=settings)
        with pytest.raises(ConfigError, match="base_urll"):
            package.judge_replies(RUBRIC, REPLIES, judge={"base_urll": judge.base_url})
        assert package.judge_replies(RUBRIC, [], judge=settings) == []
