"""`flywheel rollouts`, and the list at the end of a debug round."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.show import short_lines
from flywheel.training.data.rollout_file import in_short, step_file, write_step
from tests.cli.conftest import Run
from tests.cli.terminal import COMMANDS, EVIL
from tests.factories.documented_json import compare, documented
from tests.factories.rollout import IN_ONE_FILE, REASON, STEPS, rollout, sample

QUESTION = "What is 3 plus 4? Think about it as long as you need, and put the final number into a box."


def task(name: str, query: str = QUESTION) -> dict[str, Any]:
    return {
        "task_id": name,
        "query": query,
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": query}],
    }


def write(state: Path, *rollouts: Any, name: str = "r0007") -> Path:
    directory = state / "rounds" / name
    directory.mkdir(parents=True, exist_ok=True)
    tasks = {each["task_id"]: each for each in map(task, ("t-1", "t-2"))}
    (directory / "spec.json").write_text(json.dumps({"train": list(tasks.values()), "held_out": []}))
    path = step_file(directory, 1)
    write_step(path, rollouts)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "flywheel.yaml").write_text("state: {dir: state}\nsources: []\n")
    return tmp_path


def test_conversations_are_shown_with_rewards_and_failed_criteria(flywheel: Run, folder: Path) -> None:
    undecided = rollout(reward=None, advantage=None, criteria=[], error="the judge was away", seed=8)
    looping = rollout(task_id="t-2", group=1, steps=STEPS, truncated=True, loop="'so' is repeated")
    path = write(folder / "state", rollout(), undecided, looping)
    shown = flywheel("rollouts", "r0007").out
    assert shown.startswith(
        f"""
step 1, t-1: 2 rollouts, mean reward 0.25
  Prompt
    [system] Be brief.
    [user] {QUESTION}
  1. reward 0.25, advantage -0.87, seed 7
    Answer
      \\boxed{{8}}
    ✗ right: no  {REASON}
  2. reward –, seed 8
"""
    )
    assert "    no reward: the judge was away\n\nstep 1, t-2: 1 rollout, mean reward 0.25\n" in shown
    assert "  1. reward 0.25, advantage -0.87, truncated, 'so' is repeated, seed 7\n    Steps\n" in shown
    assert '      [assistant calls add] {"a": 3, "b": 4}\n      [tool add] 7\n' in shown
    (path.parents[1] / "spec.json").unlink()
    without_tasks = flywheel("rollouts", "r0007").out
    assert "\\boxed{8}" in without_tasks and "Prompt" not in without_tasks
    # Of an earlier version, which had the rollouts of all steps in one file.
    shutil.copytree(IN_ONE_FILE, folder / "state" / "rounds" / "r0001")
    earlier = flywheel("rollouts", "r0001", "--step", "2", "--task", "t-1").out
    assert earlier.startswith("\nstep 2, t-1: 4 rollouts, mean reward 0.50\n")


def test_of_the_users_agent_its_own_reward_and_metrics_are_shown(flywheel: Run, folder: Path) -> None:
    done = {"reward": 2.0, "metrics": {"boxes": 3.0}, "seconds": 1.5, "failure": None}
    bad = {"reward": None, "metrics": {}, "seconds": 5.0, "failure": "timeout"}
    error = "the agent failed (timeout): it ran longer than 5 s"
    failed = rollout(reward=None, advantage=None, criteria=[], error=error, program=bad, seed=8)
    write(folder / "state", rollout(program=done), failed)
    shown = flywheel("rollouts", "r0007").out
    assert "  1. reward 0.25, advantage -0.87, own reward 2, boxes 3, seed 7\n" in shown
    assert "  2. reward –, seed 8\n" in shown
    assert f"    no reward: {error}\n" in shown
    [group] = flywheel("rollouts", "r0007", "--json").json["groups"]
    assert [each["program"] for each in group["rollouts"]] == [done, bad]


def test_a_dropped_group_says_why(flywheel: Run, folder: Path) -> None:
    miss = rollout(reward=None, advantage=None, criteria=[], dropped="misses", error="no recorded result for add({})")
    write(folder / "state", miss, rollout(task_id="t-2", group=1, advantage=None, dropped="spread"))
    shown = flywheel("rollouts", "r0007").out
    assert (
        "t-1: 1 rollout, no reward\n"
        "  not trained on: too many of its rollouts ended at a call without a recorded result\n" in shown
    )
    assert "    no reward: no recorded result for add({})\n" in shown
    assert "t-2: 1 rollout, mean reward 0.25\n  not trained on: its rewards are equal\n" in shown


def test_what_a_model_wrote_does_not_command_the_terminal(flywheel: Run, folder: Path) -> None:
    criteria = [{"criterion": EVIL, "choice": EVIL, "value": 0.0, "passed": False, "reason": EVIL}]
    steps = [{"role": "tool", "name": EVIL, "content": EVIL}]
    tokens = sample(text=[EVIL] * 6)
    evil = rollout(answer=EVIL, criteria=criteria, steps=steps, error=EVIL, samples=[tokens])
    write(folder / "state", evil)
    shown = flywheel("rollouts", "r0007").out
    assert not COMMANDS.search(shown)
    assert "evil" in shown
    assert flywheel("rollouts", "r0007", "--json").json["groups"][0]["rollouts"][0]["answer"] == EVIL


def test_tasks_and_steps_can_be_asked_for(flywheel: Run, folder: Path) -> None:
    lines = [
        rollout(step=step, task_id=name, group=group) for step in (1, 2) for group, name in enumerate(("t-1", "t-2"))
    ]
    write(folder / "state", *lines)

    def asked(*arguments: str) -> list[tuple[int, str]]:
        report = flywheel("rollouts", "r0007", *arguments, "--json").json
        return [(group["step"], group["task_id"]) for group in report["groups"]]

    assert asked() == [(1, "t-1"), (1, "t-2"), (2, "t-1"), (2, "t-2")]
    assert asked("--task", "t-2") == [(1, "t-2"), (2, "t-2")]
    assert asked("--task", "t-2", "--step", "2") == [(2, "t-2")]
    flywheel("rollouts", "r0007", "--task", "t-9", "--step", "2").fails(
        1, "cannot show rollouts of r0007: none is of task t-9 and step 2"
    )


def test_the_keys_of_json_are_those_of_the_page(flywheel: Run, folder: Path) -> None:
    write(folder / "state", rollout(steps=[{}]))
    shape = documented("rollouts")
    with_tokens = flywheel("rollouts", "r0007", "--tokens", "--json").json
    compare(with_tokens, shape, "rollouts")
    assert "samples" in with_tokens["groups"][0]["rollouts"][0]
    compare(flywheel("rollouts", "r0007", "--json").json, shape, "rollouts")
    assert "samples" not in flywheel("rollouts", "r0007", "--json").out


@pytest.mark.parametrize("name", ["r0008", "../rounds/r0007", ".", "rounds"])
def test_a_round_that_is_none_is_named(flywheel: Run, folder: Path, name: str) -> None:
    write(folder / "state", rollout())
    ran = flywheel("rollouts", name)
    assert (ran.code, ran.out) == (1, "")
    assert f"cannot show rollouts of {name}: there is no such round in " in ran.err


def test_a_round_whose_rollouts_are_not_there_says_so(flywheel: Run, folder: Path) -> None:
    path = write(folder / "state")
    assert "cannot show rollouts of r0007: there is none yet" in flywheel("rollouts", "r0007").err
    path.unlink()
    ran = flywheel("rollouts", "r0007", "--json")
    assert ran.code == 1
    assert "there is none in " in ran.json["error"]
    assert "retention.keep_days" in ran.err


def test_show_names_them_by_round_or_adapter_and_the_last_debug_round_by_itself(flywheel: Run, folder: Path) -> None:
    write(folder / "state", rollout(), rollout(task_id="t-2", group=1))
    write(folder / "state", rollout(answer="tried"), name="debug")
    for asked in ((), ("--task", "t-2"), ("--step", "2", "--json"), ("--tokens", "--json")):
        of_round = flywheel("rollouts", "r0007", *asked)
        for name in ("r0007", "agent@r0007"):
            assert flywheel("show", name, "--rollouts", *asked) == of_round
    assert flywheel("show", "debug") == flywheel("show", "debug", "--rollouts") == flywheel("rollouts", "debug")
    assert "tried" in flywheel("show", "debug").out
    flywheel("show", "r0007", "--step", "1").fails(2, "it goes with --rollouts")
    flywheel("rollouts", "r0007", "--tokens").fails(2, "requires --json")


def test_the_list_of_a_debug_round_has_two_lines_for_each_rollout(folder: Path) -> None:
    failed = rollout(reward=None, advantage=None, criteria=[], error="the judge was away", steps=STEPS)
    path = write(folder / "state", rollout(answer="9" * 99), failed, name="debug")
    first, about, second, _ = short_lines(in_short(path.parents[1]))
    assert (first, second) == ("reward 0.25, 0 steps, right", "reward –, 2 steps, the judge was away")
    assert about.startswith("  What is 3 plus 4?") and about.endswith("9…")
