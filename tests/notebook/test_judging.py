"""Judging from Python gives the verdicts of `flywheel filter`, in a notebook's event loop too."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import flywheel as package
from flywheel.errors import ConfigError, JudgeError
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
        with pytest.raises(ConfigError, match="line 2: it has no answer"):
            package.judge_replies(RUBRIC, [*REPLIES[:1], {"main_query": "1 + 1?", "answer": ""}], judge=settings)
        with pytest.raises(ConfigError, match=r"reply 1: .*not JSON serializable"):
            package.judge_replies(RUBRIC, [{"main_query": {1}, "answer": "2"}], judge=settings)
        with pytest.raises(ConfigError, match="base_urll"):
            package.judge_replies(RUBRIC, REPLIES, judge={"base_urll": judge.base_url})
        assert package.judge_replies(RUBRIC, [], judge=settings) == []
