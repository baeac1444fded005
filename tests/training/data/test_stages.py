"""Which tasks the stages of a round train on: each conversation in one stage."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.file import Config, parse
from flywheel.config.training import Stage
from flywheel.errors import ConfigError
from flywheel.records.round import RoundTask
from flywheel.training.data.stages import tasks_by_stage
from tests.factories.task import round_task

REPLY = ({"role": "assistant", "content": "3"},)
STAGES: list[list[Stage]] = [["grpo"], ["sft"], ["sft", "grpo"], ["grpo", "sft"]]


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
    kinds: list[tuple[int, bool, bool]], stages: list[Stage], seed: int
) -> None:
    tasks = [
        task(n, conversation, has_reply=reply, is_of_teacher=own)
        for n, (conversation, reply, own) in enumerate(kinds)
    ]
    parts = tasks_by_stage(tasks, stages, seed)
    assert list(parts) == stages
    stage_of = {one.conversation: stage for stage, some in parts.items() for one in some}
    assert all(stage_of[one.conversation] == stage for stage, some in parts.items() for one in some)
    assert all(one.reply for one in parts.get("sft", []))
    used = [one.task_id for some in parts.values() for one in some]
    assert len(used) == len(set(used))
    unused = {one.task_id for one in tasks} - set(used)
    # Only SFT leaves tasks out: those without a reply in a conversation that it has.
    assert all(not one.reply for one in tasks if one.task_id in unused)
    assert not unused or "sft" in stages
    assert parts == tasks_by_stage(tasks, stages, seed)


def test_teachers_are_imitated_and_the_policys_own_prompts_are_for_the_other_stages() -> None:
    own = [task(number, number, has_reply=True) for number in range(4)]
    taught = [task(number, number, has_reply=True, is_of_teacher=True) for number in range(4, 8)]
    parts = tasks_by_stage([*own, *taught], ["sft", "grpo"], 1)
    assert sorted(one.task_id for one in parts["sft"]) == [one.task_id for one in taught]
    assert sorted(one.task_id for one in parts["grpo"]) == [one.task_id for one in own]


@pytest.mark.parametrize("is_of_teacher", [True, False])
def test_where_all_replies_are_of_one_kind_each_stage_has_an_equal_part(is_of_teacher: bool) -> None:
    tasks = [task(number, number, has_reply=True, is_of_teacher=is_of_teacher) for number in range(9)]
    parts = tasks_by_stage(tasks, ["sft", "grpo"], 1)
    assert sorted(map(len, parts.values())) == [4, 5]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"training": {"stages": ["sft", "sft"]}}, "each stage can be named once"),
        ({"training": {"stages": []}}, "training.stages"),
        ({"training": {"stages": ["ppo"]}}, "training.stages"),
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
