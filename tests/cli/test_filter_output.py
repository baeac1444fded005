"""What `flywheel filter` prints beside its verdicts: one line of progress on a terminal, nothing if it is quiet."""

from __future__ import annotations

import re

import pytest
from rich.progress import Task, TaskID

from flywheel.cli import progress_bars
from flywheel.cli.progress_bars import of_tasks, rate_of
from flywheel.errors import EXIT_FAILED
from tests.cli.filter_bench import Bench
from tests.cli.terminal import in_terminal

GOOD, BAD = "good: \\boxed{1}", "bad: \\boxed{0}"


@pytest.mark.slow
def test_a_terminal_gets_one_line_of_progress_and_the_totals(bench: Bench) -> None:
    bench.lines(*[GOOD, BAD] * 20)
    bench("ingest")
    dry = in_terminal(bench.folder, ["filter", "--dry-run", "--limit", "3"], columns=100, home=bench.folder)
    assert sum("a-task-with-a-long-name" in line for line in dry.lines) == 3
    seen = in_terminal(bench.folder, ["filter"], columns=100, home=bench.folder)
    assert seen.code == 0
    progress = [line for line in seen.lines if line.startswith("judging ")]
    assert progress and all(line.endswith("left") for line in progress)
    others = [line for line in seen.lines if line not in progress]
    assert len(others) == 3 and others[0] == "40 judged: 20 accepted, 20 rejected", seen.screen


@pytest.mark.slow
def test_a_terminal_gets_each_reason_for_no_verdict_once(bench: Bench) -> None:
    bench.lines(*[GOOD] * 7)
    bench.settings["max_thread"] = 1
    bench.judge.behave(*["ignoring, nonsense"] * 3, *["good"] * 20)
    bench("ingest")
    seen = in_terminal(bench.folder, ["filter"], columns=100, home=bench.folder)
    reasons = [line for line in seen.lines if "undecided: the judge's reply cannot be used" in line]
    assert len(reasons) == 1 and reasons[0][0] == "3", seen.screen


def test_quiet_prints_nothing_but_errors(bench: Bench) -> None:
    bench.lines(GOOD, BAD)
    for arguments in (["--dry-run"], ["--estimate"], []):
        ran = bench("filter", "--quiet", *arguments)
        assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert bench.judge.calls == 4
    bench.lines(GOOD)
    (bench.folder / "source.jsonl").rename(bench.folder / "elsewhere.jsonl")
    ran = bench("filter", "--quiet")
    assert ran.code == EXIT_FAILED and not ran.out and "source.jsonl" in ran.err


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
def test_an_unreachable_judge_promises_no_retry_that_nobody_makes(bench: Bench, arguments: list[str]) -> None:
    bench.lines(GOOD, BAD)
    bench.judge.behave("500")
    ran = bench("filter", *arguments)
    assert ran.code != 0
    assert "retried automatically" not in ran.out + ran.err


def test_a_line_says_how_far_how_fast_and_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)
    with of_tasks("judging", 3_000) as step:
        step()
        step()
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"(judging: [12] of 3,000, [\d,.]+/(s|min), [\w ]+ left\n){2}", err)


def test_lines_go_on_where_there_are_more_tasks_than_were_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)
    with of_tasks("judging", 2) as step:
        for _ in range(4):
            step()
    assert re.findall(r"judging: (\d of \d), ", capsys.readouterr().err) == ["1 of 2", "2 of 2", "3 of 3", "4 of 4"]


def test_lines_are_rare_and_a_quiet_one_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with of_tasks("judging", 3) as step:
        step()
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)
    with of_tasks("judging", 3, quiet=True) as step:
        step()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "told"), [(0.0001, "10,000/s"), (0.4, "2.5/s"), (2.0, "30/min")])
def test_rates_have_as_many_figures_as_they_are_worth(seconds: float, told: str) -> None:
    task = Task(TaskID(0), "judging", total=3, completed=1, _get_time=lambda: seconds)
    task.start_time = 0.0
    assert rate_of(task) == told
