"""A round of SFT, DPO and GRPO on the adapter of the plain round, with a suite that its candidate forgets.

Its judge is away for a while. Its worker is killed in a step, and its engine when the gate asks about the suite: it
goes on where it was, and the judge is not asked again about what was graded.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.demo import judge
from flywheel.cli.demo.questions import questions
from flywheel.config.file import Config
from flywheel.config.training import GateSettings, Stage, TrainingSettings
from flywheel.judge.usage import Purpose, UsageFile
from flywheel.records.round import AdapterRef, DecisionReason, RoundSpec, SamplePool, Suite
from flywheel.records.selection import Candidate, SelectionRules
from flywheel.serving.client.weight_verification import compare
from flywheel.system.files import tree_sha256
from flywheel.training.data.loss_selection import read_selection
from flywheel.training.data.rollout_file import read_rollouts
from flywheel.training.data.round_progress import progress_of
from flywheel.training.data.stages import stage_adapter
from flywheel.training.gate.gate import decide
from tests.factories.worker import (
    HELD_OUT,
    SAMPLES,
    Done,
    Judge,
    graded,
    killed,
    lines,
    logprobs_of,
    paused,
    read,
    run,
    spec,
    tasks,
    with_reply,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

STAGES: list[Stage] = ["sft", "dpo", "grpo"]
PLANNED = TrainingSettings(stages=[*STAGES]).planned
STEPS, EPOCHS, THREADS = 5, 8, 4
TAUGHT, CHOSEN = 24, 12
"""Replies to imitate, and those that the worker takes of them."""
ASKED = 16
"""Prompts for the other stages, half of them each."""
COMPARED = 2 * HELD_OUT
"""Held-out tasks: those of the plain round and as many others."""
SUITE, MARGIN = 24, 0.1
BOXED = {
    "version": 1,
    "id": "boxed",
    "criteria": [
        {"id": "boxed", "type": "contains", "value": "\\boxed{", "required": True, "weight": 4},
        {"id": "correct", "value": "The boxed number is right."},
    ],
}
PLAIN = {
    "version": 1,
    "id": "plain",
    "criteria": [
        {"id": "plain", "type": "not-regex", "value": "boxed", "required": True, "weight": 4},
        {"id": "correct", "value": "The number is right."},
    ],
}
"""The adapter that the round starts from boxes a part of the numbers. The round rewards boxes, the suite numbers
without one."""


def planned(judge_url: str, parent: AdapterRef) -> RoundSpec:
    made = spec(judge_url, round_id="r0002", parent=parent, rubric=BOXED)
    settings = json.loads(json.dumps(made.settings))
    settings["training"] |= {"stages": STAGES, "steps": STEPS, "save_steps": 2, "beta": 0.05, "learning_rate": 1e-3}
    settings["training"]["sft"] |= {"epochs": EPOCHS, "batch_size": 4, "learning_rate": 1e-2}
    settings["training"]["dpo"] |= {"batch_size": 2, "learning_rate": 1e-3}
    settings["gate"] |= {"max_tasks": COMPARED}
    more = questions()
    random.Random(2).shuffle(more)
    known = {task.exchange.query for task in (*made.train, *made.held_out)}
    more = [question for question in more if question.text not in known]
    taught = [with_reply(task).model_copy(update={"is_of_teacher": True}) for task in tasks(more[:TAUGHT], "taught-")]
    held_out = [*tasks(more[-HELD_OUT:], "more-"), *made.held_out[-HELD_OUT - 1 :]]
    candidates = {task.task_id: Candidate(number) for number, task in enumerate(taught)}
    of_suite = [
        task.model_copy(update={"task_id": f"plain/{task.task_id}", "suite": "plain"})
        for task in tasks(more[TAUGHT : TAUGHT + SUITE], "")
    ]
    return made.model_copy(
        update={
            "settings": Config.model_validate(settings).model_dump(mode="json"),
            "train": [*taught, *(with_reply(task) for task in made.train[:ASKED])],
            "held_out": [with_reply(task) for task in held_out],
            "pool": SamplePool(size=CHOSEN, strategy="hybrid", candidates=candidates, rules=SelectionRules(32, 1)),
            "suites": [Suite(name="plain", tasks=of_suite, rubric=PLAIN, margin=MARGIN)],
        }
    )


def gate(margin: float | None) -> GateSettings:
    return GateSettings.model_validate({"suites": {"plain": {"file": "/plain.jsonl", "margin": margin}}})


@dataclass(frozen=True)
class Resumed:
    done: Done
    synced: set[str]
    """Hashes of the weights that the engines had at the first death."""
    partial: set[str]
    """Those in the file of graded rollouts."""
    judged: int
    """Rollouts of the step that were judged before the first death."""
    of_suite: int
    """Answers of the suite that were judged before the second."""


def judged_of_suite(directory: Path) -> int:
    """Of whole lines."""
    return sum('"plain/' in line for line in read(directory / "partial.jsonl").split("\n")[:-1])


@pytest.fixture(scope="module")
def resumed(trained: Done, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    """In a directory with files of something else."""
    directory = tmp_path_factory.mktemp("second") / "r0002"
    (directory / "sync" / "step-1").mkdir(parents=True)
    (directory / "adapter").mkdir()
    (directory / "adapter" / "adapter_model.safetensors").write_bytes(b"half")
    (directory / "metrics.jsonl").write_text('{"event": "step", "step": 1}\n{"event": "st')
    (directory / "rollouts").mkdir()
    (directory / "rollouts" / "0001.jsonl").write_text('{"step": 1}\n')
    assert trained.result.adapter is not None
    answering = Judge()
    with contextlib.ExitStack() as judging:
        url = judging.enter_context(judge.running(complete=answering))
        made = planned(url, trained.result.adapter)

        def outage() -> None:
            """Behind the first rollouts of DPO."""
            wait_for(lambda: '"stage":"dpo"' in read(directory / "metrics.jsonl"), "a step of DPO", seconds=300)
            judging.close()
            wait_for(lambda: paused(directory), "the pause", seconds=300)
            port = int(url.split(":")[2].removesuffix("/v1"))
            judging.enter_context(judge.running(port, complete=answering))

        def in_step() -> bool:
            steps = read(directory / "metrics.jsonl").count('"stage":"grpo"')
            return steps == 3 and graded(directory) >= 3

        def in_suite() -> bool:
            return judged_of_suite(directory) >= 3

        with answering.holding(in_step):
            synced = killed(directory, made, in_step, "worker", outage)
        partial = {line["weights"] for line in read_rollouts(directory / "partial.jsonl")}
        judged = graded(directory)
        with answering.holding(in_suite):
            killed(directory, made.model_copy(update={"attempt": 2}), in_suite, "Engine")
        of_suite = judged_of_suite(directory)
        done = run(directory, made.model_copy(update={"attempt": 3}))
        yield Resumed(done, synced, partial, judged, of_suite)


@pytest.fixture(scope="module")
def done(resumed: Resumed) -> Done:
    return resumed.done


def test_every_step_is_taken_once(done: Done, trained: Done) -> None:
    assert done.code == 0, (done.directory / "worker.log").read_text()[-3000:]
    assert done.result.outcome == "trained"
    assert [(stage.stage, stage.outcome) for stage in done.result.stages] == [(each, "trained") for each in STAGES]
    steps = [stage.steps for stage in done.result.stages]
    assert (steps[2], done.result.steps) == (STEPS, sum(steps))
    assert [line["step"] for line in done.steps] == list(range(1, sum(steps) + 1))
    assert [line["stage"] for line in done.steps] == [
        name for name, count in zip(STAGES, steps, strict=True) for _ in range(count)
    ]
    taken = Counter(line["step"] for line in done.rollouts)
    assert set(taken) == {line["step"] for line in done.steps if line.get("reward_mean") is not None}
    assert set(taken.values()) == {32}
    assert (done.left_running, done.left_behind) == ([], [])
    adapter, parent = done.result.adapter, trained.result.adapter
    assert adapter is not None
    assert parent is not None
    assert (adapter.name, Path(adapter.path)) == ("r0002", done.directory / "adapter")
    assert tree_sha256(Path(adapter.path)) == adapter.sha256 != parent.sha256
    assert tree_sha256(Path(parent.path)) == parent.sha256


def test_the_worker_goes_on_from_the_checkpoint_with_equal_weights(resumed: Resumed) -> None:
    log = (resumed.done.directory / "worker.log").read_text()
    assert resumed.partial
    assert resumed.partial <= resumed.synced
    before = sum(stage.steps for stage in resumed.done.result.stages[:2])
    assert f"r0002 goes on from its checkpoint after step {before + 2}" in log
    # They are found by the hash of the weights, which are the same after two steps from the checkpoint and others
    # from stored rollouts.
    assert sum(map(int, re.findall(r"(\d+) of 32 rollouts were graded by an earlier worker", log))) == resumed.judged
    begun = [log.count(f"stage {number} of 3, {stage}") for number, stage in enumerate(STAGES, 1)]
    assert begun == [1, 1, 2], "the second worker finds two stages at their end, and the third all"


def test_in_the_gate_only_what_was_in_flight_is_asked_again(resumed: Resumed) -> None:
    log = (resumed.done.directory / "worker.log").read_text()
    held_out = 2 * SAMPLES * COMPARED
    assert f"{held_out} of {held_out} rollouts were graded by an earlier worker" in log
    assert resumed.of_suite >= 3
    assert f"{resumed.of_suite} of {2 * SAMPLES * SUITE} rollouts were graded by an earlier worker" in log
    answers = lines(resumed.done.directory / "evaluation.jsonl")
    keys = Counter((line.get("suite"), line["side"], line["task_id"], line["seed"]) for line in answers)
    assert set(keys.values()) == {1}
    assert Counter(suite for suite, *_ in keys) == {None: held_out, "plain": 2 * SAMPLES * SUITE}


def test_the_judge_is_asked_again_only_about_what_was_in_flight(done: Done) -> None:
    used, _ = UsageFile(done.directory).read(0)
    assert {each.purpose for each in used} == {Purpose.ROUNDS, Purpose.GATES}
    answers = lines(done.directory / "evaluation.jsonl")
    # After a failed required check the judge is not asked.
    of_round = [line for line in (*done.rollouts, *answers) if not line.get("suite")]
    needed = sum("\\boxed{" in line["answer"] for line in of_round)
    needed += sum("boxed" not in line["answer"] for line in answers if line.get("suite"))
    assert done.result.usage["judge_calls"] == needed
    assert needed <= sum(each.calls for each in used) <= needed + 2 * THREADS
    assert done.result.usage["rollouts"] == len(done.rollouts) + len(answers)


def test_a_finished_round_keeps_nothing_to_go_on_with(done: Done) -> None:
    for name in ("partial.jsonl", "identity.json", "sync", "stages/3-grpo/checkpoints"):
        assert not (done.directory / name).exists()


def test_an_outage_of_the_judge_pauses_the_round_and_costs_no_step(done: Done) -> None:
    log = (done.directory / "worker.log").read_text()
    assert "the judge is unreachable (cannot ask the judge demo-judge" in log
    assert "the judge answers again: the round continues" in log
    assert {line["undecided"] for line in done.steps if "undecided" in line} == {0}
    comparison = done.result.comparison
    assert comparison is not None
    assert comparison.undecided == 0
    assert paused(done.directory) == ""


def test_sft_trains_on_what_the_worker_chooses_and_it_says_what_became_of_the_others(done: Done) -> None:
    chosen = read_selection(done.directory)
    outcomes = Counter(line["outcome"] for line in chosen)
    assert outcomes == {
        "set aside": 1,
        "chosen by loss": 7,
        "chosen by diversity": 5,
        "released": 11,
    }
    assert [line["loss"] for line in chosen] == sorted((line["loss"] for line in chosen), reverse=True)
    result, [aside] = done.result, [line["task_id"] for line in chosen if line["outcome"] == "set aside"]
    assert result.released == [line["task_id"] for line in chosen if line["outcome"] == "released"]
    assert result.left_out[aside].startswith("set aside: its loss of")
    assert not set(result.released) & set(result.without_gradient)
    assert result.stages[0].steps == EPOCHS * 3, "12 replies in batches of 4"


def test_sft_lowers_the_loss_on_replies_that_it_did_not_see(done: Done) -> None:
    steps = [line for line in done.steps if line["stage"] == "sft"]
    losses = [line["held_out_loss"] for line in steps if "held_out_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert len(losses) == EPOCHS
    assert losses[-1] < losses[0]


def test_dpo_trains_on_the_best_and_the_worst_rollout_of_a_prompt(done: Done) -> None:
    folder = stage_adapter(done.directory, PLANNED[1]).parent
    pairs = lines(folder / "pairs.jsonl")
    assert pairs
    of_dpo = {line["step"] for line in done.steps if line["stage"] == "dpo"}
    rewards: dict[str, list[float]] = {}
    for line in done.rollouts:
        if line["step"] in of_dpo:
            rewards.setdefault(line["task_id"], []).append(line["reward"])
    for pair in pairs:
        own = rewards[pair["task_id"]]
        assert (pair["chosen_score"], pair["rejected_score"]) == (max(own), min(own))
        assert pair["chosen"] != pair["rejected"]
    updates = [line for line in done.steps if line["stage"] == "dpo" and "margin" in line]
    assert sum(line["pairs"] for line in updates) == len(pairs)
    assert updates[0]["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_grpo_asks_prompts_that_no_stage_before_was_taught(done: Done) -> None:
    stage_of = {line["step"]: line["stage"] for line in done.steps}
    asked = {
        stage: {line["task_id"] for line in done.rollouts if stage_of[line["step"]] == stage} for stage in STAGES
    }
    taught = {line["task_id"] for line in read_selection(done.directory)}
    assert taught == {task.task_id for task in done.spec.train if task.is_of_teacher}
    assert asked["dpo"]
    assert asked["grpo"]
    assert not (taught | asked["dpo"]) & asked["grpo"]


def test_each_stage_starts_from_what_the_one_before_made(done: Done, trained: Done) -> None:
    from safetensors.numpy import load_file

    folders = (
        trained.directory / "adapter",
        *(stage_adapter(done.directory, stage) for stage in PLANNED[:2]),
        done.directory / "adapter",
    )
    parent, sft, dpo, last = (load_file(path / "adapter_model.safetensors") for path in folders)

    def moved(before: dict[str, Any], after: dict[str, Any]) -> float:
        assert before.keys() == after.keys()
        return max(float(abs(after[name] - before[name]).max()) for name in after)

    # A step at a learning rate moves each weight by about that.
    rates = {"sft": 1e-2, "dpo": 1e-3, "grpo": 1e-3}
    bounds = [rates[stage.stage] * stage.steps * 1.2 for stage in done.result.stages]
    found = [moved(parent, sft), moved(sft, dpo), moved(dpo, last)]
    assert all(0 < way <= bound for way, bound in zip(found, bounds, strict=True)), (found, bounds)
    assert found[0] > 2e-2
    # It is nearer to where it started from than to what came before that.
    assert found[1] < moved(parent, dpo)


def test_a_candidate_that_forgets_a_suite_with_a_margin_is_blocked(done: Done) -> None:
    comparison = done.result.comparison
    assert comparison is not None
    [suite] = comparison.suites
    assert (suite.name, suite.tasks, suite.conversations, suite.undecided) == ("plain", SUITE, SUITE, 0)
    assert suite.gain == pytest.approx(suite.candidate_mean - suite.deployed_mean)
    assert suite.upper < -MARGIN
    decision = decide(comparison, gate(MARGIN))
    assert (decision.promote, decision.reason_code, decision.suite) == (False, DecisionReason.WORSE_ON_SUITE, "plain")
    assert decision.reason.startswith(f"suite plain lost: gain {suite.gain:+.3f}")


def test_without_a_margin_it_is_promoted_and_the_loss_is_told(done: Done) -> None:
    comparison = done.result.comparison
    assert comparison is not None
    decision = decide(comparison, gate(None))
    assert decision.promote, decision.reason
    assert "; worse in suite plain (" in decision.reason


def test_the_gates_progress_has_the_steps_of_all_stages(done: Done) -> None:
    """Which are not `training.steps`."""
    progress = progress_of(done.directory)
    assert progress is not None
    steps = done.result.steps
    assert (progress.phase, progress.step, progress.steps) == ("evaluating", steps, steps)
    assert steps > STEPS


def test_trainer_and_engine_agree_on_every_steps_adapter(trained: Done, done: Done) -> None:
    """A stale or mixed-up adapter in the engine would show here: its logprobs would be those of other weights."""
    reinforced = [step for step in done.steps if step["stage"] == "grpo"]
    assert len(reinforced) == STEPS
    for step in (*trained.steps, *reinforced):
        assert step["logprob_gap"] < 1e-3
        assert step["ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert (step["ratio_capped_share"], step["clipped_share"]) == (0, 0)


def test_the_deployed_side_is_really_the_deployed_adapter(trained: Done, done: Done) -> None:
    """Both rounds ask the same tasks with the same seeds: what was the candidate is the deployed adapter now."""

    def said(of: Done, side: str) -> dict[tuple[str, int], str]:
        answers = lines(of.directory / "evaluation.jsonl")
        own = [line for line in answers if line["side"] == side and not line.get("suite")]
        return {(line["task_id"], line["seed"]): line["answer"] for line in own}

    base, before, now = said(trained, "deployed"), said(trained, "candidate"), said(done, "deployed")
    assert len(before) == SAMPLES * HELD_OUT
    assert len(now) == SAMPLES * COMPARED
    # Batches differ, so a rare token may fall on the other side of a tie.
    assert sum(before[key] != now[key] for key in before) <= 2
    assert sum(base[key] != now[key] for key in before) > 2
    assert sum(said(done, "candidate")[key] != now[key] for key in before) > 2


def test_the_probe_tells_the_adapter_from_parent_and_base(trained: Done, done: Done) -> None:
    """Two recordings of the tokens that tell most agree with each other and with a third measurement."""
    for of, parent in ((trained, None), (done, trained.result.adapter)):
        probe, adapter = of.result.probe, of.result.adapter
        assert probe is not None
        assert adapter is not None
        assert len(probe.texts) == 8
        assert 64 <= len(set(probe.places)) == len(probe.places) <= 512
        assert (probe.second.parent is None) is (parent is None)
        for first, second in zip(probe.first.versions, probe.second.versions, strict=True):
            assert first == pytest.approx(second, abs=1e-3), "both are computed in float32"
        most_telling = probe.places[0][0]
        text = probe.texts[most_telling]
        chosen = [number for number, (of_text, _) in enumerate(probe.places) if of_text == most_telling]
        measured = logprobs_of([adapter, *([parent] if parent else [])], text[:1], text[1:])
        recorded = probe.second
        told = [recorded.base, recorded.adapter, *([recorded.parent] if recorded.parent else [])]
        for here, there in zip(measured, told, strict=True):
            at = [probe.places[number][1] - 1 for number in chosen]
            assert [here[place] for place in at] == pytest.approx([there[number] for number in chosen], abs=1e-3)
        assert compare(recorded.adapter[:64], recorded.base[:64], probe).passed
        assert not compare(recorded.base[:64], recorded.base[:64], probe).passed
