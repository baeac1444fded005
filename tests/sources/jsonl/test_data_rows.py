"""The lines of a data set: tasks, conversations and preferences, and what is wrong with those that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import ConfigError
from flywheel.sources.jsonl.record import DataRow, rows_of_file

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "What is 1 plus 1?"}
RIGHT, WRONG = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "2"}


def rows(folder: Path, *lines: Any) -> list[DataRow]:
    path = folder / "rows.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return list(rows_of_file(path, f"read --data {path}"))


def test_a_conversation_is_a_prompt_and_the_messages_of_the_last_reply(tmp_path: Path) -> None:
    earlier = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    messages = [SYSTEM, *earlier, ASKED, CALL, RESULT, RIGHT]
    [row] = rows(tmp_path, {"messages": messages})
    assert row.task["prompt"] == [SYSTEM, *earlier, ASKED]
    assert row.task["answer"] == "2"
    assert json.loads(row.task["metadata"]["trajectory_json"]) == [CALL, RESULT]
    assert row.worse is None


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": [SYSTEM, ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
        {"prompt": [SYSTEM, ASKED], "chosen": "2", "rejected": "3"},
        {"chosen": [SYSTEM, ASKED, RIGHT], "rejected": [SYSTEM, ASKED, WRONG]},
        {"prompt": ASKED["content"], "chosen": [SYSTEM, ASKED, RIGHT], "rejected": [SYSTEM, ASKED, WRONG]},
        {"messages": [SYSTEM, ASKED], "chosen": [RIGHT], "rejected": [WRONG], "answer": "of no use"},
    ],
)
def test_a_preference_in_every_form(tmp_path: Path, line: dict[str, Any]) -> None:
    [row] = rows(tmp_path, line)
    assert row.worse is not None
    assert row.task["prompt"] == row.worse["prompt"] == [SYSTEM, ASKED]
    assert (row.task["answer"], row.worse["answer"], row.difference) == ("2", "3", None)


def test_a_preference_of_texts_with_steps_and_scores(tmp_path: Path) -> None:
    scores = {"chosen_score": 0.9, "rejected_score": 0.4}
    texts, steps = rows(
        tmp_path,
        {"prompt": "What is 1 plus 1?", "chosen": "2", "rejected": "3", **scores},
        {"prompt": [ASKED], "chosen": [CALL, RESULT, RIGHT], "rejected": [WRONG]},
    )
    assert texts.task["prompt"] == [ASKED]
    assert texts.difference == pytest.approx(0.5)
    assert json.loads(steps.task["metadata"]["trajectory_json"]) == [CALL, RESULT]
    assert steps.worse is not None
    assert steps.worse["metadata"]["trajectory_json"] == "[]"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("no JSON", "line 2: it is not JSON: invalid literal, expected 'null' at column 1."),
        ({"messages": "hello"}, "line 2: `messages` is a text, not a list of messages"),
        ({"messages": [RIGHT]}, "holds a question"),
        ({"chosen": "2", "rejected": "3"}, "holds a question"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": ""}, "line 2: `rejected` holds no reply"),
        ({"prompt": "1+1?", "chosen": 2, "rejected": "3"}, "line 2: `chosen` is a number, not a list of messages"),
        (
            {"chosen": [ASKED, RIGHT], "rejected": [SYSTEM, ASKED, WRONG]},
            "line 2: `chosen` and `rejected` reply to different messages",
        ),
        (
            {"prompt": "1+1?", "chosen": "2", "rejected": "3", "chosen_score": "high"},
            "line 2: `chosen_score` is a text, not a number",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        rows(tmp_path, {"question": "1+1?"}, line)
    assert f"cannot read --data {tmp_path / 'rows.jsonl'}: " in str(error.value)
    assert why in str(error.value)
