"""The stages of a round: their settings, and which tasks they train on, each conversation in one stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.file import Config, parse
from flywheel.config.training import PlannedStage, TrainingSettings
from flywheel.errors import ConfigError
from flywheel.records.round import AdapterRef, RoundTask
from flywheel.training.data.stages import Training, tasks_by_stage, why_unused
from tests.factories.task import round_task

REPLY = ({"role": "assistant", "content": "3"},)
WARM_UP = {"sft": {"samples": 3, "epochs": 1}}
STAGES: list[list[Any]] = [
    ["grpo"], ["sft"], ["sft", "grpo"], ["grpo", "sft"], ["sft", "sft"], [WARM_UP], [WARM_UP, "sft", "grpo"],
    [WARM_UP, {"grpo": {"samples": 2}}],
]  # fmt: skip


def planned(*stages: Any, **training: Any) -> list[PlannedStage]:
    return TrainingSettings.model_validate({"stages": list(stages), **training}).planned


def ids(parts: list[list[RoundTask]]) -> list[list[str]]:
    return [sorted(one.task_id for one in part) for part in parts]


def task(number: int, conversation: int, *, has_reply: bool, is_of_teacher: bool = False) -> RoundTask:
    return round_task(
        f"t-{number}",
        conversation=f"c-{conversation}",
        reply=REPLY if has_reply else (),
        is_of_teacher=is_of_teacher and has_reply,
    )


@given(
    kinds=st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=30),
    stages=st.sampled_from(STAGES),
    seed=st.integers(0, 5),
)
def test_a_conversation_is_in_one_stage_and_sft_has_replies_only(
    kinds: list[tuple[int, bool, bool]], stages: list[Any], seed: int
) -> None:
    tasks = [
        task(n, conversation, has_reply=reply, is_of_teacher=own)
        for n, (conversation, reply, own) in enumerate(kinds)
    ]
    made = planned(*stages)
    parts = tasks_by_stage(tasks, made, seed)
    stage_of = {one.conversation: place for place, some in enumerate(parts) for one in some}
    assert all(stage_of[one.conversation] == place for place, some in enumerate(parts) for one in some)
    for stage, some in zip(made, parts, strict=True):
        assert stage.kind != "sft" or all(one.reply for one in some)
        assert stage.samples is None or len(some) <= stage.samples
    used = [one.task_id for some in parts for one in some]
    assert len(used) == len(set(used))
    unused = [one for one in tasks if one.task_id not in used]
    # SFT leaves out tasks without a reply in a conversation that it has, and a limit what is above it.
    is_full = [len(some) == stage.samples for stage, some in zip(made, parts, strict=True)]
    assert all(not one.reply or any(is_full) for one in unused)
    assert not unused or any(stage.kind == "sft" for stage in made)
    assert parts == tasks_by_stage(tasks, made, seed)


def test_teachers_are_imitated_and_the_policys_own_prompts_are_for_the_other_stages() -> None:
    own = [task(number, number, has_reply=True) for number in range(4)]
    taught = [task(number, number, has_reply=True, is_of_teacher=True) for number in range(4, 8)]
    found = tasks_by_stage([*own, *taught], planned("sft", "grpo"), 1)
    assert ids(found) == ids([taught, own])
    twice = tasks_by_stage([*own, *taught], planned("sft", "grpo", "sft"), 1)
    assert ids([twice[0] + twice[2], twice[1]]) == ids([taught, own])
    assert len(twice[0]) == len(twice[2])


@pytest.mark.parametrize("is_of_teacher", [True, False])
def test_where_all_replies_are_of_one_kind_each_stage_has_an_equal_part(is_of_teacher: bool) -> None:
    tasks = [task(number, number, has_reply=True, is_of_teacher=is_of_teacher) for number in range(9)]
    parts = tasks_by_stage(tasks, planned("sft", "grpo"), 1)
    assert sorted(map(len, parts)) == [4, 5]


@pytest.mark.parametrize("is_of_teacher", [True, False])
def test_a_stage_takes_no_more_than_its_samples_and_the_others_the_rest(is_of_teacher: bool) -> None:
    tasks = [task(number, number // 2, has_reply=True, is_of_teacher=is_of_teacher) for number in range(60)]
    first, second, third = tasks_by_stage(tasks, planned(WARM_UP, "sft", "grpo"), 1)
    assert (len(first), len(second) + len(third)) == (3, 56), "the rest of a conversation that is cut is in no stage"
    assert len(second) == len(third)
    other, *_ = tasks_by_stage(tasks, planned(WARM_UP, "sft", "grpo"), 2)
    assert ids([first]) != ids([other]), "chance follows the seed of the round"


def test_replies_of_teachers_that_sft_does_not_take_are_prompts_of_the_other_stages() -> None:
    tasks = [task(number, number, has_reply=True, is_of_teacher=number < 10) for number in range(12)]
    taught, asked = tasks_by_stage(tasks, planned(WARM_UP, "grpo"), 1)
    assert (len(taught), len(asked)) == (3, 9)
    assert all(one.is_of_teacher for one in taught)


def test_a_task_without_a_stage_has_the_reason() -> None:
    unheard = task(1, 1, has_reply=False)
    assert why_unused(unheard, planned("sft")) == "it has no reply to train on"
    full = "the stages have as many tasks as their samples (training.stages)"
    assert why_unused(task(1, 1, has_reply=True), planned(WARM_UP)) == full
    assert why_unused(unheard, planned({"grpo": {"samples": 1}})) == full
    assert why_unused(unheard, planned("sft", {"grpo": {"samples": 1}})) == full, "GRPO needs no reply"


def test_settings_of_a_stage_replace_the_defaults_of_its_kind(tmp_path: Path) -> None:
    own = {"steps": 5, "beta": 0.1}
    stages = [WARM_UP, "dpo", "sft", {"grpo": own}, {"dpo": {"epochs": 2}}, {"grpo": {}}]
    training = {"stages": stages, "sft": {"epochs": 4}, "dpo": {"beta": 0.3}, "steps": 9}
    config = parse({"training": training}, "flywheel.yaml", tmp_path)
    made = config.training.planned
    assert [(each.number, each.name) for each in made] == [
        (1, "sft 1"), (2, "dpo 2"), (3, "sft 3"), (4, "grpo 4"), (5, "dpo 5"), (6, "grpo 6"),
    ]  # fmt: skip
    assert [each.name for each in planned("sft", "grpo")] == ["sft", "grpo"]
    assert [each.samples for each in made] == [3, *[None] * 5]
    assert [each.training.sft.epochs for each in made] == [1, 4, 4, 4, 4, 4]
    assert [each.training.dpo.epochs for each in made] == [1, 1, 1, 1, 2, 1]
    assert {each.training.dpo.beta for each in made} == {0.3}
    assert [(each.training.steps, each.training.beta) for each in made[3:]] == [(5, 0.1), (9, 0.0), (9, 0.0)]
    # A worker gets the settings as they are written, and makes the same of them.
    dumped = config.model_dump(mode="json")
    assert dumped["training"]["stages"] == [*stages[:5], {"grpo": {}}]
    assert Config.model_validate(dumped).training.planned == made


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"training": {"stages": []}}, "training.stages"),
        ({"training": {"stages": ["ppo"]}}, "`training.stages.0`: it must be 'sft', 'dpo' or 'grpo', not `ppo`"),
        ({"training": {"stages": ["sft", {"sftt": {}}]}}, "key `training.stages.1.sftt` .did you mean `sft`"),
        ({"training": {"stages": [{"sft": {"epoch": 1}}]}}, "`training.stages.0.sft.epoch` .did you mean `epochs`"),
        ({"training": {"stages": [{"sft": {"samples": 0}}]}}, "`training.stages.0.sft.samples`: it must be above 0"),
        ({"training": {"stages": [{"sft": None}]}}, "`training.stages.0.sft`: it must be a mapping"),
        ({"training": {"stages": [{"sft": {}, "dpo": {}}]}}, "`training.stages.0`: it must be one stage"),
        ({"training": {"stages": [{"dpo": {"margin": 0.2}}]}}, "for the round, by training.dpo.margin"),
        ({"training": {"stages": [{"grpo": {"save_steps": 2}}]}}, "unknown key `training.stages.0.grpo.save_steps`"),
        (
            {"training": {"stages": ["grpo", {"grpo": {"steps": 3}}], "warmup_steps": 5}},
            "stages: grpo 2: warmup_steps 5 is not below steps 3",
        ),
        (
            {"training": {"stages": [WARM_UP], "coreset": {"size": 50, "strategy": "loss_topk"}}},
            "coreset: strategy loss_topk: the stage takes its size, not samples 3: remove these",
        ),
        (
            {"training": {"stages": [{"dpo": {"loss_type": "hinge"}}], "dpo": {"label_smoothing": 0.1}}},
            "only the loss sigmoid has it, and loss_type is hinge",
        ),
        ({"sources": [{"path": "/a.sqlite", "models": {"teachers": ["gpt-*"]}}]}, "sources\\[\\].models.include"),
        (
            {
                "sources": [{"path": "/a.sqlite", "models": {"teachers": ["gpt-*"]}}],
                "training": {"stages": ["sft"]},
                "targets": {"solver": {}},
            },
            "targets.NAME.agents",
        ),
    ],
)
def test_settings_that_could_not_work_are_refused(settings: dict[str, object], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(settings, "flywheel.yaml", tmp_path)


def test_a_teacher_is_another_model_that_is_not_excluded(tmp_path: Path) -> None:
    models = {"teachers": ["gpt-*"], "exclude": ["gpt-3*"]}
    config = parse(
        {"sources": [{"path": "/a.sqlite", "models": models}], "training": {"stages": ["sft", "grpo"]}}, "", tmp_path
    )
    assert config.is_teacher("gpt-4o", "")
    assert not config.is_teacher("gpt-3.5", "")
    assert not config.is_teacher(config.model.alias, "")
    assert not config.is_teacher("gpt-4o", f"{config.model.alias}@r0001")
    [source] = config.sources
    assert config.models_of(source).trains("gpt-4o", "")
    assert not config.models_of(source).trains("gpt-3.5", "")
    assert not Config().is_teacher("gpt-4o", "")


def test_what_two_stages_of_grpo_ended_with_is_that_of_both(tmp_path: Path) -> None:
    made, [one, two] = Training(None), planned({"grpo": {"prompts_per_step": 3}}, "grpo")
    made.rolled_out(one.training, 10, 0.2, 0.5)
    made.rolled_out(two.training, 4, 0.6, 0.7)
    assert (made.steps, made.rollout_steps, made.reward_first, made.reward_last) == (14, 14, 0.2, 0.7)
    made.rolled_out(two.training, 1, None, None)
    assert (made.rollout_steps, made.reward_first, made.reward_last) == (15, 0.2, 0.7), "without a reward"
    adapter = AdapterRef(name="a", path=str(tmp_path), sha256="")
    for number, reason in enumerate(("nothing to train", "", "all are equal"), 1):
        made.end_stage(f"grpo {number}", 4, 5, reason, adapter)
    assert made.reason == "nothing to train; all are equal"
