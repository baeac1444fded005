"""`flywheel round` and `run --once` with rounds that fail, and with those that were left unfinished."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from flywheel.cli import status as status_command
from flywheel.config.file import load
from flywheel.daemon.status import Facts, snapshot
from flywheel.judge.usage import today
from flywheel.records.exclusion import NOT_RECORDED
from flywheel.store.kernel.database import read_once
from flywheel.training.data.rollout_file import step_file, write_step
from tests import warm
from tests.cli.conftest import Run
from tests.cli.terminal import COMMANDS, EVIL, in_terminal
from tests.daemon.rounds.workers import REFUSES, works
from tests.factories.config import write_config
from tests.factories.documented_json import compare, documented
from tests.factories.rollout import STEPS, rollout
from tests.factories.state import write_state
from tests.factories.trace import on_both_sides
from tests.factories.verdict import put_judged
from tests.waiting import wait_for

PYTHON = sys.executable
SECONDS = 120
DAEMON = {"round_attempts": 1, "failed_round_wait_seconds": 600}
HALFWAY = (
    '{"phase": "training", "step": 2, "steps": 5, "rollouts": 40, "rollouts_planned": 64, "reward_first": 0.25,'
    ' "reward": 0.5, "tokens_per_second": 812.0, "seconds_left": 125.0, "paused": "", "updated_at": "2026-01-01"}'
)
TOLD = "training, step 3 of 5, 40 of 64 rollouts, reward 0.500, 812 tokens/s, about 2 min 5 s left"


@pytest.fixture
def config(due_config: Callable[..., Path]) -> Path:
    return due_config(daemon=DAEMON)


Work = Callable[[str], None]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Says what runs in the worker's place; it fails until then."""
    work = partial(works, tmp_path, monkeypatch)
    work("echo out of memory; exit 1")
    return work


@pytest.mark.slow
def test_run_once_fails_with_its_round_and_tries_no_other(
    flywheel: Run, due_config: Callable[..., Path], work: Work
) -> None:
    config = due_config(daemon={**DAEMON, "failed_round_wait_seconds": 0})
    flywheel("run", "--once", "-c", config).fails(
        1, "r0001 failed: cannot finish r0001: its worker died with exit code 1 (out of memory)"
    )
    assert len(flywheel("status", "--json", "-c", config).json["rounds"]) == 1


@pytest.mark.slow
def test_a_round_after_a_failed_one_says_what_it_waits_for(flywheel: Run, config: Path, work: Work) -> None:
    assert flywheel("run", "--once", "-c", config).code == 1
    assert flywheel("run", "--once", "-c", config).code == 0, "nothing was due, so nothing failed"
    ran = flywheel("round", "-c", config)
    assert ran.code == 1
    assert "r0001 failed; the next attempt is at " in ran.err
    assert "traces" not in ran.err
    assert "--force" in ran.err


@pytest.mark.slow
def test_a_round_that_was_left_unfinished_is_the_one_that_is_finished(
    flywheel: Run, config: Path, work: Work
) -> None:
    work(f"{REFUSES}; kill -TERM $PPID; exec sleep 600")
    assert flywheel("round", "-c", config).code == 143
    work(REFUSES)
    ran = flywheel("round", "-c", config, "--json")
    assert ran.code == 0
    assert (ran.json["round"], ran.json["state"], ran.json["attempt"]) == ("r0001", "rejected", 1)


DEBUG = (
    'echo \'{"event": "step", "step": 1, "reward_mean": null, "reward_std": null, "undecided": 8}\' > '
    '"$3/metrics.jsonl"\necho \'{"event": "step", "step": 2, "reward_mean": 0.5, "reward_std": 0.25, "undecided": 1, '
    '"missed": 5}\' >> "$3/metrics.jsonl"\n'
    'cp -R rollouts "$3/rollouts"\n'
    'echo \'{"round_id": "debug", "outcome": "debug", "reason": "1 of 1 groups"}\' > "$3/result.json"\n'
)


@pytest.mark.slow
def test_a_debug_round_ends_with_its_rollouts(flywheel: Run, config: Path, work: Work, tmp_path: Path) -> None:
    work(DEBUG)
    undecided = rollout(reward=None, advantage=None, criteria=[], error="the judge\nwas away\x1b", answer="")
    write_step(step_file(tmp_path, 1), [rollout(steps=STEPS, answer=f"eight {EVIL}"), undecided])
    ran = flywheel("round", "--debug", "-c", config)
    assert ran.code == 0, ran.err
    assert not COMMANDS.search(ran.out)
    figures = "no reward, 8 undecided\nreward 0.500 ± 0.250, 1 undecided, 5 ended at a call without a recorded"
    assert figures in ran.out
    _, _, shown = ran.out.partition("\n\n")
    first, about, second, empty = shown.splitlines()
    assert first == "reward 0.25, 2 steps, right" and " → eight " in about
    assert second.startswith("reward –, 0 steps, the judge was away") and empty.endswith(" → (empty)")

    report = flywheel("round", "--debug", "--json", "-c", config).json
    assert [(each["reward"], each["failed"], len(each["steps"])) for each in report["rollouts"]] == [
        (0.25, ["right"], 2),
        (None, [], 0),
    ]
    compare(report, documented("round --debug"), "round --debug")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "options", "code", "said"),
    [
        ("y", [], 0, "Start it anyway? [y/N]"), ("n", [], 1, "Start it anyway? [y/N]"),
        ("", [], 1, "Start it anyway? [y/N]"), (None, [], 2, "give --yes"), (None, ["--yes"], 0, ""),
    ],
)  # fmt: skip
def test_a_forced_round_with_too_few_samples_asks_at_a_terminal_and_needs_yes_elsewhere(
    flywheel: Run, scarce: Path, work: Work, monkeypatch: pytest.MonkeyPatch, typed: str | None, options: list[str],
    code: int, said: str,
) -> None:  # fmt: skip
    work(REFUSES)
    terminal = io.StringIO("y\n" if typed is None else f"{typed}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: typed is not None)
    monkeypatch.setattr(sys, "stdin", terminal)
    flywheel("round", "--force", *options, "-c", scarce).fails(code, SHORTAGE, said)
    rounds = flywheel("status", "--json", "-c", scarce).json["rounds"]
    assert [each["state"] for each in rounds] == (["rejected"] if code == 0 else [])
    if code == 0:
        assert "so few" not in flywheel("round", "--force", "-c", scarce, "--set", "trigger.min_samples=4").err


@pytest.fixture
def scarce(due_config: Callable[..., Path]) -> Path:
    """The same with six samples, where a round needs forty."""
    return due_config(daemon=DAEMON, trigger={"min_samples": 40})


SHORTAGE = "6 of 40 samples are free: too few samples to learn much"


def test_a_base_model_that_is_not_there_fails_before_a_worker_starts(
    flywheel: Run, due_config: Callable[..., Path], work: Work, tmp_path: Path
) -> None:
    work(f"touch {tmp_path}/started; {REFUSES}")
    config = due_config(daemon=DAEMON, model={"base": f"{tmp_path}/nowhere"})
    for arguments in (["round"], ["round", "--force"], ["round", "--debug"]):
        flywheel(*arguments, "-c", config).fails(1, f"there is no directory {tmp_path}/nowhere")
    assert flywheel("run", "--once", "-c", config).code == 0
    assert "there is no directory" in flywheel("status", "-c", config).out
    assert not (tmp_path / "started").exists()


MEASURED = {
    "event": "step", "step": 2, "reward_mean": 0.5, "reward_std": 0.25, "loss": -0.125, "grad_norm": 1.5, "kl": 0.01,
    "entropy": 0.75, "logprob_gap": 0.002, "completion_tokens_mean": 120.5, "truncated_share": None, "seconds": {},
}  # fmt: skip


@pytest.fixture
def halfway(config: Path, work: Work, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """`flywheel round` in a process of its own, whose worker is in the middle until this is called."""
    go_on = tmp_path / "go-on"
    work(
        f"echo '{json.dumps(MEASURED)}' >> $3/metrics.jsonl; echo '{HALFWAY}' > $3/progress.json\n"
        f"while [ ! -e {go_on} ]; do sleep 0.1; done; {REFUSES}"
    )
    yield go_on.touch
    go_on.touch()


def program(config: Path) -> list[str]:
    """`flywheel` with the worker of `work`."""
    worker = str(config.with_name("worker"))
    return ["-c", f"import sys; from flywheel.cli import main; sys.executable = {worker!r}; main()"]


@pytest.mark.slow
def test_a_running_round_is_told_in_the_log_the_status_the_json_and_the_metrics(
    flywheel: Run,
    config: Path,
    work: Work,
    halfway: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        command = [PYTHON, *program(config), "round", "-c", config]
        process = warm.Popen(command, env={**os.environ, "TERM": "xterm"}, stdout=subprocess.PIPE, stderr=stderr)
    try:
        wait_for(lambda: "training, step 3" in log.read_text(), "the line of the log", seconds=SECONDS)
        assert f"r0001: {TOLD}\n" in log.read_text()

        state = flywheel("status", "--json", "-c", config).json
        live = state["live_round"]
        progress = live["progress"]
        assert (progress["phase"], progress["step"], progress["steps"]) == ("training", 2, 5)
        assert (live["round"], live["steps"], live["reward_first"], live["reward_last"]) == ("r0001", 2, 0.25, 0.5)

        assert re.search(rf"^r0001 +{re.escape(TOLD)}$", flywheel("status", "-c", config).out, re.M)

        assert live["measured"] == {name: value for name, value in MEASURED.items() if isinstance(value, float)}

        # A pipe is told of each step, and not of each rollout.
        settings = load(config)
        status = asyncio.run(read_once(settings.state_dir, snapshot, settings))

        def moved(rollouts: int, step: int) -> Facts:
            live = status["live_round"]
            now = live["progress"].model_copy(update={"rollouts": rollouts, "step": step})
            return status | {"live_round": live | {"progress": now}}

        looks = iter([moved(40, 2), moved(50, 2), moved(3, 3)])

        def look() -> Facts:
            try:
                return next(looks)
            except StopIteration:
                raise KeyboardInterrupt from None

        monkeypatch.setattr(status_command, "WATCH_SECONDS", 0)
        capsys.readouterr()
        with pytest.raises(KeyboardInterrupt):
            status_command._watch(look)
        shown = capsys.readouterr().out
        assert re.findall(r"step (\d) of 5, (\d+) of 64", shown) == [("3", "40"), ("4", "3")]
    finally:
        halfway()
        assert process.wait(SECONDS) == 0
        process.stdout.close()
    assert flywheel("status", "--json", "-c", config).json["live_round"] is None


@pytest.mark.slow
def test_a_running_round_is_shown_on_a_terminal(
    config: Path, work: Work, halfway: Callable[[], None], tmp_path: Path
) -> None:
    seen = in_terminal(
        tmp_path, ["round", "-c", config], columns=200, home=tmp_path, piped=True, interrupted_at=b"812 tokens/s",
        then=halfway, program=program(config),
    )  # fmt: skip
    assert seen.code == 0, seen.screen
    assert "r0001" in seen.screen and "training, step 3 of 5" in seen.screen
    assert seen.piped.startswith("10 tasks: 4 held out; of 6 for training 6 usable.\nr0001: rejected: no spread\n")


@pytest.mark.slow
def test_what_a_debug_round_took_of_the_judge_is_counted_once_and_under_the_budget(
    flywheel: Run, due_config: Callable[..., Path], work: Work, tmp_path: Path
) -> None:
    config = due_config(daemon=DAEMON, judge={"budget": {"tokens_per_day": 100_000}})
    before = flywheel("status", "--json", "-c", config).json["judge"]
    line = f'{{"day": "{today()}", "purpose": "rounds", "calls": 1, "prompt_tokens": 700, "completion_tokens": 50}}'
    result = '{"round_id": "debug", "outcome": "debug"}'
    work(
        f"echo '{line}' >> $3/usage.jsonl; cp $3/allowance.json {tmp_path}/lent.json\n"
        f"echo '{result}' > $3/result.json"
    )
    for times in (1, 2):
        assert flywheel("round", "--debug", "-c", config).code == 0
        judge = flywheel("status", "--json", "-c", config).json["judge"]
        assert judge["by_purpose"]["rounds"]["calls"] == times
        assert judge["tokens_today"] == before["tokens_today"] + times * 750
        lent = json.loads((tmp_path / "lent.json").read_text())["tokens"]
        assert lent == 100_000 - before["tokens_today"] - (times - 1) * 750
    due_config(daemon=DAEMON, judge={"budget": {"tokens_per_day": 1500}})
    flywheel("round", "--debug", "-c", config).fails(
        1, "judge.budget.tokens_per_day (1,500) is spent; judging resumes at midnight UTC"
    )


@pytest.mark.parametrize("options", [(), ("--force", "--yes"), ("--debug",)])
def test_a_round_without_free_samples_names_the_settings_that_leave_them_out(
    flywheel: Run, tmp_path: Path, options: tuple[str, ...]
) -> None:
    replies = [replace(each, prompt_reason=NOT_RECORDED) for each in on_both_sides(6, 4)]
    write_state(tmp_path / "state", put_judged, *replies)
    config = write_config(tmp_path, sources=[], gate={"min_tasks": 2, "min_power": 0})
    ran = flywheel("round", *options, "-c", config)
    assert ran.code == 1
    left_out = "no exact prompt (`training.inexact_prompts`): 6; held out (`ingest.train_ratio`): 4"
    assert f"no sample is free; {left_out}. No unjudged task could be used by a round" in ran.err
    assert "Wait" not in ran.err
