"""Influence: what counts as one template, and shares of a round."""

from __future__ import annotations

import pytest

from flywheel.judge.filters.deduplication import fingerprint, particulars, template
from flywheel.records.task import task_line
from tests.factories.trace import START, reply


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("What is 90% of 160?", "what is 5% of 1,000"),
        ("A train goes 82 km/h.", "A train goes 7 km/h."),
        ('Translate "good morning" to French', 'Translate "I am lost, help" to French'),
        ("把“早上好”翻译成法语", "把“谢谢你”翻译成法语"),
        ("Where was Ada Lovelace born?", "Where was Alan Turing born?"),
        ("What does `f(x)` do?", "What does `import os` do?"),
        ("Open https://a.example/x now", "Open http://b.example/y/z now"),
    ],
)
def test_numbers_names_and_quoted_parts_do_not_make_another_template(a: str, b: str) -> None:
    assert template(a) == template(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("What is 90% of 160?", "What is 90% more than 160?"),
        ("Where was Ada Lovelace born?", "When was Ada Lovelace born?"),
        ("把“早上好”翻译成法语", "把“早上好”翻译成德语"),
        ("Don't do it, it's late", "Don't say it, it's late"),
    ],
)
def test_other_questions_are_other_templates(a: str, b: str) -> None:
    assert template(a) != template(b)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("What is the capital of France?", "Please: What is the capital of France", True),
        ("What is the capital of France?", "What is the capital of Spain?", False),
        ('Say "good morning" twice', "Say “Good morning” twice", True),
        ('Say "good morning" twice', 'Say "good evening" twice', False),
    ],
)
def test_names_and_quoted_parts_are_particular(a: str, b: str, same: bool) -> None:
    assert (particulars(a) == particulars(b)) is same


def test_without_letter_case_there_are_no_names() -> None:
    assert particulars("WHAT IS THE CAPITAL OF FRANCE") == particulars("what is the capital of france") == frozenset()


def test_a_task_is_weighed_by_its_user_or_else_its_source() -> None:
    line = task_line(reply(3, conversation_id="c"), "/studio.db", "t")
    weight = fingerprint(line, 0.8)
    assert (weight.conversation, weight.user, weight.origin) == ("c", "", "source /studio.db")
    assert weight.at == START.timestamp() + 3
    line["metadata"]["user_id"] = "u"
    assert (fingerprint(line, 0.8).user, fingerprint(line, 0.8).origin) == ("u", "user u")
    line["metadata"]["conversation_id"] = "unknown"
    assert fingerprint(line, 0.8).conversation == line["metadata"]["trace_id"]
