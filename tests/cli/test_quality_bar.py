"""The quality bar of CI: shares, bounds and exit codes, the two reports, and tasks of a file without any state."""

from __future__ import annotations

import io
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from scipy import stats

from flywheel.daemon.judging.quality_bar import Case, CaseOutcome, QualityBar, junit_xml, summary_text
from flywheel.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_QUALITY, EXIT_UNAVAILABLE, EXIT_USAGE
from tests.cli.filter_bench import CRITERIA, Bench
from tests.factories.documented_json import compare, documented

ROOT = Path(__file__).parents[2]
GOOD, BAD = "good: \\boxed{1}", "bad: \\boxed{0}"
ACCEPTED, REJECTED, UNDECIDED, FILTERED = CaseOutcome


def cases(accepted: int = 0, rejected: int = 0, undecided: int = 0, filtered: int = 0) -> list[Case]:
    numbers = zip(CaseOutcome, (accepted, rejected, undecided, filtered), strict=True)
    return [Case("r", f"{outcome}-{n}", outcome) for outcome, number in numbers for n in range(number)]


@pytest.mark.parametrize(
    ("bar", "counts", "reached"),
    [
        (QualityBar(fail_under=0.8), (4, 1), True),
        (QualityBar(fail_under=0.8), (79, 21), False),
        (QualityBar(fail_under=0.8), (4, 1, 5, 50), True),
        # More than half undecided is no pass, unless that is allowed.
        (QualityBar(fail_under=0.8), (4, 1, 6, 50), False),
        (QualityBar(fail_under=0.8, confidence=0.5), (4, 0, 5), False),
        (QualityBar(fail_under=0.8, max_undecided=0.9), (4, 1, 45, 50), True),
        (QualityBar(), (1, 0, 9), True),
        (QualityBar(fail_under=0.0), (0, 0, 3), False),
        (QualityBar(fail_under=0.0), (0, 3), True),
        # 80 of 100 show no more than 0.7267 at 95 %.
        (QualityBar(fail_under=0.72, confidence=0.95), (80, 20), True),
        (QualityBar(fail_under=0.73, confidence=0.95), (80, 20), False),
        (QualityBar(max_undecided=0.05), (19, 0, 1), True),
        (QualityBar(max_undecided=0.05), (18, 0, 1, 50), False),
        (QualityBar(max_undecided=0.0), (0, 0, 0, 2), True),
        (QualityBar(max_undecided=float("nan")), (1,), False),
    ],
)
def test_a_bar_is_reached_or_missed(bar: QualityBar, counts: tuple[int, ...], reached: bool) -> None:
    quality = bar.measure(cases(*counts))
    assert (quality.failures == ()) is reached
    assert (quality.error is None) is reached
    if quality.error is not None:
        assert quality.error.exit_code == EXIT_QUALITY


def test_a_share_is_compared_as_it_is_written() -> None:
    for whole in (7, 20, 100):
        for count in range(whole + 1):
            share, text = Fraction(count, whole), f"{count / whole:.2f}"
            undecided = QualityBar(max_undecided=float(text)).measure(cases(whole - count, 0, count))
            accepted = QualityBar(fail_under=float(text)).measure(cases(count, whole - count))
            assert (undecided.failures == ()) is (share <= Fraction(text)), (count, whole, text)
            assert (accepted.failures == ()) is (share >= Fraction(text)), (count, whole, text)


@pytest.mark.parametrize("counts", [(80, 20), (9, 1), (0, 5), (5, 0), (3, 1)])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95])
def test_the_lower_bound_is_the_one_sided_one_of_wilson(counts: tuple[int, int], confidence: float) -> None:
    test = stats.binomtest(counts[0], sum(counts), alternative="greater")
    bound = QualityBar(fail_under=0.5, confidence=confidence).measure(cases(*counts)).lower_bound
    assert bound == pytest.approx(test.proportion_ci(confidence, method="wilson").low, abs=1e-12)


def test_a_judge_that_goes_away_ends_it_with_69_and_the_reports_have_every_row(bench: Bench) -> None:
    bench.settings |= {"max_thread": 1}
    bench.judge.behave(*["good"] * 3, *["reset"] * 30)
    ran = bench(
        "filter", "--dry-run", "--tasks", tasks(bench, *[GOOD] * 12), "--fail-under", "0.5",
        "--junit", "report.xml", "--summary", "summary.md",
    )  # fmt: skip
    assert ran.code == EXIT_UNAVAILABLE, ran.err
    [suite] = JUnitXml.fromfile("report.xml")
    assert [case.name for case in suite] == [f"t{n}" for n in range(12)]
    assert [bool(case.result) for case in suite] == [False] * 3 + [True] * 9
    assert (suite.tests, suite.errors) == (12, 9)
    assert "not finished" in Path("summary.md").read_text()
    bench.judge.behave("html")
    ran = bench("filter", "--dry-run", "--tasks", tasks(bench, *[GOOD] * 9), "--fail-under", "0")
    assert ran.code == EXIT_UNAVAILABLE, ran.err


ANYTHING = st.text(st.characters(exclude_categories=()), max_size=30)
"""Control characters and lone surrogates as well."""


def xml_of(text: str) -> str:
    """What XML can hold of a text, by the ranges of its specification."""

    def is_allowed(code: int) -> bool:
        return code in (9, 10, 13) or 32 <= code < 0xD800 or 0xE000 <= code < 0xFFFE or code > 0xFFFF

    return "".join(char for char in text if is_allowed(ord(char)))


@given(
    st.lists(
        st.builds(
            Case,
            st.sampled_from(["r", "a\x00b"]) | ANYTHING,
            ANYTHING,
            st.sampled_from(CaseOutcome),
            st.none() | st.floats(0, 1),
            st.lists(ANYTHING, max_size=2).map(tuple),
            ANYTHING,
        ),
        max_size=5,
    )
)
def test_reports_of_any_texts_can_be_read_back(found: list[Case]) -> None:
    # As a file of its own, with a declaration.
    read = JUnitXml.fromfile(io.BytesIO(junit_xml(found)))
    assert read.tests == len(found)
    in_suites = [(suite, case) for suite in read for case in suite]
    kinds = {ACCEPTED: None, REJECTED: Failure, UNDECIDED: Error, FILTERED: Skipped}
    by_suite: dict[str, list[Case]] = {}
    for case in found:
        by_suite.setdefault(case.rubric, []).append(case)
    for (suite, case), told in zip(in_suites, (case for own in by_suite.values() for case in own), strict=True):
        assert (suite.name, case.classname, case.name) == (xml_of(told.rubric),) * 2 + (xml_of(told.task),)
        [kind, *_] = [type(result) for result in case.result] or [None]
        assert kind is kinds[told.outcome]
        if told.outcome is REJECTED:
            lines = "\n".join((*told.failed, told.reason)) if told.failed else told.reason
            assert (case.result[0].text or "") == re.sub("\r\n?", "\n", xml_of(lines))
    summary = summary_text(found, QualityBar().measure(found), (), "")
    assert summary.encode("utf-8", "replace").decode().count("\n|---") == 1 + len(
        {case.outcome for case in found} - {ACCEPTED}
    )


def test_a_summary_is_inert_and_short() -> None:
    text = "<img src=x> ![i](http://x) | a\n# b `c`"
    found = [Case("r", f"t{n}", REJECTED, 0.5, (text,)) for n in range(60)]
    summary = summary_text(found, QualityBar(fail_under=1).measure(found), ["note *1*"], "it ended | here")
    assert "\\!\\[i\\]\\(http://x\\) \\| a \\# b \\`c\\`" in summary
    assert "<img" not in summary
    assert "… and 10 more." in summary and summary.count("| t") == 51
    assert "- note \\*1\\*" in summary and "- it ended \\| here" in summary
    assert "## Flywheel: r: not finished" in summary


def tasks(bench: Bench, *answers: str, name: str = "tasks.jsonl") -> Path:
    path = bench.folder / name
    lines = [{"task_id": f"t{n}", "main_query": f"{n} + 1?", "answer": answer} for n, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_row_of_a_file_is_judged_and_neither_source_nor_state_is_touched(bench: Bench) -> None:
    bench.lines(GOOD, GOOD)
    bench.filter()
    file = tasks(bench, GOOD, BAD, GOOD)
    # Equal rows and equal ids are rows of their own.
    file.write_text(file.read_text() + file.read_text().splitlines()[0] + "\n")
    (bench.folder / "source.jsonl").write_text("not JSON\n")
    calls, before = bench.judge.calls, bench.files()
    shown = bench.filter("--dry-run", "--tasks", file)
    assert [each["task_id"] for each in shown["verdicts"]] == ["t0", "t1", "t2", "t0-4"]
    assert [each["outcome"] for each in shown["verdicts"]] == ["accepted", "rejected", "accepted", "accepted"]
    assert "quality" not in shown
    assert bench.judge.calls == calls + 4, "no stored verdict is used"
    assert bench.files() == before
    assert bench.filter("--estimate", "--tasks", file)["estimate"]["tasks"] == 4


def test_the_tasks_that_flywheel_wrote_are_judged_again_from_their_file_and_no_others(bench: Bench) -> None:
    bench.lines(GOOD, BAD)
    bench.filter()
    file = bench.folder / "tasks.jsonl"
    file.write_bytes((bench.folder / "state" / "tasks.jsonl").read_bytes())
    bench.lines(GOOD)
    assert bench("ingest").code == 0
    calls = bench.judge.calls
    shown = bench.filter("--dry-run", "--tasks", file)
    assert {each["task_id"]: each["outcome"] for each in shown["verdicts"]} == {
        "a-task-with-a-long-name-0": "accepted",
        "a-task-with-a-long-name-1": "rejected",
    }
    assert (shown["reused"], bench.judge.calls) == (0, calls + 2)


@pytest.mark.parametrize(
    ("answers", "options", "code"),
    [
        ([GOOD, GOOD, GOOD, BAD], ["--fail-under", "0.75"], 0),
        ([GOOD, GOOD, GOOD, BAD], ["--fail-under", "0.76"], EXIT_QUALITY),
        ([GOOD, GOOD, GOOD, BAD], ["--fail-under", "0.75", "--confidence", "0.95"], EXIT_QUALITY),
        ([BAD], [], 0),
        ([], ["--fail-under", "0"], EXIT_CONFIG),
        ([], [], EXIT_CONFIG),
        ([GOOD], ["--fail-under", "1.5"], EXIT_USAGE),
        ([GOOD], ["--confidence", "0.95"], EXIT_USAGE),
        ([GOOD], ["--junit", "nowhere/report.xml"], EXIT_USAGE),
        ([GOOD], ["--summary", "."], EXIT_USAGE),
        ([GOOD], ["--estimate", "--fail-under", "0.5"], EXIT_USAGE),
        ([GOOD, ""], ["--fail-under", "0.5"], EXIT_CONFIG),
    ],
)
def test_exit_codes(bench: Bench, answers: list[str], options: list[str], code: int) -> None:
    ran = bench("filter", "--dry-run", "--quiet", "--tasks", tasks(bench, *answers), *options)
    assert (ran.code, ran.out) == (code, "")
    assert not (bench.folder / "state").exists()
    assert ("cannot reach the quality bar" in ran.err) == (code == EXIT_QUALITY)
    if code == EXIT_CONFIG:
        assert ("line 2: it has no answer" if answers else "tasks.jsonl: it is empty") in ran.err


def test_a_file_of_tasks_stores_nothing_so_it_needs_a_dry_run(bench: Bench) -> None:
    file = tasks(bench, GOOD)
    assert bench("filter", "--tasks", file).code == EXIT_USAGE
    assert bench("filter", "--dry-run", "--tasks", bench.folder / "missing.jsonl").code == EXIT_CONFIG
    file.write_text("no JSON\n")
    ran = bench("filter", "--dry-run", "--tasks", file)
    assert (ran.code, "line 1: it is not JSON" in ran.err) == (EXIT_CONFIG, True)
    file.write_text("\n")
    for options in (["--dry-run", "--summary", "summary.md"], ["--estimate"], ["--against", bench.rubric()]):
        ran = bench("filter", "--tasks", file, *options)
        assert (ran.code, "it is empty" in ran.err) == (EXIT_CONFIG, True), options
    assert not Path("summary.md").exists()
    (bench.folder / "flywheel.yaml").unlink()
    assert bench.flywheel("filter", "--dry-run", "--tasks", file).code == EXIT_CONFIG


def cannot_read_about_some(bench: Bench) -> None:
    """Replies of the judge about garbled answers cannot be read."""
    begin = bench.judge.begin

    def garbled(request: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
        number, behaviour = begin(request, headers)
        return number, "nonsense" if "garbled" in request["messages"][-1]["content"] else behaviour

    bench.judge.begin = garbled  # type: ignore[method-assign]
    bench.settings |= {"max_thread": 1}


def test_the_summary_of_one_verdict_among_undecided_replies_is_no_pass(bench: Bench) -> None:
    cannot_read_about_some(bench)
    file = tasks(bench, GOOD, "garbled \\boxed{1}", "garbled \\boxed{1}")
    asked = ("filter", "--dry-run", "--tasks", file, "--fail-under", "0.8", "--summary", "summary.md")
    bench(*asked).fails(
        EXIT_QUALITY, "2 of 3 replies undecided (0.6667), more than half (the default of --max-undecided)"
    )
    assert "below the quality bar" in Path("summary.md").read_text()
    assert "undecided (0.6667), and --max-undecided is 0.5" in bench(*asked, "--max-undecided", "0.5").err
    assert bench(*asked, "--max-undecided", "0.7").code == 0
    assert "passed" in Path("summary.md").read_text()


def test_the_reports_name_each_task_its_criteria_and_reasons(bench: Bench) -> None:
    bench.chain = [{"type": "rules", "params": {"min_answer_length": 5}}]
    cannot_read_about_some(bench)
    file = tasks(bench, GOOD, BAD, "no", "garbled \\boxed{1}", GOOD)
    junit, summary = bench.folder / "report.xml", bench.folder / "summary.md"
    ran = bench("filter", "--dry-run", "--tasks", file, "--fail-under", "0.9", "--junit", junit, "--summary", summary)
    assert ran.code == EXIT_QUALITY, ran.err
    read = JUnitXml.fromfile(str(junit))
    [suite] = read
    assert (suite.name, suite.tests, suite.failures, suite.errors, suite.skipped) == ("r", 5, 1, 1, 1)
    good, bad, short, unread, last = suite
    assert (good.name, good.classname, good.result) == ("t0", "r", [])
    assert (last.name, last.result) == ("t4", [])
    assert isinstance(bad.result[0], Failure) and bad.result[0].type == "rejected"
    assert "correct: no (it is not so)" in bad.result[0].text and "score 0." in bad.result[0].message
    assert isinstance(short.result[0], Skipped) and "rules" in short.result[0].message
    assert isinstance(unread.result[0], Error) and unread.result[0].message
    text = summary.read_text()
    assert "2 of 3 decided replies accepted (0.6667), 1 undecided" in text
    assert "## Flywheel: r: below the quality bar" in text
    assert "| t1 | 0." in text and "correct: no" in text
    assert "quality: 2 of 3 decided replies accepted (0.6667), 1 undecided" in ran.out


def test_the_quality_is_in_the_json_with_one_object(bench: Bench) -> None:
    ran = bench("filter", "--dry-run", "--tasks", tasks(bench, GOOD, BAD), "--fail-under", "0.9", "--json")
    assert ran.code == EXIT_QUALITY
    quality = ran.json["quality"]
    assert (quality["accepted"], quality["rejected"], quality["share"]) == (1, 1, 0.5)
    assert quality["failures"] == ["1 of 2 decided replies accepted (0.5), and --fail-under is 0.9"]
    compare(ran.json, documented("filter"), "filter")


def test_targets_with_rubrics_of_their_own_have_suites_of_their_own(bench: Bench) -> None:
    bench.rubric(name="own.yaml", id="own")
    bench.chain = [{"type": "rules", "params": {"min_answer_length": 5}}]
    file = tasks(bench, GOOD, GOOD, "no")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, model in zip(rows, ("one", "two", "two"), strict=True):
        row["metadata"] = {"model": model}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert bench("filter", "--dry-run", "--tasks", file).code == 0
    config = yaml.safe_load((bench.folder / "flywheel.yaml").read_text())
    config["targets"] = {"one": {"alias": "one"}, "two": {"alias": "two", "rubric": "own.yaml"}}
    path = bench.folder / "targets.yaml"
    path.write_text(yaml.safe_dump(config))
    ran = bench.flywheel("filter", "--dry-run", "--tasks", file, "--junit", "report.xml", "-c", path)
    assert ran.code == 0, ran.err
    suites = {suite.name: [case.name for case in suite] for suite in JUnitXml.fromfile("report.xml")}
    assert {name: sorted(own) for name, own in suites.items()} == {"r": ["t0"], "own": ["t1", "t2"]}


def test_a_report_that_cannot_be_written_is_a_failure(bench: Bench) -> None:
    bench.folder.joinpath("full").mkdir()
    bench("filter", "--dry-run", "--tasks", tasks(bench, GOOD), "--junit", "/proc/self/report.xml").fails(
        EXIT_FAILED, "cannot write /proc/self/report.xml"
    )


def changed_rubric(bench: Bench) -> tuple[Path, Path]:
    strict: list[dict[str, Any]] = [*CRITERIA[:1], {"id": "box", "type": "regex", "value": "1", "required": True}]
    return bench.rubric(name="old.yaml"), bench.rubric([*strict, *CRITERIA[1:]], name="new.yaml")


def test_a_comparison_of_rubrics_has_the_paired_interval_and_the_bar_of_the_new_one(bench: Bench) -> None:
    old, new = changed_rubric(bench)
    file = tasks(bench, *["good: \\boxed{1}"] * 12, *["good: \\boxed{2}"] * 4)
    asked = ("filter", "--rubric", new, "--against", old, "--tasks", file)
    ran = bench(*asked, "--fail-under", "0.8", "--json", "--summary", "summary.md", "--junit", "report.xml")
    assert ran.code == EXIT_QUALITY, ran.err
    shares = ran.json["accepted"]
    assert (shares["old"], shares["new"], shares["difference"]) == (1.0, 0.75, -0.25)
    assert -1 <= shares["lower"] < -0.25 < shares["upper"] <= 0
    assert (shares["tasks"], shares["conversations"], len(ran.json["flips"])) == (16, 16, 4)
    assert ran.json["quality"]["share"] == 0.75
    assert "accepted 1.000 → 0.750 of 16 tasks that both decided" in re.sub(r"\\", "", Path("summary.md").read_text())
    [suite] = JUnitXml.fromfile("report.xml")
    assert (suite.tests, suite.failures) == (16, 4)
    assert bench(*asked, "--fail-under", "0.7").code == 0
    assert not (bench.folder / "state").exists()


def test_another_judge_is_compared_at_the_same_endpoint(bench: Bench) -> None:
    content = bench.judge.content

    def lenient(request: dict[str, Any]) -> dict[str, Any]:
        said = content(request)
        for criterion in said["criteria"].values():
            if request["model"] == "lenient":
                criterion["choice"] = "yes"
        return said

    bench.judge.content = lenient  # type: ignore[method-assign]
    file = tasks(bench, GOOD, GOOD, BAD)
    ran = bench("filter", "--against-judge", "lenient", "--tasks", file, "--fail-under", "0.9", "--json")
    assert ran.code == EXIT_QUALITY, ran.err
    assert {request["model"] for request in bench.judge.requests} == {"judge", "lenient"}
    shares = ran.json["accepted"]
    assert (shares["old"], shares["new"]) == (1.0, pytest.approx(2 / 3))
    [flip] = ran.json["flips"]
    assert (flip["task_id"], flip["old"]["outcome"], flip["new"]["outcome"]) == ("t2", "accepted", "rejected")
    assert ran.json["old"]["name"] == "rubric.yaml by lenient"
    assert (
        "rubric.yaml by lenient → rubric.yaml by judge"
        in bench("filter", "--against-judge", "lenient", "--tasks", file).out
    )
