"""AgentJet and Trinity-RFT read what is exported for them, by the schemas that they document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from tests.conftest import POLICY
from tests.training.data.formats.conftest import TEMPLATES, Exported
from tests.training.data.formats.filling import (
    after_tools,
    every_kind,
    good,
    later_turn,
    line,
    lines,
    reply,
    with_tools,
)

# AgentJet


class Task(BaseModel):
    """`ajet.schema.task.Task` (AgentJet, January 2026), refusing what it would drop."""

    model_config = ConfigDict(strict=True, extra="forbid")

    main_query: str
    init_messages: list[dict[str, Any]]
    task_id: str
    env_type: str
    metadata: dict[str, Any]


def test_agentjet_gets_every_kind_of_task(exported: Exported) -> None:
    told = every_kind()
    tasks = [Task(**row) for row in lines(exported("agentjet", [good(one) for one in told]))]
    assert len(tasks) == len({task.task_id for task in tasks}) == len(told)
    by_id = {task.task_id: task for task in tasks}
    for one in told:
        expected = json.loads(json.dumps(line(one)).replace("\\ud800", "?"))
        assert by_id[expected["task_id"]].model_dump() == {key: expected[key] for key in Task.model_fields}


@pytest.mark.training
def test_agentjet_makes_its_data_set_of_the_tasks(exported: Exported) -> None:
    """As its `task_to_standard_dataset` does."""
    rows = lines(exported("agentjet", [good(told) for told in every_kind()]))
    import datasets

    made = datasets.Dataset.from_dict({key: [row[key] for row in rows] for key in Task.model_fields})
    assert [row["metadata"] for row in made] == [row["metadata"] for row in rows]


# Trinity-RFT


def read(path: Path, cache: Path) -> list[dict[str, Any]]:
    """As its file readers do: the path of a directory, and a split."""
    import datasets

    return list(datasets.load_dataset(str(path.parent), split="train", cache_dir=str(cache)))


@pytest.mark.training
def test_trinity_workflows_get_question_and_answer(exported: Exported, tmp_path: Path) -> None:
    rows = read(exported("trinity", [good(reply(1)), good(later_turn(2))]), tmp_path / "cache")
    assert [(row["question"], row["answer"]) for row in rows] == [
        ("What is 1 plus 1?", "\\boxed{2}"),
        ("Now double that.", "\\boxed{3}"),
    ]
    assert {row["system_prompt"] for row in rows} == {"You do sums."}
    assert [len(json.loads(row["prompt"])) for row in rows] == [2, 4]


@pytest.mark.slow
@pytest.mark.training
@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_nothink", "llama3_1"])
def test_trinity_trains_on_messages_and_tools(exported: Exported, tmp_path: Path, template: str) -> None:
    """Its SFT formatter decodes both columns and renders them, and all but the last message as the prompt."""

    path = exported("trinity", [good(told) for told in every_kind()])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(POLICY))
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    rows = read(path, tmp_path / "cache")
    assert rows == lines(path)
    assert len(rows) == 6
    for row in rows:
        messages, tools = json.loads(row["messages"]), json.loads(row["tools"])
        assert messages[-1] == {"role": "assistant", "content": row["answer"]}
        whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        prompt = tokenizer.apply_chat_template(messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True)
        assert row["answer"] in whole
        assert len(prompt) < len(whole) + 40
        assert "None" not in whole


@pytest.mark.training
def test_trinity_columns_have_one_type_however_rows_differ(exported: Exported, tmp_path: Path) -> None:
    entries = [good(reply(number)) for number in range(100)] + [good(with_tools(200)), good(after_tools(201))]
    path = exported("trinity", entries)
    import datasets

    made = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"), chunksize=2_000
    )
    assert {str(kind) for kind in made.features.values()} == {str(datasets.Value("string"))}
    assert list(made) == lines(path)
