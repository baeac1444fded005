"""What `flywheel filter` prints beside its verdicts: progress, or nothing if it is quiet; and of a flaky judge."""

from __future__ import annotations

import random
import re

import pytest
from rich.progress import Task, TaskID

from flywheel.cli import progress_bars
from flywheel.cli.progress_bars import of_tasks, rate_of
from flywheel.errors import EXIT_FAILED
from flywheel.system import http_client
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


def test_lines_say_how_far_how_fast_and_how_long_seldom_and_not_if_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(in_all: int, steps: int, *, quiet: bool = False) -> str:
        with of_tasks("judging", in_all, quiet=quiet) as step:
            for _ in range(steps):
                step()
        out, err = capsys.readouterr()
        assert out == ""
        return err

    assert told(3, 1) == "", "lines are rare"
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)
    assert re.fullmatch(r"(judging: [12] of 3,000, [\d,.]+/(s|min), [\w ]+ left\n){2}", told(3_000, 2))
    more = re.findall(r"judging: (\d of \d), ", told(2, 4))
    assert more == ["1 of 2", "2 of 2", "3 of 3", "4 of 4"], "they go on where there are more than were counted"
    assert told(3, 1, quiet=True) == ""


@pytest.mark.parametrize(("seconds", "told"), [(0.0001, "10,000/s"), (0.4, "2.5/s"), (2.0, "30/min")])
def test_rates_have_as_many_figures_as_they_are_worth(seconds: float, told: str) -> None:
    task = Task(TaskID(0), "judging", total=3, completed=1, _get_time=lambda: seconds)
    task.start_time = 0.0
    assert rate_of(task) == told


TASKS, FAILING = 81, 0.4
WAYS = (
    "429", "500", "reset", "truncated body", "html", "error object", "cut off stream", "odd", "nonsense",
    "ignoring, nonsense", "truncated verdict", "missing criterion", "unknown choice", "empty choices",
    "empty content", "refusal", "cut off",
)  # fmt: skip


def flaky(seed: int) -> list[str]:
    """More behaviours than any run needs."""
    rng = random.Random(seed)
    return [rng.choice(WAYS) if rng.random() < FAILING else "good" for _ in range(20 * TASKS)]


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "retry_delay", lambda *_: 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 4])
def test_a_judge_that_fails_often_leaves_few_undecided(bench: Bench, no_waits: None, threads: int) -> None:
    bench.judge.behave(*flaky(seed=5))
    bench.settings = {"max_thread": threads}
    bench.lines(*["good: \\boxed{1}"] * TASKS)
    ran = bench("filter", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["judged"] == TASKS
    assert ran.json["undecided"] <= 0.05 * TASKS
