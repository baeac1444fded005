"""Checks of text, JSON, maths, tools and functions: each with what it takes and what it refuses."""

from __future__ import annotations

import json
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import CheckError
from flywheel.judge.rubric import text
from flywheel.judge.rubric.checks import (
    MAX_CHARACTERS,
    check,
    check_all,
    fails_required,
    math_equal,
)
from flywheel.judge.rubric.file import load_rubric, parse_rubric
from flywheel.judge.rubric.rubric import CRITERION, KINDS, Rubric
from flywheel.records.verdict import CriterionResult, Exchange
from tests.cases import for_each


def result(exchange: Exchange, kind: str, value: Any = "", **options: Any) -> CriterionResult:
    return check(CRITERION.validate_python({"id": "c", "type": kind, "value": value, **options}), exchange)


def passes(answer: str, kind: str, value: Any = "", **options: Any) -> bool:
    return result(Exchange("q", answer), kind, value, **options).passed


def test_a_pattern_that_backtracks_without_end_is_stopped_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "TIMEOUT_SECONDS", 0.3)
    ticks = 0
    done = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.wait(0.01):
            ticks += 1

    counting = threading.Thread(target=count)
    counting.start()
    try:
        with pytest.raises(CheckError, match=r"criterion c: its pattern ran longer than 0\.3 s on an answer of 41"):
            passes("a" * 40 + "!", "regex", "^(a|a|aa)+$")
    finally:
        done.set()
        counting.join()
    assert ticks > 3


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("answer", "passed", "reason"),
    [
        ('{"name": "Ada", "age": 36}', True, "allows"),
        ('  {"name": "Ada"}\n', True, "allows"),
        ('```json\n{"name": "Ada"}\n```', True, "allows"),
        ('~~~\n{"name": "Ada"}\n~~~\n', True, "allows"),
        ('{"name": "ada"}', False, r"at \$\.name"),
        ('{"age": 3}', False, '"name" is a required property'),
        ('{"name": "Ada", "age": 3.5}', False, r"at \$\.age"),
        ('Here it is: {"name": "Ada"}', False, "not JSON"),
        ('{"name": "Ada", "age": NaN}', False, "NaN is not valid in JSON"),
        ("[" * 100_000, False, "not JSON"),
        ("", False, "not JSON"),
        ("[]", False, 'not of type "object"'),
    ],
)
def test_json_schema(answer: str, passed: bool, reason: str) -> None:
    found = result(Exchange("q", answer), "json-schema", SCHEMA)
    assert found.passed is passed
    assert re.search(reason, found.reason), found.reason


def test_a_schema_fetches_nothing() -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(1)
    try:
        _asks_nobody()
    finally:
        socket.setdefaulttimeout(before)


def _asks_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        with pytest.raises(CheckError, match=r"\$ref"):
            passes("{}", "json-schema", {"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"})
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        (r"So \boxed{7}.", "7", True),
        (r"So \boxed{7.0}.", 7, True),
        (r"So \boxed{8}.", "7", False),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{\dfrac{\sqrt{3}}{3}}", r"1/\sqrt{3}", True),
        (r"\boxed{\left\{1, 2\right\}}", r"\{2,1\}", True),
        (r"\boxed{x = 38}", "38", True),
        (r"\boxed{1,234}", "1234", True),
        (r"\boxed{10 000}", "10000", True),
        (r"\boxed{10\,000}", "10000", True),
        (r"\boxed{42 \text{ km}}", "42", True),
        (r"\boxed{\text{yes}}", "yes", True),
        (r"\boxed{50\%}", r"50\%", True),
        (r"\boxed{−3}", "-3", True),
        (r"First \boxed{3}, no: \boxed{4}", "4", True),
        (r"First \boxed{4}, no: \boxed{3}", "4", False),
        (r"\boxed{4", "4", False),
        (r"It is 4.", "4", False),
        (r"\boxed{}", "4", False),
        (r"\boxed{\}}", "4", False),
        (r"\boxed{x+1}", r"$$\boxed{1+x}$$", True),
        (r"\boxed{(1,2)}", "(2,1)", False),
        (r"\boxed{\frac{1}{0}}", "1", False),
        (r"\boxed{" + "9" * 5000 + "}", "9", False),
        (r"\boxed{\int\frac{{{}", "9", False),
    ],
)
def test_math_equal(answer: str, reference: str | float, equal: bool) -> None:
    assert passes(answer, "math-equal", reference) is equal
    task = Exchange("q", answer, line={"metadata": {"reference": reference}})
    assert result(task, "math-equal").passed is equal


def test_the_references_in_their_order() -> None:
    task = Exchange("q", r"\boxed{2}", reference=r"I say \boxed{2}.")
    assert result(task, "math-equal").passed
    task = Exchange("q", r"\boxed{2}", reference=r"I say \boxed{3}.", line={"metadata": {"reference": "2"}})
    assert result(task, "math-equal").passed
    assert not result(task, "math-equal", reference=3).passed
    with pytest.raises(CheckError, match="no reference answer"):
        result(Exchange("q", r"\boxed{2}", line={"metadata": {"reference": ""}}), "math-equal")


@pytest.mark.slow
def test_a_result_that_computes_for_ever_is_ended_and_the_next_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes(r"\boxed{1+1}", "math-equal", 2)
    monkeypatch.setattr(math_equal, "TIMEOUT_SECONDS", 0.5)
    with pytest.raises(CheckError, match=r"took more than 0\.5 s"):
        passes(r"\boxed{9^{9^{9^{9}}}+1}", "math-equal", r"8^{8^{8^{8}}}")
    monkeypatch.setattr(math_equal, "TIMEOUT_SECONDS", 60)
    assert passes(r"\boxed{1+1}", "math-equal", 2)


@pytest.mark.slow
def test_maths_works_from_many_threads() -> None:
    wrong: list[int] = []

    def compare(number: int) -> None:
        if not passes(rf"\boxed{{{number}+1}}", "math-equal", number + 1):
            wrong.append(number)
        if passes(rf"\boxed{{{number}+2}}", "math-equal", number + 1):
            wrong.append(number)

    threads = [threading.Thread(target=compare, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def call(*names: str) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": name}}]}
        for name in names
    )


@pytest.mark.parametrize(
    ("called", "options", "passed"),
    [
        (("add",), {"value": "add"}, True),
        ((), {"value": "add"}, False),
        (("add", "sub"), {"value": ["sub", "mul"]}, True),
        (("add",), {"value": ["sub", "mul"]}, False),
        (("add", "add"), {"value": "add", "min": 2}, True),
        (("add",), {"value": "add", "min": 2}, False),
        (("add", "sub", "add"), {"value": ["add", "sub"], "max": 2}, False),
        (("sub",), {"value": "add", "max": 0}, True),
        (("add",), {"value": "add", "max": 0}, False),
    ],
)
def test_tool_called(called: tuple[str, ...], options: dict[str, Any], passed: bool) -> None:
    assert result(Exchange("q", "a", trajectory=call(*called)), "tool-called", **options).passed is passed


@pytest.mark.parametrize(
    ("called", "options", "passed"),
    [
        (("a", "b", "c"), {"value": ["a", "c"]}, True),
        (("a", "b", "c"), {"value": ["c", "a"]}, False),
        (("a", "b"), {"value": ["a", "b"], "match": "exact"}, True),
        (("a", "b", "b"), {"value": ["a", "b"], "match": "exact"}, False),
        (("a",), {"value": ["a", "a"]}, False),
        ((), {"value": ["a"]}, False),
        (("a",), {"value": "a", "match": "subsequence"}, True),
    ],
)
def test_tool_sequence(called: tuple[str, ...], options: dict[str, Any], passed: bool) -> None:
    assert result(Exchange("q", "a", trajectory=call(*called)), "tool-sequence", **options).passed is passed


def test_no_error_span() -> None:
    good = {"role": "tool", "name": "add", "content": "Error: is a word"}
    assert result(Exchange("q", "a", trajectory=(good,)), "no-error-span").passed
    failed = Exchange("q", "a", line={"metadata": {"errors_json": json.dumps(["tool add: TimeoutError: slow"])}})
    found = result(failed, "no-error-span")
    assert (found.passed, found.reason) == (False, "failed: tool add: TimeoutError: slow")
    assert not result(Exchange("q", "a", trajectory=({**good, "status": "error"},)), "no-error-span").passed


def test_odd_trajectories_break_no_check() -> None:
    odd: tuple[dict[str, Any], ...] = (
        {"role": "assistant", "tool_calls": None}, {"role": "assistant", "tool_calls": [None, {"function": None}]},
        {"tool_calls": "x"}, {},
    )  # fmt: skip
    exchange = Exchange("q", "a", trajectory=odd, line={"metadata": {"errors_json": "{"}})
    assert not result(exchange, "tool-called", "add").passed
    assert not result(exchange, "tool-sequence", "add").passed
    assert result(exchange, "no-error-span").passed


def python_rubric(folder: Path, source: str, **more: Any) -> Rubric:
    (folder / "checks.py").write_text(source)
    criterion = {"id": "mine", "type": "python", "value": "checks.py:decide", **more}
    (folder / "r.yaml").write_text(json.dumps({"id": "r", "criteria": [criterion]}))
    return load_rubric(folder / "r.yaml")


LINE = {"main_query": "q", "answer": "four", "metadata": {"turn": 3}}


@pytest.mark.parametrize(
    ("body", "value", "reason"),
    [
        ("return task['answer'] == 'four'", 1.0, "decide returned True"),
        ("return False, 'too short'", 0.0, "too short"),
        ("return 0.25", 0.25, "decide returned 0.25"),
        ("return task['metadata']['turn'] / 4, 'turns'", 0.75, "turns"),
        ("task['answer'] = 'spoiled'; return True", 1.0, "decide returned True"),
    ],
)
def test_a_function_decides(tmp_path: Path, body: str, value: float, reason: str) -> None:
    rubric = python_rubric(tmp_path, f"def decide(task):\n    {body}\n")
    exchange = Exchange("q", "four", line=LINE)
    [found] = check_all(rubric, exchange)
    assert (found.value, found.reason, LINE["answer"]) == (value, reason, "four")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return 2", "must return a bool"),
        ("return float('nan')", "must return a bool"),
        ("return None", "must return a bool"),
        ("return 'yes'", "must return a bool"),
    ],
)
def test_a_function_that_breaks_decides_nothing(tmp_path: Path, body: str, complaint: str) -> None:
    rubric = python_rubric(tmp_path, f"def decide(task):\n    {body}\n")
    with pytest.raises(CheckError, match=f"decide criterion mine by checks.py:decide: .*{complaint}"):
        check_all(rubric, Exchange("q", "a", line=LINE))


def test_a_rollout_is_given_to_the_function_under_the_same_keys(tmp_path: Path) -> None:
    keys = "{'main_query', 'question', 'answer', 'init_messages', 'metadata'}"
    rubric = python_rubric(tmp_path, f"def decide(task):\n    return {keys} <= set(task), task['answer']\n")
    [found] = check_all(rubric, Exchange("q", "fresh", line={"metadata": {"reference": "4"}}))
    assert (found.passed, found.reason) == (True, "fresh")


def test_a_round_grades_by_the_file_that_was_there_when_it_was_planned(tmp_path: Path) -> None:
    rubric = python_rubric(tmp_path, "def decide(task):\n    return True\n")
    spec = json.loads(json.dumps(rubric.model_dump(mode="json")))
    changed = python_rubric(tmp_path, "def decide(task):\n    return False\n")
    assert changed.hash != rubric.hash
    again = parse_rubric(spec, "spec")
    assert again.hash == rubric.hash
    assert check_all(again, Exchange("q", "a"))[0].passed
    assert not check_all(changed, Exchange("q", "a"))[0].passed


def test_a_schema_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "r.yaml").write_text("id: r\ncriteria: [{id: a, type: json-schema, value: answer.json}]")
    rubric = load_rubric(tmp_path / "r.yaml")
    assert check_all(rubric, Exchange("q", '{"name": "Ada"}'))[0].passed
    assert not check_all(rubric, Exchange("q", '{"name": "ada"}'))[0].passed


def test_a_failed_required_check_decides_though_another_breaks(tmp_path: Path) -> None:
    rubric = parse_rubric(
        {
            "id": "r",
            "criteria": [
                {"id": "maths", "type": "math-equal"},
                {"id": "long", "type": "min-length", "value": 100, "required": True},
                {"id": "good", "value": "It is good."},
            ],
        },
        "r",
    )
    assert [found.criterion for found in check_all(rubric, Exchange("q", "short"))] == ["long"]
    assert fails_required(rubric, check_all(rubric, Exchange("q", "short")))
    with pytest.raises(CheckError, match="no reference answer"):
        check_all(rubric, Exchange("q", r"\boxed{7} " + "long" * 40))


def test_checks_look_at_both_ends_of_a_long_text_and_lengths_count_all_of_it() -> None:
    long = f"begin {'word ' * MAX_CHARACTERS} middle {'word ' * MAX_CHARACTERS} end"
    assert passes(long, "contains", "begin")
    assert passes(long, "contains", "end")
    assert passes(long, "not-regex", "middle")
    assert passes(long, "min-length", len(long))
    assert not passes(long, "max-length", len(long) - 1)
    assert passes(f'"{"a" * (MAX_CHARACTERS - 2)}"', "json-schema", {"type": "string"})
    told = result(Exchange("q", f'"{"a" * MAX_CHARACTERS}"'), "json-schema", {"type": "string"})
    assert (told.passed, told.reason) == (
        False,
        f"the answer has {MAX_CHARACTERS + 2} characters; JSON of more than {MAX_CHARACTERS} is not read",
    )


CHECKS = [name for name, model in KINDS.items() if not (model.asks_the_judge or model.reads_whole_texts)]


@pytest.mark.parametrize("kind", CHECKS)
def test_no_check_is_given_more_than_it_may_look_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Exchange] = []
    monkeypatch.setattr(KINDS[kind], "decide", lambda _, exchange, __: given.append(exchange) or (1.0, ""))
    value = {"value": "1"} if KINDS[kind].model_fields["value"].is_required() else {}
    weight = -1 if kind in ("redundant-call", "timeout") else 1
    result(Exchange("q" * 3 * MAX_CHARACTERS, "a" * 3 * MAX_CHARACTERS), kind, **value, weight=weight)
    assert [(len(exchange.query), len(exchange.answer)) for exchange in given] == [
        (MAX_CHARACTERS + 1, MAX_CHARACTERS + 1)
    ]


@for_each(
    "text, right",
    [
        ("It is 42.", "It is 42."),
        (r"\boxed{41}, no: \boxed{ \frac{1}{2} }. \boxed{}", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{4", r"\boxed{4"),
    ],
)
def test_the_result_of_a_right_answer(text: str, right: str) -> None:
    assert math_equal.right_answer(text) == right


def boxed_by_looking_on_from_each(text: str) -> str | None:
    """The same as `maths.boxed`, in quadratic time: from the last box to the first, how far its braces reach."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth, place = 1, match.end()
        while place < len(text):
            if text[place] == "\\":
                place += 2
                continue
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[match.end() : place].strip()
            place += 1
    return None


@given(
    st.lists(st.sampled_from(["\\boxed{", "\\fbox {", "{", "}", "\\", "\\{", "\\}", "a", " ", "boxed{"])).map("".join)
)
def test_the_last_box_is_found_in_one_look(text: str) -> None:
    assert math_equal.boxed(text) == boxed_by_looking_on_from_each(text)
