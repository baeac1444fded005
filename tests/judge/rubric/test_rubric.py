"""Rubrics: strict, explained, and scored as written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.errors import ConfigError
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.file import load_rubric, parse_rubric, read_rubric
from flywheel.judge.rubric.rubric import CRITERION, Rubric
from flywheel.records.verdict import Exchange
from flywheel.system import files

YES = {"id": "a", "value": "It is so."}


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ([], "not a mapping"),
        ({"id": "r", "criteria": [YES], "treshold": 0.5}, r"unknown key `treshold` \(did you mean `threshold`\?\)"),
        (
            {"id": "r", "criteria": [{**YES, "wieght": 2}]},
            r"unknown key `criteria\.0\.wieght` \(did you mean `weight`",
        ),
        ({"id": "r", "criteria": [YES, YES]}, "same id: a"),
        ({"id": "r", "criteria": [{"id": "a", "type": "regex", "value": "("}]}, "no regular expression"),
        ({"id": "r", "criteria": [{"id": "a", "type": "rgx", "value": "x"}]}, r"criteria\.0\.type"),
        ({"id": "r", "criteria": [{**YES, "weight": -1}]}, "no criterion has a positive weight"),
        ({"id": "r"}, "no criterion has a positive weight"),
        ({"id": "r", "criteria": [{"id": "a"}]}, r"`criteria\.0\.value`: it is required"),
        ({"id": "r", "criteria": [{"id": "a", "type": "min-length", "value": "long"}]}, "must be a whole number"),
        ({"id": "r", "criteria": [{**YES, "choices": ["one"]}]}, "at least two"),
        ({"id": "r", "criteria": [{**YES, "choices": {"bad": 0, "good": 2}}]}, "it must be 1 or less"),
        ({"id": "r", "criteria": [{**YES, "choices": {"Yes": 0, "yes": 1}}]}, "upper and lower case"),
        ({"id": "r", "criteria": [{**YES, "choices": [" good", "good"]}]}, "white space"),
        ({"id": "r", "criteria": [{**YES, "choices": ["", "good"]}]}, "white space"),
        ({"id": "r", "criteria": [{**YES, "weight": True}]}, "must be a number"),
        ({"id": "r", "threshold": False, "criteria": [YES]}, "must be a number"),
        (
            {"id": "r", "criteria": [{**YES, "required": True, "weight": -1}, {"id": "b", "value": "x"}]},
            "cannot have a negative weight",
        ),
        ({"id": "r", "criteria": [{**YES, "weight": float("nan")}]}, "finite number"),
        (
            {"id": "r", "criteria": [{**YES, "choices": {"poor": 0, "fair": 0.5}}]},
            r"best choices give a score of 0\.50, below the threshold 0\.7",
        ),
        ({"id": "r", "version": 2, "criteria": [YES]}, "`version`"),
    ],
)
def test_what_is_wrong_is_named(raw: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_rubric(raw, "r.yaml")
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("choices", ["[no, yes]", "{no: 0, yes: 1}", "{yes: 1, no: 0}", "[No, YES]", "['no', 'yes']"])
def test_an_unquoted_yes_or_no_stays_a_word(tmp_path: Path, choices: str) -> None:
    (tmp_path / "r.yaml").write_text(f"id: r\ncriteria: [{{id: a, value: It is so., choices: {choices}}}]")
    assert list(load_rubric(tmp_path / "r.yaml").asked[0].scale.items()) == [("no", 0.0), ("yes", 1.0)]


@pytest.mark.parametrize(
    ("kind", "value", "answer", "passed"),
    [
        ("regex", r"\\boxed\{.+\}", "so \\boxed{7}", True),
        ("regex", r"\\boxed\{.+\}", "so 7", False),
        ("not-regex", "(?i)sorry", "Sorry!", False),
        ("not-regex", "(?i)sorry", "Gladly.", True),
        ("contains", "seven", "It is seven.", True),
        ("contains", "seven", "It is 7.", False),
        ("min-length", 3, "abc", True),
        ("min-length", 3, "ab", False),
        ("max-length", 3, "abc", True),
        ("max-length", 3, "abcd", False),
        ("min-length", 1, " \n\t\u00a0\u3000", False),
        ("min-length", 1, "\u200b\ufeff\u2060\u00ad\u3164\u2800\x00", False),
        ("min-length", 1, "\u200b語\u200b", True),
        ("min-length", 0, "", True),
        ("min-length", 2, "e\u0301", False),
        ("max-length", 3, "\n abc \n\n", True),
        ("max-length", 1, "e\u0301", True),
        ("max-length", 3, "abc" + "\u200b" * 99, False),
        ("contains", "caf\u00e9", "Un cafe\u0301.", True),
        ("contains", "cafe\u0301", "Un caf\u00e9.", True),
        ("contains", "one\ntwo", "one\r\ntwo", True),
        ("regex", "^caf\u00e9$", "cafe\u0301", True),
        ("regex", "(?m)^done$", "It is\r\ndone\r\n", True),
        ("regex", "\u0301", "cafe\u0301", True),
        ("not-regex", "caf\u00e9", "Un cafe\u0301.", False),
        ("math-equal", 7, "\\boxed{7\u200b}", True),
        ("math-equal", 7, "\\boxed{\uff17}", True),
        ("math-equal", 7, "\\boxed{\u200b}", False),
        ("tool-called", "add", "", True),
        ("tool-called", "subtract", "", False),
    ],
)
def test_a_check_costs_no_call(kind: str, value: str | int, answer: str, passed: bool) -> None:
    steps = ({"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},)
    criterion = CRITERION.validate_python({"id": "a", "type": kind, "value": value})
    assert check(criterion, Exchange("q", answer, trajectory=steps)).passed is passed


def test_a_file_is_validated_once_however_many_problems_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated = []
    whole = Rubric.model_validate
    monkeypatch.setattr(Rubric, "model_validate", lambda raw: validated.append(raw) or whole(raw))
    wrong = [{"id": f"c{n}", "type": "regex", "value": "(", "weight": "much", "colour": n} for n in range(30)]
    (tmp_path / "r.yaml").write_text(json.dumps({"id": "r", "criteria": [*wrong, YES], "judge": {"repeats": 0}}))
    assert len(read_rubric(tmp_path / "r.yaml").problems) == 3 * len(wrong) + 1
    assert len(validated) == 1


def test_a_sum_that_reaches_the_threshold_but_for_the_last_bit_passes() -> None:
    assert 0.3 / (0.3 + 0.1) < 0.75
    criteria = [{"id": "a", "value": "x", "weight": 0.3}, {"id": "b", "value": "x", "weight": 0.1}]
    assert parse_rubric({"id": "r", "criteria": criteria}, "r").score({"a": 1, "b": 0}) == 0.75


def test_a_rubric_survives_json() -> None:
    rubric = parse_rubric({"id": "r", "criteria": [{**YES, "choices": ["poor", "fair", "good"]}]}, "r")
    again = parse_rubric(json.loads(json.dumps(rubric.model_dump(mode="json"))), "r")
    assert (again, again.hash) == (rubric, rubric.hash)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    for path, complaint in (
        (tmp_path / "no.yaml", "no such file"),
        (tmp_path / "bad.yaml", "not YAML"),
        (tmp_path, "dir"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            load_rubric(path)


@pytest.mark.parametrize("path", sorted((files.shipped_folder() / "rubrics").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_rubric_loads_and_is_named_like_its_file(path: Path) -> None:
    rubric = load_rubric(path)
    assert rubric.id == path.stem
    assert rubric.asked


def test_the_seven_reasons_to_drop_are_in_qa_quality() -> None:
    rubric = load_rubric(files.shipped_folder() / "rubrics" / "qa-quality.yaml")
    ids = {criterion.id for criterion in rubric.every}
    assert {"present", "answers", "relevant", "no_excuses", "consistent", "safe", "same_language"} <= ids


def test_agentjets_flat_text_is_one_required_criterion() -> None:
    rubric = parse_rubric({"id": "flat", "custom_rubrics": "1. Keep \\boxed{} as it is.\n"}, "x")
    [criterion] = rubric.asked
    assert criterion.id == "custom_rubrics"
    assert criterion.required
    assert dict(criterion.scale) == {"BAD": 0.0, "GOOD": 1.0}
    assert "\\boxed{}" in str(criterion.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"a": 1, "b": 1, "leak": 0}, 1.0),
        ({"a": 1, "b": 0, "leak": 0}, 0.75),
        ({"a": 1, "b": 0.5, "leak": 0}, 0.875),
        ({"a": 1, "b": 1, "leak": 1}, 0.5),
        ({"a": 0, "b": 1, "leak": 1}, 0.0),
    ],
)
def test_the_score_by_hand(values: dict[str, float], expected: float) -> None:
    rubric = parse_rubric(
        {
            "id": "r",
            "criteria": [
                {"id": "a", "value": "x", "weight": 3},
                {"id": "b", "value": "x", "weight": 1, "choices": {"poor": 0, "fair": 0.5, "good": 1}},
                {"id": "leak", "value": "x", "weight": -2},
            ],
        },
        "r",
    )
    assert rubric.score(values) == pytest.approx(expected)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-20, 20), st.booleans(), st.floats(0, 1)), min_size=1, max_size=6
    ).filter(lambda parts: any(weight > 0.01 for weight, _, _ in parts))
)  # fmt: skip
def test_a_score_is_in_0_to_1_and_0_when_a_required_criterion_fails(parts: list[tuple[float, bool, float]]) -> None:
    criteria = [
        {"id": f"c{n}", "value": "x", "weight": weight, "required": required and weight > 0}
        for n, (weight, required, _) in enumerate(parts)
    ]
    rubric = Rubric.model_validate({"id": "r", "threshold": 0, "criteria": criteria})
    values = {f"c{n}": value for n, (_, _, value) in enumerate(parts)}
    score = rubric.score(values)
    assert 0 <= score <= 1
    if any(criterion.required and values[criterion.id] < 0.5 for criterion in rubric.every):
        assert score == 0


def test_the_hash_changes_with_what_changes_verdicts_only() -> None:
    base = {"id": "r", "criteria": [YES]}
    changed = [{**base, "threshold": 0.9}, {**base, "criteria": [{**YES, "value": "Other."}]}, {**base, "id": "s"}]
    hashes = {parse_rubric(raw, "r").hash for raw in [base, *changed]}
    assert len(hashes) == 4
    assert parse_rubric({**base, "description": "words"}, "r").hash == parse_rubric(base, "r").hash
