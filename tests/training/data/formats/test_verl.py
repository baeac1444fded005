"""verl reads what is exported for it, as its `RLHFDataset` does."""

from __future__ import annotations

import io
import json

import pytest

from flywheel.training.data.export_formats import ROW_GROUP, parquet, verl, verl_schema
from tests.conftest import POLICY
from tests.training.data.formats.conftest import TEMPLATES, Exported, Load
from tests.training.data.formats.filling import (
    Judged,
    after_tools,
    every_kind,
    exported,
    good,
    later_turn,
    line,
    reply,
    with_tools,
)


def test_the_columns_are_those_that_verl_documents(exported: Exported, load: Load) -> None:
    [row] = load(exported("verl", [good(later_turn(1), 0.75)]))
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "\\boxed{2}"}
    assert row["prompt"] == [
        {"role": "system", "content": "You do sums."},
        {"role": "user", "content": "What is 2 plus 2?"},
        {"role": "assistant", "content": "\\boxed{4}"},
        {"role": "user", "content": "Now double that."},
    ]
    about = row["extra_info"]
    assert (about["split"], about["score"], about["question"]) == ("train", 0.75, "Now double that.")
    assert json.loads(about["tools_json"]) is None


@pytest.mark.slow
@pytest.mark.parametrize("template", ["qwen3", "llama3_1"])
@pytest.mark.parametrize("history_with_tools", [False, True])
def test_every_prompt_is_rendered(exported: Exported, load: Load, template: str, history_with_tools: bool) -> None:
    told = [one for one in every_kind() if history_with_tools or one.query != "And half?"]
    rows = load(exported("verl", [good(one) for one in told]))
    assert len(rows) == len(told) - 1
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(POLICY))
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    if history_with_tools and template == "llama3_1":
        # What the page on export says of such a file: this template takes a null for a list of tool calls.
        with pytest.raises(TypeError):
            [tokenizer.apply_chat_template(row["prompt"], tokenize=False) for row in rows]
        return
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    assert any("🧮👩‍🔬" in text for text in texts)
    assert any("2+2" in text for text in texts) is history_with_tools
    assert not [text for text in texts if "None" in text]


def test_scores_may_be_missing_and_answers_empty(exported: Exported, load: Load) -> None:
    entries = [Judged(reply(1, answer=""), score=None), good(reply(2), 0.5)]
    rows = load(exported("verl", entries))
    assert [row["extra_info"]["score"] for row in rows] == [None, 0.5]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["", "\\boxed{3}"]


@pytest.mark.training
def test_rows_are_written_in_groups_and_all_of_them() -> None:
    file = io.BytesIO()
    kinds = [reply(1), with_tools(2), after_tools(3)]
    with parquet(file, frozenset({"prompt"}), schema=verl_schema) as write:
        for number in range(ROW_GROUP * 2 + 7):
            write(verl(exported(line(kinds[number % 3]))))
    import pyarrow.parquet as pq

    made = pq.ParquetFile(io.BytesIO(file.getvalue()))
    assert [made.metadata.row_group(at).num_rows for at in range(made.num_row_groups)] == [ROW_GROUP, ROW_GROUP, 7]
    last = made.read().slice(ROW_GROUP * 2 + 6).to_pylist()
    assert last[0]["extra_info"]["question"] == kinds[(ROW_GROUP * 2 + 6) % 3].query
