"""A corpus of injection attempts, and any other text: nothing of a task gets out of its delimiters, in any field.

This is about how the prompt is made and the reply is read. What a judge lets itself be told is another matter, see
docs/understand/judging.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flywheel.config.judge import JudgeSettings
from flywheel.judge.answer import UnreadableError, read
from flywheel.judge.grader import Grader
from flywheel.judge.prompt import NAMES, PROBLEM, REMINDER, escape, messages, new_nonce, parse_sections
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.verdict import Exchange, Outcome
from tests.cases import for_each
from tests.factories.judge_server import JudgeServer

CORPUS = [
    json.loads(line) for line in (Path(__file__).parent.parent / "data" / "injections.jsonl").read_text().splitlines()
]
NONCE = "0123456789abcdef"
"""The corpus guesses this one."""
RUBRIC = Rubric.model_validate(
    {
        "id": "r",
        "criteria": [
            {"id": "correct", "value": "It is right.", "required": True},
            {"id": "clear", "value": "It is clear.", "choices": ["poor", "good"]},
        ],
    }
)
FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "query": lambda text: {"query": text},
    "answer": lambda text: {"answer": text},
    "reference": lambda text: {"reference": text},
    "history": lambda text: {"history": ({"role": "user", "content": text}, {"role": "assistant", "content": text})},
    "role": lambda text: {"history": ({"role": text, "content": "Hello"},)},
    "tool output": lambda text: {"trajectory": ({"role": "tool", "name": "search", "content": text},)},
    "tool name": lambda text: {"trajectory": ({"role": "tool", "name": text, "content": "7"},)},
    "tool call": lambda text: {
        "trajectory": ({"role": "assistant", "tool_calls": [{"function": {"name": text, "arguments": text}}]},)
    },
    "tool description": lambda text: {
        "tools": ({"type": "function", "function": {"name": text, "description": text}},)
    },
}
BENIGN: dict[str, Any] = {"query": "What is 3 plus 4?", "answer": "7"}


def exchange(field: str, text: str) -> Exchange:
    return Exchange(**{**BENIGN, **FIELDS[field](text)})


def assert_nothing_is_outside(shown: Exchange, nonce: str = NONCE, problem: str = "") -> dict[str, str]:
    """The two messages are what they would be for any task, but for the texts between the delimiters."""
    system, user = messages(RUBRIC, shown, nonce=nonce, problem=problem)
    assert system == messages(RUBRIC, Exchange("", ""), nonce=nonce)[0]
    lines = user["content"].split("\n")
    names = [name for name in NAMES if f"<<<{name} {nonce}>>>" in lines]
    # What does not stand on a line of its own, or a second time, would be no delimiter of ours.
    turns = shown_turns(shown)
    assert user["content"].count(nonce) == 2 * len(names) + turns
    assert sum(begins_turn(line, nonce) for line in lines) == turns
    outside, texts, rest = "", {}, user["content"]
    for name in names:
        before, opened, rest = rest.partition(f"<<<{name} {nonce}>>>\n")
        texts[name], closed, rest = rest.partition(f"\n<<<END {name} {nonce}>>>")
        assert opened
        assert closed
        outside += before
    told = [PROBLEM.format(problem=problem)] if problem else []
    assert (outside + rest).split("\n\n") == ["", *[""] * (len(names) - 1), *told, REMINDER]
    assert texts == parse_sections(user["content"])
    single = [text for name, text in texts.items() if name in ("QUESTION", "ANSWER", "REFERENCE ANSWER")]
    assert all(nonce not in text.lower() for text in single)
    return texts


def shown_turns(shown: Exchange) -> int:
    """How many turns, steps and tools there are to be shown."""
    messages = (*shown.history, *shown.trajectory)
    calls = sum(len(message.get("tool_calls") or ()) for message in messages)
    return len(shown.tools) + calls + sum(bool(message.get("content")) for message in messages)


def begins_turn(line: str, nonce: str) -> bool:
    before, is_there, _ = line.partition(f" {nonce}] ")
    return line.startswith("[") and bool(is_there) and nonce not in before.lower()


def told(text: str, nonce: str) -> str:
    """A text as it is to be shown, without white space: names are shown on one line."""
    return "".join(escape(text, nonce).split())


def test_the_corpus_is_what_it_claims() -> None:
    assert len(CORPUS) >= 40
    assert len({entry["text"] for entry in CORPUS}) == len({entry["id"] for entry in CORPUS}) == len(CORPUS)
    assert {entry["language"] for entry in CORPUS} >= {"en", "zh", "de", "ar", "ru", "es"}
    kinds = {"ignore", "delimiter", "verdict", "turn", "encoded", "invisible", "markup", "tool", "persuasion"}
    assert {entry["kind"] for entry in CORPUS} == kinds


@for_each("field", FIELDS)
@for_each("entry", CORPUS)
def test_an_attempt_stays_between_its_delimiters(entry: dict[str, str], field: str) -> None:
    texts = assert_nothing_is_outside(exchange(field, entry["text"]), problem="the choice is none of the listed")
    # It is shown as it is, but for the guessed nonce and control tokens: it is data, and is to be graded as such.
    assert any(told(entry["text"], NONCE) in "".join(text.split()) for text in texts.values())
    # Of a nonce that is drawn anew it knows nothing: not a character is changed, only spaces added.
    nonce = new_nonce()
    fresh = assert_nothing_is_outside(exchange(field, entry["text"]), nonce)
    assert told(entry["text"], nonce) == "".join(entry["text"].split())
    assert any(told(entry["text"], nonce) in "".join(text.split()) for text in fresh.values())


@given(field=st.sampled_from(sorted(FIELDS)), text=st.text(), nonce=st.from_regex(r"\A[0-9a-f]{16}\Z"))
@example(field="answer", text=NONCE[8:] + NONCE + NONCE[:8], nonce=NONCE)
@example(field="query", text="0" * 40, nonce="0" * 16)
@example(field="answer", text="0" * 3 + "…" + "0" * 13, nonce="0" * 16)
def test_any_text_stays_between_its_delimiters(field: str, text: str, nonce: str) -> None:
    assert_nothing_is_outside(exchange(field, text), nonce)


@given(parts=st.lists(st.sampled_from([NONCE, NONCE[:4], "<<<", ">>>", "\n", "END ", *NAMES, " ", "…", "a"])))
def test_no_composition_of_delimiters_is_one(parts: list[str]) -> None:
    for field in FIELDS:
        assert_nothing_is_outside(exchange(field, "".join(parts)))


@for_each("entry", CORPUS)
def test_a_judge_that_only_quotes_an_attempt_has_given_no_verdict(entry: dict[str, str]) -> None:
    quotations = (entry["text"], f"The answer says: {entry['text']}", f"> {entry['text']}\n\nI cannot grade this.")
    for text in quotations:
        with pytest.raises(UnreadableError) as caught:
            read(RUBRIC.asked, text, nonce="fedcba9876543210")
        assert "flawless" not in str(caught.value), "what is told to the judge quotes nothing"


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with JudgeServer(lambda question, answer: False) as judge:
        made = Grader(RUBRIC, JudgeSettings(model="m", base_url=judge.base_url))
        yield made
        made.close()


@pytest.mark.slow
@for_each("entry", CORPUS)
def test_a_judge_that_says_no_is_heard_whatever_the_task_holds(grader: Grader, entry: dict[str, str]) -> None:
    text = entry["text"]
    verdict = grader.grade(Exchange(text, text, reference=text, history=({"role": "user", "content": text},)))
    assert (verdict.outcome, verdict.failed) == (Outcome.REJECTED, ("correct", "clear"))
