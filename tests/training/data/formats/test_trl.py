"""TRL reads what is exported for it: its own checks, templates and trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import POLICY
from tests.training.data.formats.conftest import TEMPLATES, Exported, Load
from tests.training.data.formats.filling import (
    CALCULATE,
    LOOK_UP,
    UNICODE,
    Judged,
    after_tools,
    bad,
    every_kind,
    good,
    later_turn,
    lines,
    reply,
    with_tools,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(POLICY))


@pytest.fixture(params=["qwen3", "qwen3_5_nothink", "llama3_1"])
def template(request: pytest.FixtureRequest) -> str:
    """Templates that print arguments, that go through them, and that ask whether a message *has* tool calls."""
    return (TEMPLATES / f"{request.param}.jinja").read_text()


def rendered(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], template: str) -> dict[str, str]:
    from trl.data_utils import is_conversational, maybe_apply_chat_template

    assert is_conversational(row)
    tools = json.loads(row["tools"])
    done: dict[str, str] = maybe_apply_chat_template(row, tokenizer, tools=tools, chat_template=template)
    return done


@pytest.mark.slow
def test_a_whole_reply_is_rendered_with_its_calls_and_results(
    exported: Exported, load: Load, tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    rows = load(exported("trl-sft", [good(told) for told in every_kind()]))
    texts = {row["task_id"]: rendered(tokenizer, row, template) for row in rows}
    done = [texts[row["task_id"]] for row in rows]
    assert len(done) == 6
    [call] = [text for text in done if "mile" in text["completion"]]
    assert "look_up" in call["completion"]
    assert "\\boxed{40}" in call["completion"]
    assert "Look up a unit." in call["prompt"]
    [said] = [text for text in done if "🎉" in text["completion"]]
    assert "🧮👩‍🔬" in said["prompt"]
    # Nothing that is not there may show: "None" is how a template prints the null of a column that was aligned.
    assert not [text for text in done if "None" in text["prompt"] + text["completion"]]


@pytest.mark.slow
def test_a_prompt_keeps_its_history_and_rewards_get_the_rest(
    exported: Exported, load: Load, tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    [row] = load(exported("trl-grpo", [good(later_turn(1), 0.75)]))
    text = rendered(tokenizer, row, template)["prompt"]
    assert text.index("You do sums.") < text.index("2 plus 2") < text.index("\\boxed{4}") < text.index("Now double")
    assert (row["answer"], row["score"], row["agent_name"]) == ("\\boxed{2}", 0.75, "Tutor")
    assert json.loads(row["tools"]) is None


def test_completions_hold_the_reply_and_prompts_all_before_it(exported: Exported, load: Load) -> None:
    [row] = load(exported("trl-sft", [good(with_tools(2))]))
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert [message["role"] for message in row["completion"]] == ["assistant", "tool", "assistant"]
    call, result, answer = row["completion"]
    assert call["tool_calls"][0]["function"] == {"name": "calculate", "arguments": {"expression": "36 + 4"}}
    assert result == {"role": "tool", "content": "40", "tool_call_id": "call_2", "name": "calculate"}
    assert answer == {"role": "assistant", "content": "\\boxed{40}"}
    assert json.loads(row["tools"]) == [CALCULATE, LOOK_UP]


@pytest.mark.parametrize("arguments", ['"36 + 4"', "[1]", '{"n": 99999999999999999999}', '{"n": NaN}', "{" * 100_000])
def test_calls_that_no_reader_takes_are_not_taught(exported: Exported, load: Load, arguments: str) -> None:
    rows = load(exported("trl-sft", [good(with_tools(1, arguments=arguments)), good(with_tools(2, arguments=""))]))
    assert [row["completion"][0]["tool_calls"][0]["function"]["arguments"] for row in rows] == [{}]


@pytest.mark.parametrize("name", ["trl-grpo", "trl-sft"])
def test_a_late_tool_call_does_not_break_a_long_file(exported: Exported, load: Load, name: str) -> None:
    """`datasets` infers types from the first chunk, 10 MB of a real file: here the tool calls come long after it."""
    entries = [Judged(reply(number), score=None) for number in range(200)]
    entries += [good(with_tools(300)), good(after_tools(301, tools=()))]
    path = exported(name, entries)
    assert list(load(path, chunksize=5_000)) == lines(path)
    assert len(lines(path)) == 202


# Pairs


def pair(number: int, better: float, worse: float, **more: Any) -> list[Judged]:
    asked = {"query": f"Question {number}?", **more}
    return [
        good(reply(number, answer=f"right {number}", **asked), better),
        bad(reply(number + 1000, answer=f"wrong {number}", **asked), worse),
    ]


@pytest.mark.slow
def test_pairs_are_of_one_prompt_and_differ(exported: Exported, load: Load, tokenizer: Any, template: str) -> None:
    entries = [
        *pair(1, 0.9, 0.2),
        *pair(2, 0.6, 0.6),
        good(reply(3, query="Same?", answer="same"), 0.9),
        bad(reply(4, query="Same?", answer=" same\n"), 0.1),
        good(reply(5, query="Tools?", tools=(CALCULATE,), answer="a"), 0.9),
        bad(reply(6, query="Tools?", answer="b"), 0.1),
        good(reply(7, query="Unjudged?", answer="a"), 0.9),
        Judged(bad(reply(8, query="Unjudged?", answer="b")).reply, bad(reply(8)).state, None),
        good(with_tools(9, query="Steps?"), 0.8),
        bad(reply(10, query="Steps?", tools=(CALCULATE, LOOK_UP), answer="no idea"), 0.0),
        *pair(11, 1.0, 0.0, images=("https://example.com/a.png",)),
        good(reply(12, query=UNICODE, answer="六"), 1.0),
        bad(reply(13, query=UNICODE, answer="七"), 0.0),
    ]
    rows = sorted(load(exported("trl-dpo", entries)), key=lambda row: -row["chosen_score"])
    assert [(row["chosen_score"], row["rejected_score"]) for row in rows] == [(1.0, 0.0), (0.9, 0.2), (0.8, 0.0)]
    texts = [rendered(tokenizer, row, template) for row in rows]
    assert "right 1" in texts[1]["chosen"]
    assert "wrong 1" in texts[1]["rejected"]
    assert "36 + 4" in texts[2]["chosen"]
    assert "no idea" in texts[2]["rejected"]


@pytest.mark.parametrize(("margin", "expected"), [("0", 3), ("0.1", 3), ("0.3", 2), ("0.9", 1), ("1", 0)])
def test_the_margin_decides_exactly(exported: Exported, margin: str, expected: int) -> None:
    entries = [*pair(1, 0.9, 0.8), *pair(2, 0.9, 0.6), *pair(3, 0.9, 0.0)]
    if expected:
        assert len(lines(exported("trl-dpo", entries, "--margin", margin))) == expected
    else:
        with pytest.raises(AssertionError, match="too close"):
            exported("trl-dpo", entries, "--margin", margin)


# The trainers themselves


def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "trained"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def chatty(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = (TEMPLATES / template).read_text()
    return tokenizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sft_trains_on_the_reply_alone(exported: Exported, load: Load, tmp_path: Path) -> None:
    import trl
    from transformers import AutoTokenizer

    tokenizer = chatty(AutoTokenizer.from_pretrained(str(POLICY)), "qwen3_training.jinja")
    rows = load(exported("trl-sft", [good(with_tools(1)), good(later_turn(2))]))
    trainer = trl.SFTTrainer(
        str(POLICY),
        args=trl.SFTConfig(**settings(tmp_path), assistant_only_loss=True, max_length=4096),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trained = []
    for batch in trainer.get_train_dataloader():
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            trained.append(tokenizer.decode(ids[labels != -100]))
    assert sorted(text.count("\\boxed{40}") for text in trained) == [0, 1]
    [with_call] = [text for text in trained if "boxed{40}" in text]
    assert '"36 + 4"' in with_call
    assert "tool_response" not in with_call
    assert all("You do sums" not in text and "2 plus 2" not in text and "boxed{4}" not in text for text in trained)
    assert trainer.train().training_loss > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_dpo_trains_on_the_pairs(exported: Exported, load: Load, tmp_path: Path) -> None:
    import trl
    from transformers import AutoTokenizer

    tokenizer = chatty(AutoTokenizer.from_pretrained(str(POLICY)), "qwen3.jinja")
    entries = [
        *pair(1, 0.9, 0.2),
        good(with_tools(9, query="Steps?"), 0.8),
        bad(reply(10, query="Steps?", tools=(CALCULATE, LOOK_UP), answer="no idea"), 0.0),
    ]
    trainer = trl.DPOTrainer(
        str(POLICY),
        args=trl.DPOConfig(**settings(tmp_path), max_length=4096),
        train_dataset=load(exported("trl-dpo", entries)),
        processing_class=tokenizer,
    )
    assert trainer.train().training_loss > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_grpo_hands_the_columns_to_the_reward_function(exported: Exported, load: Load, tmp_path: Path) -> None:
    import trl
    from transformers import AutoTokenizer

    tokenizer = chatty(AutoTokenizer.from_pretrained(str(POLICY)), "qwen3.jinja")
    seen: list[tuple[str, float]] = []

    def reward(completions: list[Any], answer: list[str], score: list[float], **_: Any) -> list[float]:
        seen.extend(zip(answer, score, strict=True))
        return [float(place) for place in range(len(completions))]

    trainer = trl.GRPOTrainer(
        str(POLICY),
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings(tmp_path), num_generations=2, max_completion_length=8),
        train_dataset=load(exported("trl-grpo", [good(later_turn(1), 0.75), good(after_tools(2), 0.75)])),
        processing_class=tokenizer,
    )
    trainer.train()
    assert set(seen) <= {("\\boxed{2}", 0.75), ("\\boxed{3}", 0.75)}
    assert seen
