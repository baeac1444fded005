"""Whole rounds: `python -m flywheel.training.worker` with real Ray, vLLM and TRL, the demo's policy and a judge over
HTTP.

The plain round is run once for all tests that read what it left, here and in `test_killed_round`.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.demo import judge
from flywheel.cli.demo.questions import SYSTEM_PROMPT
from flywheel.daemon.rounds.removal import erase_from_round
from flywheel.judge.usage import Purpose, UsageFile
from flywheel.records.round import RoundResult, Sampling, SystemPrompt
from flywheel.system.files import tree_sha256
from flywheel.system.lock import WORKER_LOCK
from flywheel.training.data import rollout_file
from flywheel.training.data.round_directory import finished
from flywheel.training.data.round_progress import progress_of
from tests.factories.round import POLICY
from tests.factories.worker import (
    GROUP,
    HELD_OUT,
    PROMPTS,
    SAMPLES,
    STEPS,
    Done,
    below,
    family,
    is_alive,
    left_behind,
    lines,
    read,
    spec,
    start,
)

pytestmark = [
    pytest.mark.training,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # It has the time of the rounds.
    pytest.mark.usefixtures("beside_studio"),
]


def test_every_call_of_the_judge_is_written_down_for_what_it_was(trained: Done) -> None:
    used, _ = UsageFile(trained.directory).read(0)
    assert {each.purpose for each in used} == {Purpose.ROUNDS, Purpose.GATES}
    usage = trained.result.usage
    assert sum(each.calls for each in used) == usage["judge_calls"]
    assert sum(each.tokens for each in used) == usage["judge_prompt_tokens"] + usage["judge_completion_tokens"]
    boxed = sum("\\boxed{" in line["answer"] for line in trained.rollouts)
    assert sum(each.calls for each in used if each.purpose is Purpose.ROUNDS) == boxed


def test_a_round_ends_well_and_leaves_no_process_and_no_session(trained: Done) -> None:
    log = (trained.directory / "worker.log").read_text()
    assert (trained.code, trained.stderr) == (0, ""), log[-3000:]
    assert trained.left_running == []
    assert trained.result.outcome == "trained"
    assert sorted(path.name for path in trained.directory.iterdir()) == sorted(
        [
            "adapter",
            "evaluation.jsonl",
            "metrics.jsonl",
            "progress.json",
            "result.json",
            "rollouts",
            "spec.json",
            "stages",
            "usage.jsonl",
            "worker.log",
            WORKER_LOCK,
        ]
    )
    assert trained.left_behind == []


def test_the_adapter_is_whole_hashed_and_has_been_trained(trained: Done) -> None:
    from safetensors.numpy import load_file

    adapter = trained.result.adapter
    assert adapter is not None
    assert (adapter.name, Path(adapter.path)) == ("r0001", trained.directory / "adapter")
    assert tree_sha256(Path(adapter.path)) == adapter.sha256
    assert json.loads((Path(adapter.path) / "adapter_config.json").read_text())["r"] == 8
    weights = load_file(Path(adapter.path) / "adapter_model.safetensors")
    # A fresh LoRA's B is zero everywhere.
    assert all((weight != 0).any() for name, weight in weights.items() if "lora_B" in name)


def test_rollouts_are_written_token_by_token(trained: Done) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    asked = {task.task_id: task for task in trained.spec.train}
    assert len(trained.rollouts) == STEPS * PROMPTS * GROUP
    assert len({line["seed"] for line in trained.rollouts}) == len(trained.rollouts)
    for line in trained.rollouts:
        [sample] = line["samples"]
        ids, mask, logprobs = sample["token_ids"], sample["loss_mask"], sample["logprobs"]
        assert len(ids) == len(mask) == len(logprobs) == len(sample["text"])
        before = mask.index(1)
        assert mask == [0] * before + [1] * (len(ids) - before)
        assert all(value is None for value in logprobs[:before])
        assert all(-50 < value <= 0 for value in logprobs[before:])
        task = asked[line["task_id"]]
        assert ids[:before] == tokenizer.apply_chat_template(
            task.prompt, add_generation_prompt=True, return_dict=False
        )
        assert tokenizer.decode(ids[before:], skip_special_tokens=True) == line["answer"]
        assert "".join(sample["text"]) == tokenizer.decode(ids)
        assert line["truncated"] == (ids[-1] != tokenizer.eos_token_id)


def test_rewards_are_the_rubrics(trained: Done) -> None:
    asked = {task.task_id: task.exchange.query for task in trained.spec.train}
    for line in trained.rollouts:
        found = judge.examine(asked[line["task_id"]], line["answer"])
        if "\\boxed{" not in line["answer"]:
            assert line["reward"] == 0
        elif found.right:
            assert line["reward"] == 1
        else:
            assert line["reward"] == pytest.approx(0.1)
    assert {line["reward"] for line in trained.rollouts} >= {0, 1}


def test_failed_criteria_and_advantages_are_written_with_the_rewards(trained: Done) -> None:
    for line in trained.rollouts:
        criteria = {each["criterion"]: each for each in line["criteria"]}
        assert criteria["boxed"]["passed"] == ("\\boxed{" in line["answer"])
        # After a failed required check the judge is not asked.
        assert ("correct" in criteria) == criteria["boxed"]["passed"]
        assert criteria.get("correct", {"reason": "none"})["reason"]
    for first in range(0, len(trained.rollouts), GROUP):
        group = trained.rollouts[first : first + GROUP]
        rewards = [line["reward"] for line in group]
        if max(rewards) - min(rewards) < 0.02:
            assert {line["advantage"] for line in group} == {None}, "a group that is dropped"
            continue
        assert sum(line["advantage"] for line in group) == pytest.approx(0, abs=1e-3)
        assert sorted(group, key=lambda line: line["advantage"]) == sorted(group, key=lambda line: line["reward"])


def test_every_answer_of_the_gate_is_written_with_its_side(trained: Done) -> None:
    answers = lines(trained.directory / "evaluation.jsonl")
    assert len(answers) == 2 * SAMPLES * HELD_OUT
    comparison = trained.result.comparison
    assert comparison is not None
    for score in comparison.scores:
        of_task = [line for line in answers if line["task_id"] == score.task_id]
        rewards = {
            side: [line["reward"] for line in of_task if line["side"] == side] for side in ("candidate", "deployed")
        }
        assert sum(rewards["candidate"]) / SAMPLES == pytest.approx(score.candidate)
        assert sum(rewards["deployed"]) / SAMPLES == pytest.approx(score.deployed)
        # They are written as they are graded.
        seeds = [sorted(line["seed"] for line in of_task if line["side"] == side) for side in rewards]
        assert seeds[0] == seeds[1]
        assert len(set(seeds[0])) == SAMPLES


def test_each_step_takes_other_prompts_in_whole_groups(trained: Done) -> None:
    taken: list[str] = []
    for step in range(1, STEPS + 1):
        of_step = [line for line in trained.rollouts if line["step"] == step]
        groups = [[line["task_id"] for line in of_step if line["group"] == group] for group in range(PROMPTS)]
        assert all(len(group) == GROUP and len(set(group)) == 1 for group in groups)
        taken += [group[0] for group in groups]
    assert len(set(taken)) == STEPS * PROMPTS
    assert "t-long" not in taken


def test_metrics_tell_phases_and_steps_while_it_runs(trained: Done) -> None:
    phases = [line["phase"] for line in trained.metrics if line["event"] == "phase"]
    assert phases == ["starting", "training", "evaluating"]
    training = next(line for line in trained.metrics if line.get("phase") == "training")
    assert (training["prompts"], training["left_out"]) == (30, 3)
    assert sorted(trained.result.left_out) == ["t-hidden-0", "t-long", "t-planned"]
    assert trained.result.left_out["t-planned"] == "no result of its calls is recorded"
    assert list(trained.result.inexact) == ["t-hidden-0"]
    assert "and the model was sent 120" in trained.result.inexact["t-hidden-0"]
    assert "leaves room for 112" in trained.result.left_out["t-long"]
    assert [(step["step"], step["steps"]) for step in trained.steps] == [(1, 3), (2, 3), (3, 3)]
    for step in trained.steps:
        rewards = [line["reward"] for line in trained.rollouts if line["step"] == step["step"]]
        assert step["reward_mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)
        assert (step["undecided"], step["groups"], step["temperature"]) == (0, PROMPTS, 1.0)
        assert set(step["seconds"]) == {"generate", "grade", "train", "sync"}
        assert all(math.isfinite(step[name]) for name in ("loss", "grad_norm", "entropy", "learning_rate"))
    assert trained.steps[0]["learning_rate"] > trained.steps[-1]["learning_rate"]
    assert trained.result.sampling == Sampling(
        temperature=1.0,
        steps=STEPS,
        prompts=PROMPTS,
        group_size=GROUP,
        system_prompts=[SystemPrompt(text=SYSTEM_PROMPT, rollouts=STEPS * PROMPTS * GROUP)],
    )
    assert trained.result.reward_first == pytest.approx(trained.steps[0]["reward_mean"], abs=1e-6)
    assert trained.result.reward_last == pytest.approx(trained.steps[-1]["reward_mean"], abs=1e-6)


def test_progress_is_told_to_the_end(trained: Done) -> None:
    progress = progress_of(trained.directory)
    assert progress is not None
    assert (progress.phase, progress.step, progress.steps) == ("evaluating", STEPS, STEPS)
    assert progress.rollouts_planned == 2 * SAMPLES * HELD_OUT
    assert progress.rollouts == progress.rollouts_planned
    assert (progress.reward_first, progress.reward) == (trained.result.reward_first, trained.result.reward_last)
    assert progress.tokens_per_second is not None
    assert progress.tokens_per_second > 0
    assert all(step["tokens_per_second"] > 0 for step in trained.steps)


def test_only_groups_with_different_rewards_are_trained_on(trained: Done) -> None:
    """And what was trained on is told to the daemon, which releases the rest."""
    tasks: set[str] = set()
    for step in trained.steps:
        here = [line for line in trained.rollouts if line["step"] == step["step"]]
        rows = [line for line in here if line["advantage"] is not None]
        own = sum(sum(line["samples"][0]["loss_mask"]) for line in rows)
        assert step["trained_tokens"] == own
        every = sum(sum(line["samples"][0]["loss_mask"]) for line in here)
        assert step["masked_share"] == pytest.approx(1 - own / every, abs=1e-4)
        tasks |= {line["task_id"] for line in rows}
    assert tasks
    asked = {task.task_id for task in trained.spec.train}
    assert set(trained.result.without_gradient) == asked - tasks | {"t-planned"}


def test_both_sides_are_compared_on_the_newest_held_out_tasks(trained: Done) -> None:
    comparison = trained.result.comparison
    assert comparison is not None
    assert (comparison.tasks, comparison.samples, comparison.undecided) == (HELD_OUT, SAMPLES, 0)
    # The last task is the one before it again, which is not asked twice.
    different = [task.task_id for task in trained.spec.held_out if task.task_id != f"t-held-{HELD_OUT + 4}"]
    assert [score.task_id for score in comparison.scores] == different[-HELD_OUT:]
    assert comparison.gain == pytest.approx(comparison.candidate_mean - comparison.deployed_mean)
    assert comparison.lower <= comparison.gain <= comparison.upper
    boxed, correct = comparison.criteria
    assert (boxed.criterion, boxed.tasks, correct.criterion) == ("boxed", HELD_OUT, "correct")
    assert boxed.gain == pytest.approx(boxed.candidate_mean - boxed.deployed_mean)
    assert 0 < correct.tasks <= HELD_OUT, "the judge is asked only about what is boxed"
    usage = trained.result.usage
    assert usage["rollouts"] == STEPS * PROMPTS * GROUP + 2 * SAMPLES * HELD_OUT
    assert 0 < usage["judge_calls"] < usage["rollouts"]


def test_nothing_is_left_of_tasks_that_are_erased(trained: Done, tmp_path: Path) -> None:
    """Neither as text nor as tokens. The other tasks of the round, and its adapter, stay as they are."""
    from transformers import AutoTokenizer

    directory = tmp_path / "r0001"
    shutil.copytree(trained.directory, directory)
    probe = trained.result.probe
    assert probe is not None
    assert len(probe.tasks) == len(probe.texts) == 8
    gone = {trained.rollouts[0]["task_id"], probe.tasks[0]}
    asked = {task.task_id: task.exchange.query for task in (*trained.spec.train, *trained.spec.held_out)}
    tokenizer = AutoTokenizer.from_pretrained(POLICY)

    def said() -> tuple[str, str]:
        """All texts of all files, and what the lists of tokens in them say."""
        files = [path.read_text() for path in sorted(directory.rglob("*.json*"))]
        # A file of one value is one line, or is indented.
        values = [json.loads(line) for text in files for line in (text.splitlines() if "\n{" in text else [text])]
        decoded = [tokenizer.decode(ids) for value in values for ids in token_lists(value)]
        return "\n".join([*files, (directory / "worker.log").read_text()]), "\n".join(decoded)

    texts = [asked[task] for task in gone]
    assert all(text in form for text in texts for form in said())
    weights = tree_sha256(directory / "adapter")
    assert erase_from_round(directory, gone)
    assert not any(text in form for text in texts for form in said())
    assert [line for line in trained.rollouts if line["task_id"] not in gone] == list(
        rollout_file.rollouts(directory)
    )
    assert finished(directory, trained.spec)
    assert tree_sha256(directory / "adapter") == weights
    result = RoundResult.model_validate_json((directory / "result.json").read_bytes())
    assert result.probe is not None
    assert result.probe.tasks == probe.tasks[1:]
    assert result.sampling == trained.result.sampling, "other rollouts have the same system prompt"


def token_lists(value: Any) -> Iterator[list[int]]:
    if isinstance(value, list) and len(value) > 4 and all(type(item) is int for item in value):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from token_lists(item)


def test_versions_and_device_are_written_down(trained: Done) -> None:
    assert trained.result.device
    assert {"torch", "trl", "peft", "ray", "transformers"} <= set(trained.result.versions)
    assert set(trained.result.seconds) == {"start", "train", "evaluate", "total"}


def test_sigterm_ends_everything_at_once(judge_url: str, tmp_path: Path) -> None:
    directory = tmp_path / "r0001"
    # A debug round, which is the shortest.
    process = start(directory, spec(judge_url, debug=True, held_out=[]))
    try:
        deadline = time.monotonic() + 300
        metrics = directory / "metrics.jsonl"
        # From then on vLLM's own process is there, which no actor's end would end.
        while not (metrics.exists() and '"training"' in metrics.read_text()):
            assert process.poll() is None, read(directory / "worker.log")[-3000:] + read(directory / "error.json")
            assert time.monotonic() < deadline
            time.sleep(0.1)
        members = below(process.pid)
        assert len(members) > 3
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=240)
        left = [" ".join(p.cmdline())[:80] for p in {*family(directory), *filter(is_alive, members)}]
    finally:
        for member in family(directory):
            member.kill()
        process.wait()
    assert process.returncode == 143
    assert stderr == "flywheel.training.worker: stopped by SIGTERM\n"
    assert left == []
    assert not (directory / "result.json").exists()
    # Being stopped is no failure of the round.
    assert not (directory / "error.json").exists()
    assert left_behind(process.pid, directory) == []
