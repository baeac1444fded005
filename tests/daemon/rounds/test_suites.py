"""Suites of the settings: which are refused when they are read, and which tasks they keep out of training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flywheel.config.training import GateSettings
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.file_round import spec_of as spec_on_files
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds import planner
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.rounds.suites import MIN_POWER, apart_from, suites_of
from flywheel.errors import ConfigError, TrainError
from flywheel.records.round import RoundSpec, Suite
from flywheel.records.states import Split
from flywheel.store.kernel.database import Store
from flywheel.training.gate.gate import power_on_suite
from tests.factories.config import BOXED_RUBRIC, round_config, write_rubric
from tests.factories.task import round_task
from tests.factories.trace import replies_on
from tests.factories.verdict import put_judged

GATE = {"min_tasks": 1, "min_power": 0}


def suite_file(folder: Path, lines: list[dict[str, Any]], name: str = "suite.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return name


def asking(number: int) -> list[dict[str, Any]]:
    """So many tasks, each with numbers of its own."""
    return [{"question": f"How far is it from {n} to {n + 1}?", "answer": "1"} for n in range(number)]


def suites(folder: Path, gate: dict[str, Any] | None = None, **values: Any) -> list[Suite]:
    config = round_config(folder, gate={**GATE, **(gate or {}), "suites": {"far": {"file": "suite.jsonl", **values}}})
    return suites_of(config, rubric_of(config))


def test_a_suite_has_the_tasks_of_its_file_and_a_rubric(tmp_path: Path) -> None:
    """Relative to the configuration. Ids that occur twice are tasks of their own."""
    lines: list[dict[str, Any]] = [
        {"task_id": "near", "question": "What is near?", "answer": "here"},
        {"task_id": "near", "messages": [{"role": "user", "content": "What is far?"}]},
        {"prompt": "Where?", "chosen": "there", "rejected": "not there"},
    ]
    suite_file(tmp_path, lines)
    [suite] = suites(tmp_path)
    assert (suite.name, suite.margin, suite.rubric["id"]) == ("far", None, "math-boxed")
    assert [task.exchange.query for task in suite.tasks] == ["What is near?", "What is far?", "Where?"]
    assert [task.task_id for task in suite.tasks[:2]] == ["far/near", "far/near-2"]
    assert {task.suite for task in suite.tasks} == {"far"}
    assert suite.tasks[0].exchange.line["metadata"] == {"reference": "here"}
    assert suite.tasks[0].exchange.reference == "", "the judge takes it for an accepted answer of the model"
    write_rubric(tmp_path)
    [own] = suites(tmp_path, rubric="rubric.yaml")
    assert own.rubric["id"] == "r"


@pytest.mark.parametrize(
    ("lines", "values", "why"),
    [
        (None, {}, r"read gate\.suites\.far\.file .*suite\.jsonl: No such file"),
        ([], {}, r"read gate\.suites\.far\.file .*suite\.jsonl: it is empty"),
        ([{"answer": "1"}], {}, r"suite\.jsonl: line 1: "),
        (asking(3), {"rubric": "none.yaml"}, r"none\.yaml"),
        (asking(3), {"margin": 0}, r"`gate\.suites\.far\.margin`"),
        (asking(3), {"margin": 1.01}, r"`gate\.suites\.far\.margin`"),
        (asking(3), {"fil": "a"}, r"unknown key `gate\.suites\.far\.fil`"),
    ],
)
def test_a_suite_that_cannot_be_used_is_refused(
    tmp_path: Path, lines: list[dict[str, Any]] | None, values: dict[str, Any], why: str
) -> None:
    if lines is not None:
        suite_file(tmp_path, lines)
    with pytest.raises(ConfigError, match=why) as refused:
        suites(tmp_path, **values)
    assert refused.value.hint


@pytest.mark.parametrize("name", ["", "a/b", "ä", "-a"])
def test_a_name_that_could_be_taken_for_a_task_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="suites"):
        round_config(tmp_path, gate={"suites": {name: {"file": "suite.jsonl"}}})


def test_a_rubric_that_is_never_asked_is_refused(tmp_path: Path) -> None:
    own = {"agent": {"command": ["true"]}, "reward": {"rubric": 0, "workflow": 1}}
    gate = {"suites": {"far": {"file": "suite.jsonl", "rubric": "r.yaml"}}}
    with pytest.raises(ConfigError, match="no rubric is asked"):
        round_config(tmp_path, rollout=own, gate=gate)


def needed(folder: Path, **values: Any) -> int:
    """The number of conversations that a refusal names."""
    suite_file(folder, asking(2))
    with pytest.raises(ConfigError, match=r"has 2 different conversations, and [\d,]+ are needed") as refused:
        suites(folder, **values)
    found = re.search(r"and ([\d,]+) are needed", refused.value.why)
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    "values",
    [
        {"margin": 0.1},
        {"margin": 0.3},
        {"margin": 1},
        {"margin": 0.1, "gate": {"samples": 2, "confidence": 0.8}},
        {"margin": 1, "gate": {"min_tasks": 20}},
    ],
    ids=str,
)
def test_a_suite_of_exactly_the_size_that_is_named_is_taken_and_a_smaller_one_is_not(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    size = needed(tmp_path, **values)
    suite_file(tmp_path, asking(size))
    [suite] = suites(tmp_path, **values)
    assert len(suite.tasks) == size
    suite_file(tmp_path, asking(size - 1))
    with pytest.raises(ConfigError, match=f"and {size} are needed"):
        suites(tmp_path, **values)


def test_repetitions_and_further_turns_are_no_evidence_of_their_own(tmp_path: Path) -> None:
    size = needed(tmp_path, margin=0.1)
    same = {"metadata": {"conversation_id": "c"}}
    turns = [{**line, **same} for line in asking(size)[-2:]]
    for lines in ([*asking(size - 1), *asking(1)], [*asking(size - 2), *turns]):
        suite_file(tmp_path, lines)
        with pytest.raises(ConfigError, match=f"has {size - 1} different conversations"):
            suites(tmp_path, margin=0.1)


@given(
    margin=st.floats(1e-4, 1),
    gate=st.builds(
        GateSettings,
        samples=st.none() | st.integers(1, 8),
        confidence=st.floats(0.51, 0.999),
        min_tasks=st.integers(1, 20),
    ),
    tasks=st.integers(1, 400),
)
def test_a_wider_margin_and_less_confidence_never_need_a_larger_suite(
    margin: float, gate: GateSettings, tasks: int
) -> None:
    power = power_on_suite(tasks, tasks, margin, gate)
    assert 0 <= power <= 1
    assert power_on_suite(tasks, tasks, min(1.0, 2 * margin), gate) >= power
    assert power == 0 or tasks >= gate.min_tasks
    lax = gate.model_copy(update={"confidence": max(0.51, gate.confidence - 0.2)})
    # Around one half, where it matters: far from it, the approximation of the t distribution is not monotonic.
    assert power < MIN_POWER or power_on_suite(tasks, tasks, margin, lax) >= MIN_POWER


def test_a_suite_without_a_margin_may_have_any_size(tmp_path: Path) -> None:
    suite_file(tmp_path, asking(1))
    assert len(suites(tmp_path)[0].tasks) == 1


async def test_rounds_do_not_begin_with_a_suite_that_is_refused(tmp_path: Path, store: Store) -> None:
    """As `flywheel run` and `flywheel round` make them."""
    suite_file(tmp_path, asking(2))
    config = round_config(tmp_path, gate={**GATE, "suites": {"far": {"file": "suite.jsonl", "margin": 0.1}}})
    with pytest.raises(ConfigError, match=r"use gate\.suites\.far"):
        Rounds(store, config, rubric_of(config), Deployer(store, config))


QUESTION = "Please tell me the way from the harbour to the old town hall of this city"


@pytest.mark.parametrize(
    ("asked", "is_near"),
    [
        (QUESTION, True),
        (QUESTION.upper() + "!", True),
        (QUESTION.replace("Please tell", "Kindly tell"), True),
        (QUESTION.replace("harbour", "station").replace("city", "town"), True),
        (QUESTION.replace("harbour", "station").replace("way", "road"), False),
        (QUESTION + " in 7 minutes", False),
        ("What is the weather?", False),
    ],
)
def test_tasks_that_begin_nearly_as_one_of_a_suite_does_are_not_trained_on(asked: str, is_near: bool) -> None:
    suite = Suite(name="way", tasks=[round_task("way/1", QUESTION)], rubric={}, margin=None)
    later_turn = round_task(
        "t-2",
        "And back?",
        prompt=[{"role": "user", "content": asked}, {"role": "assistant", "content": "Left."},
                {"role": "user", "content": "And back?"}],
    )  # fmt: skip
    kept, left_out = apart_from([suite], [round_task("t-1", asked), later_turn, round_task("t-3", "Who are you?")])
    assert [task.task_id for task in kept] == (["t-3"] if is_near else ["t-1", "t-2", "t-3"])
    reason = "it begins almost like way/1, a task of gate.suites"
    assert left_out == ({"t-1": reason, "t-2": reason} if is_near else {})


def test_questions_that_differ_in_a_number_are_different() -> None:
    suite = Suite(name="sums", tasks=[round_task("sums/1", "What is 3 plus 4?")], rubric={}, margin=None)
    kept, left_out = apart_from(
        [suite], [round_task("t-1", "What is 3 plus 5?"), round_task("t-2", "what is 3 plus 4")]
    )
    assert ([task.task_id for task in kept], list(left_out)) == (["t-1"], ["t-2"])


async def test_a_planned_round_leaves_the_tasks_of_its_suites_out(tmp_path: Path, store: Store) -> None:
    first, second = (
        replace(one, query=query)
        for one, query in zip(replies_on(Split.TRAIN, 2), (QUESTION, "What else is there?"), strict=True)
    )
    await store.write(put_judged, first, second, *replies_on(Split.HELD_OUT, 1))
    suite_file(tmp_path, [{"question": QUESTION}])
    config = round_config(tmp_path, gate={**GATE, "suites": {"way": {"file": "suite.jsonl"}}})
    rubric = rubric_of(config)
    row = await store.write(planner.plan, config, rubric, config.state_dir / "rounds", "test")
    spec = await store.read(planner.spec_of, row, config, rubric, suites_of(config, rubric))
    assert [task.exchange.query for task in spec.train] == ["What else is there?"]
    assert list(spec.left_out.values()) == [f"it begins almost like {spec.suites[0].tasks[0].task_id}, a task of"
                                            " gate.suites"]  # fmt: skip
    assert RoundSpec.model_validate_json(spec.model_dump_json()) == spec
    suite_file(tmp_path, [{"question": QUESTION}, {"question": "what ELSE is there"}])
    with pytest.raises(TrainError, match=r"none of its 2 tasks can be used: it begins almost like way/"):
        await store.read(planner.spec_of, row, config, rubric, suites_of(config, rubric))


def test_a_round_on_files_asks_the_suites_and_trains_on_none_of_their_tasks(tmp_path: Path) -> None:
    lines = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(20)]
    data, held_out = (tmp_path / suite_file(tmp_path, some, name) for some, name in ((lines[:12], "a.jsonl"), (lines[12:], "b.jsonl")))  # fmt: skip # noqa: E501
    suite_file(tmp_path, lines[:2])
    gate = {**GATE, "suites": {"sums": {"file": "suite.jsonl"}}}
    config = round_config(tmp_path, sources=[], gate=gate, filter={"rubric": str(BOXED_RUBRIC)})
    spec = spec_on_files(config, data, held_out)
    assert (len(spec.train), len(spec.held_out), len(spec.left_out)) == (10, 8, 2)
    assert [suite.name for suite in spec.suites] == ["sums"]
    without = round_config(tmp_path, sources=[], gate=gate, training={"stages": ["sft"]})
    spec = spec_on_files(without, data, held_out, compares=False)
    assert (len(spec.train), spec.suites) == (12, []), "nothing is compared without a rubric"
    suite_file(tmp_path, lines)
    with pytest.raises(ConfigError, match="is left out: it begins almost like sums/"):
        spec_on_files(config, data, held_out)
