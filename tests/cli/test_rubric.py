"""`flywheel rubric check` and `schema`, as a person sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flywheel.judge.file_schemas import rubric_schema
from tests.cli.conftest import Run


def checked(flywheel: Run, tmp_path: Path, text: str, code: int = 78) -> list[str]:
    """What is said about a rubric, without the file's name."""
    path = tmp_path / "r.yaml"
    path.write_text(text)
    ran = flywheel("rubric", "check", path)
    assert ran.code == code, ran.out
    lines = ran.out.splitlines()
    assert all(line.startswith(f"{path}:") for line in lines)
    return [line.removeprefix(f"{path}:") for line in lines]


def test_every_problem_of_a_file_is_listed_with_its_place(flywheel: Run, tmp_path: Path) -> None:
    text = r"""version: 1
id: bad
treshold: 0.9
threshold: 0.95
criteria:
  - {id: a, type: regex, value: 'a(b', required: true}
  - {id: b, wieght: 3, value: "x", required: true, weight: 0}
  - {id: b, type: min-length, value: long}
  - {id: c, type: regx, value: x}
  - id: d
    value: ok
    value: again
  - {id: e, type: tool-called, value: x, match: exact}
  - {id: f, type: python, value: "no.py:f"}
judge: {escalate: {band: [0.8, 0.2], repeat: 3}}
examples:
  - {query: q, answr: a, verdict: accept}
"""
    said = checked(flywheel, tmp_path, text)
    assert [line.split(": ", 1)[0] for line in said] == [
        "3:1", "6:35", "7:13", "7:60", "8:10", "8:38", "9:19", "12:5", "13:42", "14:34", "15:26", "15:38", "17:5",
        "17:16",
    ]  # fmt: skip
    for place, words in {
        "3:1": "unknown key `treshold` (did you mean `threshold`?)",
        "6:35": "no regular expression: missing ), unterminated subpattern at position 1",
        "7:13": "unknown key `criteria.1.wieght` (did you mean `weight`?)",
        "7:60": "required but has weight 0",
        "8:10": "criteria have the same id: b, the first time at 7:10",
        "8:38": "it must be a whole number",
        "9:19": "there is no type `regx` (did you mean `regex`?)",
        "12:5": "key `value` is written twice: the first time at 11:5",
        "13:42": "tool-called has no match",
        "14:34": "no.py:f cannot be used",
        "15:38": "unknown key `judge.escalate.repeat` (did you mean `repeats`?)",
        "17:16": "unknown key `examples.0.answr` (did you mean `answer`?)",
    }.items():
        assert any(line.startswith(f"{place}: ") and words in line for line in said), (place, said)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("id: r\ncriteria: [{id: a, value: x, weight: -1}]", "2:11", "no criterion has a positive weight"),
        (
            "id: r\nthreshold: 0.9\ncriteria: [{id: a, value: x, choices: {p: 0, q: 0.5}}]",
            "2:12",
            "below the threshold",
        ),
        ("id: r\ncriteria: [{id: a, value: x, required: true, weight: 0}, {id: b, value: x}]", "2:54", "weight 0"),
        (
            "id: r\ncriteria: [{id: a, value: x, required: true, weight: -2}, {id: b, value: x}]",
            "2:54",
            "cannot have a negative weight",
        ),
        (
            "id: r\nthreshold: 0.2\ncriteria: [{id: a, value: x, required: true, choices: {p: 0, q: 0.3}}]",
            "3:55",
            "0.5",
        ),
        ("id: r\ncriteria: [{id: custom_rubrics, value: x}]\ncustom_rubrics: y", "2:17", "that of the flat text"),
        ("id: r\ncriteria: [{id: a, type: regex, value: '[a-'}]", "2:41", "no regular expression"),
        ("id: r\ncriteria: [{id: a, type: language, value: Klingon}]", "2:43", "'Klingon'"),
        ("id: r\ncriteria: [{id: a, type: degenerate, weight: -1}, {id: b, value: x}]", "2:46", "make it positive"),
        ("id: r\ncriteria: [{id: a, type: json-schema, value: {type: 3}}]", "2:46", "no JSON Schema"),
        ("id: r\ncriteria: [{id: a, type: json-schema, value: no.json}]", "2:46", "no.json cannot be used"),
        ("id: r\ncriteria: [{id: a, type: python, value: 'no.py:f'}]", "2:41", "No such file"),
        ("id: r\ncriteria: [{id: a, type: math-equal, value: 1, reference: 2}]", "2:59", "give the reference once"),
        ("id: r\ncriteria: [{id: a, type: tool-called, value: x, min: 3, max: 2}]", "2:54", "no reply can meet that"),
        ("id: r\nid: s\ncriteria: [{id: a, value: x}]", "2:1", "key `id` is written twice: the first time at 1:1"),
        ("id: r\ncriteria: [{id: a, value: x}]\nfiles: {}", "3:1", "unknown key `files`"),
        ("id: r\ncriteria: [", "2:12", "not YAML"),
        ("", "1:1", "its root is empty"),
        ("- a", "1:1", "a list, not a mapping"),
        ("id: &a [*a]\ncriteria: [{id: a, value: x}]", "1:5", "nested deeper than 64 levels"),
    ],
)
def test_a_single_problem(flywheel: Run, tmp_path: Path, text: str, place: str, words: str) -> None:
    [said] = checked(flywheel, tmp_path, text)
    assert said.startswith(f"{place}: "), said
    assert words in said


BACKSLASHES = r"""id: r
custom_rubrics: "Drop it without \boxed{}."
criteria:
  - {id: a, type: regex, value: "\boxed"}
  - {id: b, type: not-regex, value: '\boxed\{'}
  - {id: c, value: "It is in \boxed{}, with \frac."}
  - {id: d, type: contains, value: "\f\v\a\e\0"}
  - {id: e, type: json-schema, value: {properties: {x: {pattern: '^\sqrt'}}, title: '\sqrt'}}
  - {id: fine, type: regex, value: '\bword\b|\\\\boxed|\\\\frac{|\s+\d'}
  - {id: fine2, type: regex, value: "\\bword\t\n"}
  - {id: fine3, value: 'It is in \boxed{}.'}
  - {id: fine4, type: contains, value: '\boxed{'}
"""


def test_patterns_that_can_hardly_match_are_warned_about(flywheel: Run, tmp_path: Path) -> None:
    *said, right = checked(flywheel, tmp_path, BACKSLASHES, code=0)
    assert right == " rubric r is valid: 10 criteria, threshold 0.7"
    lines = BACKSLASHES.splitlines()
    places = [f"{n}:{lines[n - 1].index('value: ') + 8}" for n in (4, 5, 6, 6, 7, 7, 7, 7, 7, 8)]
    assert [line.split(": warning: ")[0] for line in said] == ["2:17", *places]
    assert "`custom_rubrics` holds the control character U+0008" in said[0]
    assert 'in double quotes YAML reads "\\b" as it. Use single quotes, or write \\\\b' in said[1]
    assert "in a regular expression \\b has a meaning of its own, and oxed follows it. Write \\\\boxed" in said[2]
    assert "U+000C" in "".join(said[3:5])
    assert "and qrt follows it" in said[-1]
    said = checked(flywheel, tmp_path, BACKSLASHES.replace("id: fine4,", "id: fine4, wrong: 1,"))
    assert any("unknown key" in line for line in said)
    assert sum(": warning: " in line for line in said) == 11, "they come with all other problems"


RULES = """id: r
threshold: 0.6
criteria:
  - {id: boxed, type: regex, value: 'boxed', required: true}
  - {id: short, type: max-length, value: 20, weight: 2}
  - {id: judged, value: It is good.}
  - {id: tool, type: tool-called, value: add, weight: 0.5}
examples:
"""


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("{query: q, answer: boxed, verdict: accept}", ""),
        ("{query: q, answer: seven, verdict: reject}", ""),
        ("{query: q, answer: boxed, verdict: reject}", "the checks accept it: its score is at least 0.67"),
        ("{query: q, answer: seven, verdict: accept}", "boxed says: the pattern is not found"),
        (
            "{query: q, answer: boxed and much too long, verdict: accept}",
            "at best its score is 0.56, below 0.6: short",
        ),
        ("{query: q, answer: boxed and much too long, verdict: reject}", ""),
    ],
)
def test_examples_against_the_checks(flywheel: Run, tmp_path: Path, example: str, words: str) -> None:
    said = checked(flywheel, tmp_path, f"{RULES}  - {example}\n", 78 if words else 0)
    if words:
        assert said[0].startswith("9:5: `examples.0` should be ")
        assert words in said[0]


def test_examples_that_a_check_breaks_on(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text("def decide(task):\n    return task['nothing']\n")
    examples = "examples: [{query: q, answer: a, verdict: accept}]"
    text = f"id: r\ncriteria: [{{id: a, type: python, value: 'checks.py:decide'}}]\n{examples}"
    [said] = checked(flywheel, tmp_path, text)
    assert "KeyError: 'nothing'" in said
    examples = "examples: [{query: q, answer: '\\boxed{3}', REFverdict: accept}]"
    text = f"id: r\ncriteria: [{{id: a, type: math-equal}}]\n{examples}"
    assert checked(flywheel, tmp_path, text.replace("REF", ""), 0)
    [said] = checked(flywheel, tmp_path, text.replace("REF", "reference: '4', "))
    assert "3 is not 4" in said


def test_several_files_and_files_that_cannot_be_read(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("id: good\ncriteria: [{id: a, value: x}]")
    (tmp_path / "latin.yaml").write_bytes(b"id: \xff")
    ran = flywheel("rubric", "check", "good.yaml", "no.yaml", "latin.yaml", tmp_path)
    assert ran.code == 78
    assert "good.yaml: rubric good is valid: 1 criteria, threshold 0.7" in ran.out
    assert "no.yaml:1:1: cannot be read: there is no such file" in ran.out
    assert "latin.yaml:1:1: cannot be read: it is not UTF-8 text" in ran.out
    assert f"{tmp_path}:1:1: cannot be read: Is a directory" in ran.out
    assert flywheel("rubric", "check", "good.yaml").code == 0


def test_only_keys_that_may_be_written_are_named(flywheel: Run, tmp_path: Path) -> None:
    said = checked(flywheel, tmp_path, "id: x\nfyles: 1\nanother: 2\ncriteria: [{id: a, value: b}]\n")
    assert len(said) == 2
    assert all(line.endswith(f"(known here: {', '.join(sorted(rubric_schema()['properties']))})") for line in said)
    # An unknown key hides no problem of the whole.
    text = "id: r\ntreshold: 1\ncriteria:\n- {id: a, value: x, choices: {p: 0, q: 0.5}, wieght: 2}\n"
    assert [line.partition(" ")[0] for line in checked(flywheel, tmp_path, text)] == ["1:1:", "2:1:", "4:46:"]


def test_it_says_what_of_a_function_is_tracked(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text("")
    (tmp_path / "data.txt").write_text("")
    code = "import sys; sys.path.insert(0, __file__[:-10])\nimport words\ndef f(task):\n    return True\n"
    (tmp_path / "checks.py").write_text(code)
    criteria = [{"id": "a", "type": "python", "value": "checks.py:f", "files": ["data.txt"]}]
    rubric = tmp_path / "r.yaml"
    rubric.write_text(json.dumps({"id": "r", "criteria": criteria}))
    ran = flywheel("rubric", "check", "r.yaml")
    assert ran.code == 0
    tracked = (
        "the hash of the rubric has checks.py, data.txt and words.py; other files that the function reads are not"
    )
    assert f"criterion a: {tracked} tracked: list them in `files`" in ran.out
    for files, complaint in (
        (["no.txt"], "checks.py:f cannot be used: [Errno 2] No such file or directory"),
        ([], "it lists no file"),
        ([""], "it lists no file"),
    ):
        rubric.write_text(json.dumps({"id": "r", "criteria": [criteria[0] | {"files": files}]}))
        ran = flywheel("rubric", "check", "r.yaml")
        assert (ran.code, complaint in ran.out) == (78, True), ran.out
    rubric.write_text(json.dumps({"id": "r", "criteria": [{"id": "a", "value": "It is.", "files": ["data.txt"]}]}))
    assert "llm-rubric has no files" in flywheel("rubric", "check", "r.yaml").out
