"""Rounds on files: which of their lines are trained on, and which are held out."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.daemon import file_round
from flywheel.daemon.file_round import has_rewards, spec_of, tasks_of, train_on_files
from flywheel.daemon.rounds import file_tasks
from flywheel.daemon.rounds.file_tasks import ReadRows
from flywheel.errors import ConfigError, TrainError
from flywheel.records.round import RoundResult, RoundSpec
from flywheel.records.similarity import normalised
from flywheel.training.data.loss_selection import by_loss
from flywheel.training.data.round_directory import identity_of, read_spec, settings_of
from flywheel.training.gate.gate import decide
from tests.daemon.rounds.workers import works
from tests.factories.config import BOXED_RUBRIC, make_config
from tests.factories.gate import result_of

CHATS = [
    {"messages": [{"role": "user", "content": f"{n}+{n}?"}, {"role": "assistant", "content": str(2 * n)}]}
    for n in range(10)
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path / "data.jsonl", CHATS)


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings(folder: Path, *stages: Any, **sections: Any) -> Config:
    training = {"stages": list(stages), **sections.pop("training", {})}
    return make_config(folder, sources=[], training=training, **sections)


def test_a_round_of_replies_alone_compares_and_grades_nothing(tmp_path: Path, data: Path) -> None:
    spec = spec_of(settings(tmp_path, "sft"), data, None, compares=False)
    assert (spec.rubric, spec.test) == ({}, None)
    assert (len(spec.train), len(spec.held_out)) == (7, 3)
    replies = {task.prompt[-1]["content"]: task.reply[-1]["content"] for task in (*spec.train, *spec.held_out)}
    assert replies == {f"{n}+{n}?": str(2 * n) for n in range(10)}
    assert all(task.exchange.reference == "" for task in spec.train)


@pytest.mark.slow
async def test_a_round_on_files_reports_to_its_own_directory(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works(tmp_path, monkeypatch, "exit 1")
    for name, given, expected in (("one", {}, "one/tracking/tune"), ("two", {"dir": "all"}, "all/tune")):
        config = settings(tmp_path, "sft", tracking={"report_to": ["tensorboard"], **given})
        with pytest.raises(TrainError, match="exit code 1"):
            await train_on_files(spec_of(config, data, None, compares=False), tmp_path / name, config)
        found = settings_of(read_spec(tmp_path / name)).tracking
        assert found.dir == tmp_path / expected


def test_the_judge_of_a_round_on_files_gets_the_answer_and_the_ground_truth(tmp_path: Path) -> None:
    truth = {"target_tools": ["add"]}
    lines = [
        {"question": "1+1?", "answer": "2", "metadata": {"ground_truth": truth}},
        {"question": "1+2?", "answer": "3", "metadata": {"ground_truth": truth, "reference": "three"}},
        {"question": "1+3?", "answer": "4"},
    ]
    data = written(tmp_path / "data.jsonl", lines)
    config = settings(tmp_path, "sft", filter={"rubric": str(BOXED_RUBRIC)})
    tasks = [task for split in tasks_of(config, data, None, compares=False) for task in split]
    assert {task.exchange.query: task.exchange.line["metadata"] for task in tasks} == {
        "1+1?": {"reference": "2", "ground_truth": truth},
        "1+2?": {"reference": "three", "ground_truth": truth},
        "1+3?": {"reference": "4"},
    }


def chat(question: str, answer: str = "yes", system: str = "", **more: Any) -> dict[str, Any]:
    before = [{"role": "system", "content": system}] if system else []
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": [*before, *said], **more}


WEATHER = "Will it rain in Oslo tomorrow, and do I need a coat and an umbrella when I go out?"


def test_a_file_to_hold_out_leaves_the_rest_of_the_other_whole(tmp_path: Path, data: Path) -> None:
    held_out = written(tmp_path / "held-out.jsonl", [chat("5+7?")])
    train, asked = tasks_of(settings(tmp_path, "sft"), data, held_out, compares=False)
    assert (len(train), len(asked)) == (10, 1)


def test_what_begins_as_a_held_out_conversation_does_is_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "no"}]
    lines = [
        chat("Is it late?"),
        chat(f" {WEATHER.upper()}\n", "no", "You are kind."),
        {"messages": [*chat(WEATHER)["messages"], *later]},
        chat(WEATHER.replace("Oslo", "Bergen")),
        chat(WEATHER.replace("a coat", "2 coats")),
    ]
    data = written(tmp_path / "data.jsonl", lines)
    held_out = written(tmp_path / "held.jsonl", [chat("Who?"), chat(WEATHER, "no", "You are brief.")])
    read = ReadRows()
    with caplog.at_level(logging.WARNING):
        spec = spec_of(settings(tmp_path, "sft"), data, held_out, compares=False, read=read)
    assert [read.places[task.task_id] for task in spec.train] == [(str(data), 1), (str(data), 4), (str(data), 5)]
    assert list(spec.left_out.values()) == [f"it begins as line 2 of {held_out} does, which is held out"] * 2
    assert read.by_reason(spec.left_out.items()) == [
        {"reason": next(iter(spec.left_out.values())), "rows": 2, "file": str(data), "first_line": 2}
    ]
    near = f"1 row, the first is line 4 of {data}: it begins nearly as line 2 of {held_out} does, which is held out"
    assert near in caplog.messages


def test_all_rows_that_are_held_out_leave_nothing_to_train_on(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match=r"all of train_dataset is left out: it begins as line 1 of .*data.jsonl"):
        spec_of(settings(tmp_path, "sft"), data, data, compares=False)


@pytest.mark.parametrize("seed", range(4))
def test_the_split_has_each_question_on_one_side(tmp_path: Path, seed: int) -> None:
    asked = [f"What is the capital of {name}?" for name in ("Peru", "Chad", "Oman", "Fiji", "Mali", "Cuba")]
    asked += [f"{n} times {n}?" for n in range(14)]
    told = [chat(f"  {question.replace(' ', '  ')}\n", system="You are kind.") for question in asked]
    data = written(tmp_path / "data.jsonl", [*map(chat, asked), *told])
    train, held_out = tasks_of(settings(tmp_path, "sft", training={"seed": seed}), data, None, compares=False)
    assert (len(train) + len(held_out), len(held_out) >= 12) == (40, True)
    sides = [{normalised(task.beginning) for task in side} for side in (train, held_out)]
    assert not sides[0] & sides[1]


def test_the_split_follows_conversations_and_beginnings_alike(tmp_path: Path) -> None:
    same = {"metadata": {"conversation_id": "c-1"}}
    lines = [chat("One?", **same), chat("Two?"), chat("two ?", system="Hi", **same), chat(WEATHER)]
    near = [chat(f"{WEATHER} {'Do tell me' if n else 'Please'}") for n in range(2)]
    data = written(tmp_path / "data.jsonl", [*lines, *near, chat("Three?")])
    for seed in range(6):
        config, read = settings(tmp_path, "sft", training={"seed": seed}), ReadRows()
        train, held_out = tasks_of(config, data, None, compares=False, read=read)
        sides = [{normalised(task.beginning) for task in side} for side in (train, held_out)]
        assert not sides[0] & sides[1]
        assert not {task.conversation for task in train} & {task.conversation for task in held_out}
        assert all(len({text for text in side if text.startswith(normalised(WEATHER))}) in (0, 3) for side in sides)
        # A later question of a conversation may be the first one of another that is on the other side.
        assert [read.places[task][1] for task in read.left_out] in ([], [2], [3])
        assert len(train) + len(held_out) + len(read.left_out) == 7


def test_rows_that_share_a_template_are_divided(tmp_path: Path) -> None:
    template = "Tell me in one short and polite sentence, as a friend would do it, what this word may mean: "
    data = written(
        tmp_path / "data.jsonl", [chat(f"{template} w{chr(97 + n % 26)}{chr(97 + n // 26)}") for n in range(200)]
    )
    train, held_out = tasks_of(settings(tmp_path, "sft"), data, None, compares=False)
    assert (len(train) + len(held_out), 60 <= len(held_out) < 120) == (200, True)


def test_keys_that_are_not_read_are_named_once_a_file(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*given: Any) -> Any:
        for attempted, row in file_tasks.rows(*given):
            yield attempted, replace(row, unread_keys=("mood", "key2") if row.number % 3 == 0 else ())

    monkeypatch.setattr(file_round, "rows", rows)
    read = ReadRows()
    spec_of(settings(tmp_path, "sft"), data, None, compares=False, read=read)
    assert [(each["reason"], each["rows"], each["first_line"]) for each in read.by_reason(read.notes)] == [
        ("`mood` is not read", 3, 3),
        ("`key2` is not read", 3, 3),
    ]


def test_a_row_is_used_whatever_its_prompt_lacks(tmp_path: Path) -> None:
    shown = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    answer, read = {"role": "assistant", "content": "A cat."}, ReadRows()
    lines = [
        {"messages": [{"role": "user", "content": shown}, answer]},
        {**CHATS[0], "metadata": {"prompt_exact": False}},
    ]
    data = written(tmp_path / "data.jsonl", lines)
    train, asked = tasks_of(settings(tmp_path, "sft"), data, None, compares=False, read=read)
    assert (len(train) + len(asked), read.left_out) == (2, {})
    assert [why for _, why in read.notes] == ["`content.image` is not read"]


def test_one_conversation_is_trained_on(tmp_path: Path) -> None:
    train, asked = tasks_of(
        settings(tmp_path, "sft"), written(tmp_path / "one.jsonl", CHATS[:1]), None, compares=False
    )
    assert (len(train), len(asked)) == (1, 0)


@pytest.mark.parametrize(
    ("stage", "lines", "why"),
    [
        ("sft", [CHATS[0], {"question": "1+1?"}], "line 2: it has no reply to train on"),
        (
            "sft",
            [{"messages": [*CHATS[0]["messages"][:1], {"role": "tool", "content": "0"}]}],
            "line 1: it has no reply",
        ),
        (
            "sft",
            [{"messages": [CHATS[0]["messages"][0], {**CHATS[0]["messages"][1], "weight": 0}]}],
            "line 1: it has no",
        ),
        ("sft", [], "it is empty"),
        ("dpo", [CHATS[0]], "line 1: it lacks `chosen` or `rejected`, and there is no rubric"),
        ("grpo", CHATS, "there is no rubric"),
    ],
)
def test_data_that_cannot_be_trained_on(tmp_path: Path, stage: str, lines: list[Any], why: str) -> None:
    data = written(tmp_path / "data.jsonl", lines)
    with pytest.raises(ConfigError, match=why):
        tasks_of(settings(tmp_path, stage), data, None, compares=False)


def test_a_dialog_that_only_calls_tools_without_arguments_is_left_out(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Is it cold in Oslo?"},
        {"role": "assistant", "content": "I call weather_query_001."},
        {"role": "tool", "tool_id": "weather_query_001", "content": "-7"},
    ]
    lines = [{"turns": turns}, {"turns": [*turns, {"role": "assistant", "content": "Yes."}]}]
    data, read = written(tmp_path / "data.jsonl", lines), ReadRows()
    [task], _ = tasks_of(settings(tmp_path, "sft"), data, None, compares=False, read=read)
    assert [message.get("weight") for message in task.reply] == [0, None, None]
    assert [read.places[task_id][1] for task_id in read.left_out] == [1]
    assert {why for _, why in read.notes} == {"`content.call without arguments` is not read"}
    unnamed = {"turns": [*turns[:2], {"role": "tool", "content": "-7"}]}
    for line in (lines[0], unnamed):
        with pytest.raises(ConfigError, match="no line can be trained on: all its messages have the weight 0"):
            tasks_of(settings(tmp_path, "sft"), written(data, [line]), None, compares=False)


def test_the_same_file_is_the_same_round_of_the_users_agent(tmp_path: Path, data: Path) -> None:
    own = {"agent": {"command": ["true"]}, "reward": {"rubric": 0, "workflow": 1}}
    one, other = (spec_of(settings(tmp_path, "grpo", rollout=own), data, None, compares=True) for _ in range(2))
    assert one.train[0].line["metadata"]["started_at"] == "1970-01-01T00:00:00+00:00"
    assert identity_of(one) == identity_of(other)


def test_a_rubric_or_the_users_agent_rewards_answers(tmp_path: Path) -> None:
    assert not has_rewards(settings(tmp_path, "sft"))
    assert has_rewards(settings(tmp_path, "sft", filter={"rubric": str(BOXED_RUBRIC)}))
    own = {"agent": {"command": ["true"]}, "reward": {"rubric": 0, "workflow": 1}}
    assert has_rewards(settings(tmp_path, "sft", rollout=own))
    assert has_rewards(settings(tmp_path, "grpo", rollout={"agent": {"command": ["true"]}})), "it may return numbers"
    rubric_alone = {"agent": {"command": ["true"]}, "reward": {"rubric": 1, "workflow": 0}}
    assert not has_rewards(settings(tmp_path, "grpo", rollout=rubric_alone))


def test_a_round_with_a_rubric_compares(tmp_path: Path, data: Path) -> None:
    config = settings(tmp_path, "sft", filter={"rubric": str(BOXED_RUBRIC)})
    spec = spec_of(config, data, None)
    assert spec.test is not None
    assert spec.rubric["id"] == "math-boxed"
    assert (len(spec.train), len(spec.held_out)) == (2, 8)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "is not there"),
        ({"adapter_model.bin": ""}, "can hold code"),
        ({"adapter_config.json": "{}"}, "has no adapter_model.safetensors"),
        ({"adapter_config.json": "[", "adapter_model.safetensors": ""}, "is no JSON object"),
        ({"adapter_model.safetensors": ""}, "No such file"),
    ],
)
def test_an_adapter_that_cannot_be_started_from(tmp_path: Path, data: Path, files: dict[str, str], why: str) -> None:
    parent = tmp_path / "parent"
    for name, text in files.items():
        parent.mkdir(exist_ok=True)
        (parent / name).write_text(text)
    with pytest.raises(ConfigError, match=why):
        spec_of(settings(tmp_path, "sft"), data, None, parent=parent, compares=False)


def test_a_preference_without_a_difference_gives_no_pair(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    lines = [
        line,
        {**line, "rejected": "2"},
        {**line, "chosen_score": 0.5, "rejected_score": 0.45},
        {**line, "chosen_score": 0.3, "rejected_score": 0.2},
    ]
    data = written(tmp_path / "data.jsonl", lines)
    config = settings(tmp_path, "dpo", training={"dpo": {"margin": 0.1}})
    with caplog.at_level(logging.WARNING):
        spec = spec_of(config, data, None, compares=False)
    assert [(task.reply[-1]["content"], task.rejected[-1]["content"]) for task in spec.train] == [("2", "3")] * 2
    assert f"2 rows, the first is line 2 of {data}: its replies are equal" in caplog.text


def calling(arguments: Any, call_id: str = "1", **message: Any) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **message}


def test_whole_messages_of_the_model_are_trained_on(tmp_path: Path) -> None:
    call = calling('{"a": 1}', content="I add.", reasoning_content="One and one.")
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    asked = [{"role": "user", "content": "1+1?"}]
    rows: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
        "call": ({"messages": [*asked, call]}, [call], []),
        "result": ({"prompt": asked, "completion": [call, result]}, [call, result], []),
        "pair": ({"prompt": asked, "chosen": [call], "rejected": [calling({"a": 2})]}, [call], [calling('{"a": 2}')]),
    }
    for name, (line, reply, rejected) in rows.items():
        data = written(tmp_path / f"{name}.jsonl", [line])
        for stages in (["sft"], ["sft", "dpo"]):
            [task], _ = tasks_of(settings(tmp_path, *stages), data, None, compares=False)
            assert list(task.reply) == reply
            assert list(task.rejected) == (rejected if "dpo" in stages else [])
            assert (task.prompt, task.exchange.reference) == (asked, "")
        config = settings(tmp_path, "grpo", filter={"rubric": str(BOXED_RUBRIC)}, gate={"min_tasks": 1})
        [task], _ = tasks_of(config, data, written(tmp_path / "other.jsonl", [{"question": "7+7?", "answer": "14"}]))
        assert (task.reply, task.rejected) == ((), ())


def test_structured_output_is_not_what_the_model_wrote(tmp_path: Path) -> None:
    line = {"question": "1+1?", "answer": '{"sum": 2}', "metadata": {"structured_json": '{"sum": 2}'}}
    [task], _ = tasks_of(settings(tmp_path, "sft"), written(tmp_path / "own.jsonl", [line]), None, compares=False)
    assert task.reply == ()


@pytest.mark.parametrize(
    ("one", "other", "is_pair"),
    [
        (calling({"city": "Rome"}), calling('{"city": "Paris"}'), True),
        (calling({"city": "Rome"}), calling(' {"city":"Rome"}', call_id="2"), False),
        (calling({"a": 1, "b": True}), calling({"b": True, "a": 1}), False),
        (calling({"a": 1}), calling({"a": True}), True),
        (calling('{"a": 1'), calling('{"a": 2'), True),
        (calling("{}"), calling("{}", reasoning="Hm."), True),
        (calling("{}", reasoning_content="Hm."), calling("{}", thinking="Hm."), False),
        (calling("{}"), calling("{}", content="I add."), True),
        (calling("{}"), {"role": "assistant", "content": "{}"}, True),
    ],
)
def test_a_pair_differs_in_what_its_replies_say(tmp_path: Path, one: Any, other: Any, is_pair: bool) -> None:
    line = {"prompt": "1+1?", "chosen": [one], "rejected": [other]}
    data = written(tmp_path / "data.jsonl", [line, {"prompt": "1+1?", "chosen": "2", "rejected": "3"}])
    train, _ = tasks_of(settings(tmp_path, "dpo"), data, None, compares=False)
    assert len(train) == 1 + is_pair


def tool_chat(number: int, *names: str) -> dict[str, Any]:
    """A conversation that calls these tools."""
    said: list[dict[str, Any]] = [{"role": "user", "content": f"Order {number}?"}]
    for name in names:
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        said += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": name, "content": "1"},
        ]
    return {"messages": [*said, {"role": "assistant", "content": f"It is {number}."}]}


def mixed(folder: Path, plain: int, with_tool: int) -> tuple[Path, Path]:
    """A file with so many rows of two classes, and one of rows to hold out."""
    rows = [tool_chat(n) for n in range(plain)] + [tool_chat(plain + n, "find") for n in range(with_tool)]
    held_out = [chat(f"Held out {n}?") for n in range(8)]
    return written(folder / "rows.jsonl", rows), written(folder / "held-out.jsonl", held_out)


def classes_of(spec: RoundSpec, read: ReadRows) -> Counter[str]:
    return Counter(read.structures[task.task_id] for task in spec.train)


EVEN = {"no_tools": 1, "one_tool": 1}


@pytest.mark.parametrize(
    ("stage", "training", "epochs", "expected", "why"),
    [
        # SFT uses all rows that there are: the largest number in which the weights hold.
        ("sft", {"task_weights": EVEN}, None, (20, 20), "40 of 200 rows, by training.task_weights"),
        ("sft", {"task_weights": {"no_tools": 3, "one_tool": 1}}, None, (60, 20), "80 of 200"),
        ("sft", {"task_weights": {"no_tools": 1, "several_tools": 1}}, None, (180, 0), "of a class without a weight"),
        # Steps of GRPO use fewer, as they are or as epochs need them.
        ("grpo", {"task_weights": EVEN, "steps": 3}, None, (12, 12), "24 of 200 rows, by .* and training.steps"),
        ("grpo", {"task_weights": EVEN, "steps": 6}, None, (28, 20), "48 of 200 rows, by .* and training.steps"),
        ("grpo", {"task_weights": EVEN, "steps": 50}, None, (20, 20), "40 of 200 rows, by training.task_weights"),
        ("grpo", {"task_weights": EVEN, "steps": 3}, 2, (20, 20), "40 of 200 rows, by training.task_weights"),
        ("sft", {"coreset": {"size": 30, "strategy": "diversity"}}, None, 30, "30 of 200 rows, by training.coreset"),
        ("sft", {"coreset": {"size": 10}, "task_weights": EVEN}, None, (5, 5), "task_weights and training.coreset"),
    ],
)
def test_weights_and_a_coreset_choose_among_the_rows_of_a_file(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stage: str,
    training: dict[str, Any],
    epochs: int | None,
    expected: tuple[int, int] | int,
    why: str,
) -> None:
    data, held_out = mixed(tmp_path, 180, 20)
    read = ReadRows()
    config = settings(tmp_path, stage, training=training, filter={"rubric": str(BOXED_RUBRIC)})
    with caplog.at_level(logging.WARNING):
        spec = spec_of(config, data, held_out, compares=stage == "grpo", epochs=epochs, read=read)
    found = classes_of(spec, read)
    assert (found["no_tools"], found["one_tool"]) == expected or found.total() == expected
    assert spec.left_out.keys() == read.places.keys() - {each.task_id for each in (*spec.train, *spec.held_out)}
    assert re.search(rf"{200 - len(spec.train)} rows, the first is .*: .*{why}", caplog.text)
    assert spec_of(config, data, held_out, compares=stage == "grpo", epochs=epochs) == spec


@pytest.mark.parametrize(
    ("own", "epochs", "expected"),
    [
        ({}, None, (8, 50)),
        ({}, 2, (8, 5)),
        ({"prompts_per_step": 32}, None, (20, 50)),
        ({"prompts_per_step": 32}, 2, (20, 2)),
        ({"prompts_per_step": 2}, 1, (2, 10)),
        ({"steps": 3}, None, (8, 3)),
        ({"steps": 3}, 1, (8, 3)),
        ({"steps": 9}, 1, (8, 3)),
        ({"samples": 5, "steps": 9}, 2, (5, 2)),
    ],
)
def test_a_stage_of_its_own_settings_asks_no_more_than_all_tasks_and_each_in_each_epoch(
    tmp_path: Path, own: dict[str, int], epochs: int | None, expected: tuple[int, int]
) -> None:
    data, held_out = mixed(tmp_path, 20, 0)
    config = settings(tmp_path, {"grpo": own}, filter={"rubric": str(BOXED_RUBRIC)})
    made = Config.model_validate(spec_of(config, data, held_out, epochs=epochs).settings)
    [stage] = made.training.planned
    assert (stage.training.prompts_per_step, stage.training.steps) == expected


def test_a_stage_whose_warm_up_is_no_shorter_than_its_epochs_is_refused(tmp_path: Path) -> None:
    data, held_out = mixed(tmp_path, 20, 0)
    config = settings(tmp_path, {"grpo": {"warmup_steps": 10}}, filter={"rubric": str(BOXED_RUBRIC)})
    with pytest.raises(ConfigError, match="stages: grpo: warmup_steps 10 is not below steps 3"):
        spec_of(config, data, held_out, epochs=1)


def test_without_weights_and_coreset_a_round_has_all_rows_of_a_file(tmp_path: Path) -> None:
    data, held_out = mixed(tmp_path, 9, 1)
    spec = spec_of(settings(tmp_path, "sft"), data, held_out, compares=False)
    assert (len(spec.train), spec.left_out, spec.pool) == (10, {}, None)


def test_what_a_loss_chooses_among_is_a_pool_of_the_rows(tmp_path: Path) -> None:
    data, held_out = mixed(tmp_path, 60, 10)
    training = {"coreset": {"size": 5, "strategy": "loss_topk"}, "task_weights": EVEN}
    spec = spec_of(settings(tmp_path, "sft", training=training), data, held_out, compares=False)
    assert spec.pool is not None
    assert (spec.pool.size, len(spec.train)) == (5, 20)
    assert spec.pool.candidates.keys() == {each.task_id for each in spec.train}
    ids = list(spec.pool.candidates)
    lines = by_loss(spec.pool, dict.fromkeys(ids, 1.0), dict.fromkeys(ids, "text"), dict.fromkeys(ids, 3), seed=1)
    assert Counter(each["outcome"] for each in lines) == {"chosen by loss": 5, "released": 14, "set aside": 1}


def test_a_class_that_no_row_has_is_refused_and_replay_is_a_warning(
    tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"left out: of a class without a weight in training.task_weights"):
        spec_of(settings(tmp_path, "sft", training={"task_weights": {"one_tool": 1}}), data, None, compares=False)
    spec_of(settings(tmp_path, "sft", training={"replay": {"ratio": 0.5}}), data, None, compares=False)
    assert "training.replay: without effect: a file has no earlier rounds" in caplog.text


@pytest.mark.slow
async def test_what_the_pool_of_a_file_did_not_choose_is_left_out(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, "sft", training={"coreset": {"size": 1, "strategy": "hybrid"}})
    spec = spec_of(config, data, None, compares=False)
    result = RoundResult(round_id="tune", outcome="refused", reason="none", released=[spec.train[0].task_id])
    works(tmp_path, monkeypatch, f"echo '{result.model_dump_json()}' > $3/result.json")
    made = await train_on_files(spec, tmp_path / "round", config)
    assert "the round took others of its pool" in made.left_out[spec.train[0].task_id]


@pytest.mark.slow
async def test_the_reason_says_that_training_ended_early(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, "sft")
    spec = spec_of(config, data, None, compares=False)
    result = result_of(spec, reason="three steps had nothing to train")
    works(tmp_path, monkeypatch, f"echo '{result.model_dump_json()}' > $3/result.json")
    made = await train_on_files(spec, tmp_path / "round", config)
    assert made.comparison is not None
    assert made.reason == f"{decide(made.comparison, config.gate).reason}; three steps had nothing to train"
