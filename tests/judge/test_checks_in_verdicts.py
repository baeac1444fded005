"""Checks in verdicts: they come first and save calls; a check that fails leaves the task undecided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flywheel.config.judge import JudgeSettings
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.file import load_rubric, parse_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.thread_pool import grade_all
from flywheel.records.verdict import Exchange, Outcome
from tests.factories.judge_server import JudgeServer


def settings(judge: JudgeServer, **values: object) -> JudgeSettings:
    return JudgeSettings.model_validate({"base_url": judge.base_url, "model": "judge", **values})


def rubric(*criteria: dict[str, object], **values: object) -> Rubric:
    return parse_rubric({"id": "r", "criteria": [*criteria, {"id": "good", "value": "It is good."}], **values}, "r")


def test_a_failed_required_check_saves_the_call_whatever_its_type() -> None:
    with JudgeServer(lambda question, answer: True) as judge:
        required = [
            {"type": "degenerate"}, {"type": "json-schema", "value": {"type": "object"}}, {"type": "no-error-span"},
            {"type": "tool-called", "value": "add"}, {"type": "tool-sequence", "value": ["add"]},
            {"type": "math-equal", "value": 8}, {"type": "language", "value": "fr"},
        ]  # fmt: skip
        line = {"metadata": {"errors_json": '["tool add: ValueError"]'}}
        answer = "The answer is that it is so, and that it is \\boxed{7} in the end. " * 20
        for check in required:
            grader = Grader(rubric({"id": "check", "required": True, **check}), settings(judge))
            verdict = grader.grade(Exchange("q", answer, line=line))
            assert (verdict.outcome, verdict.score, verdict.failed) == (Outcome.REJECTED, 0.0, ("check",)), check
            assert grader.estimate(Exchange("q", answer, line=line)).calls == 0
            grader.close()
        assert judge.calls == 0


def test_a_check_that_breaks_costs_its_own_task_and_no_call(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text("def decide(task):\n    return 10 / task['metadata']['turn'] > 1\n")
    criteria = [{"id": "mine", "type": "python", "value": "checks.py:decide"}, {"id": "good", "value": "It is good."}]
    (tmp_path / "r.yaml").write_text(json.dumps({"id": "r", "criteria": criteria}))
    exchanges = [
        (n, Exchange("q", "a", line={"main_query": "q", "answer": "a", "metadata": {"turn": n}})) for n in range(4)
    ]
    with JudgeServer(lambda question, answer: True) as judge:
        grader = Grader(load_rubric(tmp_path / "r.yaml"), settings(judge))
        verdicts = dict(grade_all(grader, exchanges, 2))
        grader.close()
        assert judge.calls == 3
    assert [verdicts[n].outcome for n in range(4)] == [Outcome.UNDECIDED, *[Outcome.ACCEPTED] * 3]
    assert "cannot decide criterion mine by checks.py:decide: ZeroDivisionError" in verdicts[0].error
    assert (verdicts[0].calls, verdicts[0].unreachable) == (0, False)


@pytest.mark.parametrize(("named", "asked"), [("alien", "judge"), ("expert", "expert")])
def test_a_rubric_may_name_its_judge(named: str, asked: str) -> None:
    with JudgeServer(lambda question, answer: True) as judge:
        grader = Grader(rubric(judge={"model": named}), settings(judge))
        grader.grade(Exchange("q", "a"))
        plain = Grader(rubric(), settings(judge))
        assert judge.requests[0]["model"] == asked
        assert (grader.judge_hash == plain.judge_hash) is (named == "alien")
        grader.close()
        plain.close()


def test_a_fraction_of_a_function_counts_in_the_score(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text("def decide(task):\n    return 0.5, 'half'\n")
    criteria = [{"id": "mine", "type": "python", "value": "checks.py:decide"}]
    (tmp_path / "r.yaml").write_text(json.dumps({"id": "r", "threshold": 0.5, "criteria": criteria}))
    with JudgeServer() as judge:
        grader = Grader(load_rubric(tmp_path / "r.yaml"), settings(judge))
        verdict = grader.grade(Exchange("q", "a"))
        grader.close()
        assert judge.calls == 0
    assert (verdict.outcome, verdict.score, verdict.results[0].choice) == (Outcome.ACCEPTED, 0.5, "0.5")


@pytest.mark.slow
def test_schemas_over_the_limit_are_dead_letters_and_end_no_judging_however_many_there_are() -> None:
    both = {"allOf": [{"properties": {"a": {"$ref": "#/$defs/n"}}}] * 2}
    parameters = {"$defs": {"n": both}, "$ref": "#/$defs/n", "title": "of this test"}
    function = {"name": "f", "parameters": parameters}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 60 + "{}" + "}" * 60}}
    step = {"role": "assistant", "content": "", "tool_calls": [call]}
    hostile = Exchange("q", "a", tools=({"type": "function", "function": function},), trajectory=(step,))
    exchanges = [(n, hostile if n % 60 else Exchange("q", "a")) for n in range(121)]
    with JudgeServer(lambda question, answer: True) as judge:
        # Without a reference, a check before it is undecided as well, and would be tried again.
        criteria = [{"id": "maths", "type": "math-equal", "weight": 0.1}, {"id": "fmt", "type": "call-format"}]
        grader = Grader(rubric(criteria[1]), settings(judge))
        done = dict(grade_all(grader, exchanges, 4))
        grader.close()
        twice = Grader(rubric(*criteria), settings(judge))
        assert twice.grade(hostile).broken
        assert not twice.grade(Exchange("q", "a")).broken
        twice.close()
    assert {n for n, verdict in done.items() if verdict.outcome is Outcome.ACCEPTED} == {0, 60, 120}
    costly = [verdict for n, verdict in done.items() if n % 60]
    assert len(costly) == 118
    assert {verdict.outcome for verdict in costly} == {Outcome.UNDECIDED}
    assert all(verdict.broken and not verdict.defect and "processor time" in verdict.error for verdict in costly)


def test_what_a_function_imports_from_its_folder_and_what_it_lists_is_in_the_rubric_s_hash(tmp_path: Path) -> None:
    texts = {
        "checks.py": "import json, words\ndef f(task):\n    from package import part\n    return True\n",
        "words.py": "import plain.deep, words\nif False:\n    import broken, missing\n",
        "plain/deep.py": "",
        "plain/other.py": "",
        "package/__init__.py": "",
        "package/part.py": "from . import near\nfrom .far import X\n",
        "package/near.py": "",
        "package/far.py": "X = 1",
        "broken.py": "def",
        "json.txt": "",
        "data.bin": "",
        "notes.txt": "",
    }
    criteria = [
        {"id": "mine", "type": "python", "value": "checks.py:f", "files": ["data.bin"]},
        {"id": "good", "value": "It is good."},
    ]

    def rubric_in(folder: Path, **changed: bytes) -> Rubric:
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(changed.get(name, text.encode()))
        (folder / "checks.py").write_text("import sys; sys.path.insert(0, __file__[:-10])\n" + texts["checks.py"])
        (folder / "r.yaml").write_text(json.dumps({"id": "r", "criteria": criteria}))
        return load_rubric(folder / "r.yaml")

    first = rubric_in(tmp_path / "a")
    assert rubric_in(tmp_path / "b").hash == first.hash, "it is that of the contents, wherever they are"
    assert Rubric.model_validate_json(first.model_dump_json()).hash == first.hash
    tracked = {name for name in texts if rubric_in(tmp_path / "a", **{name: b"# 1"}).hash != first.hash}
    assert tracked == set(texts) - {"checks.py", "plain/other.py", "json.txt", "notes.txt"}
    with JudgeServer() as judge:
        hashes = [
            Grader(each, settings(judge)).hashes for each in (first, rubric_in(tmp_path / "a", **{"words.py": b""}))
        ]
    assert hashes[0] == hashes[1], "the judge is asked nothing anew"


def test_a_function_that_imports_nothing_beside_it_has_the_hash_of_before(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text("def f(task):\n    return True\n")
    (tmp_path / "r.yaml").write_text(
        '{"id": "r", "criteria": [{"id": "a", "type": "python", "value": "checks.py:f"}]}'
    )
    assert load_rubric(tmp_path / "r.yaml").hash == "2f7c6872dbe1e058"
