"""Dry runs, estimates and rubric diffs say what is true, ask only what they say, and write nothing anywhere."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import yaml

from flywheel.daemon.judging.comparison import TASKS_PER_THREAD
from flywheel.errors import EXIT_UNAVAILABLE
from tests import warm
from tests.cli.filter_bench import CRITERIA, Bench, changed
from tests.cli.terminal import in_terminal
from tests.factories.documented_json import compare, documented

GOOD, BAD, UNBOXED = "good: \\boxed{1}", "bad: \\boxed{0}", "good, without a box"
PRICES = {"input_per_million": 1000.0, "output_per_million": 5000.0, "currency": "EUR"}


def test_a_dry_run_uses_what_is_stored_asks_the_rest_and_leaves_every_byte_as_it_was(bench: Bench) -> None:
    bench.settings["prices"] = PRICES
    bench.lines(GOOD, BAD)
    bench.filter()
    bench.lines(UNBOXED)
    bench.rubric(threshold=0.9)
    calls = bench.judge.calls
    bench("status")
    before = bench.files()
    for arguments, told in (((), "3 tasks, 2 of them without a call: 1 call"), (("--json",), "")):
        ran = bench("filter", "--dry-run", "--rejudge", *arguments)
        assert (ran.code, told in ran.err, bool(told or not ran.err)) == (0, True, True)
        assert bench.files() == before
    shown = ran.json
    assert (shown["judged"], shown["reused"], shown["usage"]["calls"]) == (3, 2, 1)
    assert shown["cost"] == {"amount": pytest.approx(0.2), "currency": "EUR"}
    assert bench.judge.calls == calls + 2
    assert [verdict["outcome"] for verdict in shown["verdicts"]] == ["accepted", "rejected", "rejected"]


def test_an_estimate_makes_no_call_and_writes_nothing(bench: Bench) -> None:
    bench.lines(GOOD, BAD, GOOD)
    bench.rubric(changed(boxed={"value": "nowhere", "required": True}))
    told = bench.filter("--estimate")
    compare(told, documented("filter --estimate"), "filter --estimate")
    first = told["estimate"]
    assert (first["tasks"], first["without_a_call"], first["calls"]) == (3, 3, 0)
    bench.rubric()
    before = bench.files()
    rough = bench.filter("--estimate")["estimate"]
    assert (rough["calls"], rough["learned_from"], rough["cost"]) == (3, 0, None)
    assert rough["prompt_tokens"] > 300
    assert bench.judge.calls == 0
    after = bench.files()
    assert {path for path in after if "state" in path} == {path for path in before if "state" in path}
    bench.filter("--limit", "2")
    bench.settings["prices"] = PRICES
    learned = bench.filter("--estimate")["estimate"]
    # The judge tells 100 tokens sent and 20 received for every call.
    assert (learned["calls"], learned["learned_from"], learned["completion_tokens"]) == (1, 2, 20)
    assert learned["prompt_tokens"] == pytest.approx(100, rel=0.05)
    assert learned["cost"]["amount"] == pytest.approx(0.2, rel=0.05)
    assert bench.judge.calls == 2
    bench.rubric(changed(clear={"value": "Every step is told."}))
    again = bench.filter("--estimate", "--rejudge")["estimate"]
    assert (again["tasks"], again["calls"]) == (3, 3)
    bench.rubric(threshold=0.2)
    assert bench.filter("--estimate", "--rejudge")["estimate"]["calls"] == 1
    assert bench.judge.calls == 2


def test_an_estimate_tells_what_close_scores_can_add(bench: Bench) -> None:
    bench.lines(GOOD, BAD, GOOD)
    judge = {"repeats": 2, "escalate": {"band": [0.8, 1.0], "repeats": 3}}
    bench.rubric(judge=judge)
    foretold = bench.filter("--estimate")["estimate"]
    assert (foretold["calls"], foretold["more_calls_if_close"]) == (6, 9)
    assert "; up to 9 more calls if scores are close" in bench("filter", "--estimate").out
    assert bench.filter()["usage"]["calls"] == 6 + 2 * 3
    # With a wider band the second look at the third is what is left.
    bench.rubric(judge={**judge, "escalate": {"band": [0.0, 1.0], "repeats": 3}})
    again = bench.filter("--estimate", "--rejudge")["estimate"]
    assert (again["calls"], again["more_calls_if_close"]) == (3, 0)
    assert bench.filter("--rejudge")["usage"]["calls"] == 3


def test_an_estimate_asks_no_embedding_model_and_counts_what_rules_stop(bench: Bench) -> None:
    bench.lines(GOOD, "no", GOOD)
    bench.chain = [{"type": "rules", "params": {"min_answer_length": 5}}, {"type": "llm_evaluate"}]
    assert bench.filter("--estimate")["estimate"]["calls"] == 2
    bench.chain.insert(1, {"type": "deduplication", "params": {"model": "e", "base_url": "http://127.0.0.1:9/v1"}})
    assert bench.filter("--estimate")["estimate"]["calls"] == 2


def test_a_rubric_diff_says_what_flips_and_why_with_stored_verdicts_on_both_sides(bench: Bench) -> None:
    bench.settings["prices"] = PRICES
    bench.lines(GOOD, BAD, UNBOXED)
    old = bench.rubric(name="old.yaml", threshold=0.7)
    bench.rubric(threshold=0.7)
    bench.filter()
    new = bench.rubric(changed(boxed={"weight": 4}), name="new.yaml", threshold=0.75)
    calls = bench.judge.calls
    before = bench.files()
    diff = bench.filter("--dry-run", "--rubric", new, "--against", old)
    compare(diff, documented("filter --against"), "filter --against")
    assert bench.files() == {
        **before,
        str(bench.folder / "flywheel.yaml"): bench.files()[str(bench.folder / "flywheel.yaml")],
    }
    assert bench.judge.calls == calls
    assert (diff["compared"], diff["same"], diff["undecided"], diff["usage"]["calls"]) == (3, 2, 0, 0)
    assert {(change["criterion"], change["what"]) for change in diff["changes"]} == {
        ("", "threshold 0.7 → 0.75"),
        ("boxed", "weight 1 → 4"),
    }
    [flip] = diff["flips"]
    assert (flip["old"]["outcome"], flip["new"]["outcome"]) == ("accepted", "rejected")
    assert (flip["old"]["score"], flip["new"]["score"]) == (0.8, 0.5)
    assert "without a box" in flip["answer"]
    assert "What is 2 plus 1?" in flip["query"]
    told = {each["criterion"]: each for each in flip["why"]}
    assert told[""]["why"] == "threshold 0.7 → 0.75"
    assert (told["boxed"]["old"], told["boxed"]["new"], told["boxed"]["why"]) == (0.0, 0.0, "weight 1 → 4")
    assert (told["correct"]["old"], told["correct"]["new"]) == (pytest.approx(0.6), pytest.approx(0.375))
    needed = diff["judge_all"]
    assert (needed["without_cache"]["calls"], needed["with_cache"]["calls"]) == (3, 0)
    assert needed["without_cache"]["cost"]["amount"] == pytest.approx(0.6, rel=0.05)


def test_a_rubric_diff_asks_once_what_both_sides_have_to_know(bench: Bench) -> None:
    bench.lines(GOOD, BAD)
    old = bench.rubric(name="old.yaml")
    new = bench.rubric([*CRITERIA, {"id": "bad", "value": "It is unkind.", "weight": -4}], name="new.yaml")
    ran = bench("filter", "--rubric", new, "--against", old)
    assert ran.code == 0
    assert "2 tasks: 2 calls" in ran.err
    assert bench.asked() == [["correct", "clear", "bad"]] * 2
    assert "1 flip (0 to accepted, 1 to rejected), 1 unchanged" in ran.out
    assert re.search(r"bad: – → -0\.80 \(new\)", ran.out)
    assert not (bench.folder / "state").exists()


def test_a_reworded_criterion_is_asked_in_a_diff_only_in_its_new_words(bench: Bench) -> None:
    bench.lines(GOOD, BAD)
    old = bench.rubric()
    bench.filter()
    old = bench.rubric(name="old.yaml")
    new = bench.rubric(changed(clear={"value": "Every step is told."}), name="new.yaml")
    diff = bench.filter("--rubric", new, "--against", old)
    assert bench.asked(2) == [["clear"], ["clear"]]
    assert (diff["usage"]["calls"], diff["reused"], diff["flips"]) == (2, 0, [])


def test_a_judge_that_fails_ends_a_diff_with_what_there_is(bench: Bench) -> None:
    bench.lines(*[GOOD] * 9)
    bench.judge.behave("500")
    ran = bench("filter", "--limit", "2", "--against", bench.rubric(name="old.yaml"), "--json")
    assert (ran.code, ran.json["undecided"]) == (EXIT_UNAVAILABLE, 2)
    ran = bench("filter", "--against", bench.rubric(name="old.yaml"), "--json")
    assert ran.code == EXIT_UNAVAILABLE
    assert "in a row" in ran.json["error"]
    assert ran.json["flips"] == []
    bench.judge.behave("401")
    assert bench("filter", "--against", bench.rubric(name="old.yaml"), "--json").code == EXIT_UNAVAILABLE


def test_a_diff_that_ends_early_has_the_tasks_until_then_and_one_failure_ends_none(bench: Bench) -> None:
    bench.settings["max_thread"] = 1
    bench.lines(*[GOOD] * TASKS_PER_THREAD, *[BAD] * 9)
    old = bench.rubric(changed(boxed={"weight": 9}), name="old.yaml", threshold=0.9)
    bench.judge.behave(*["good"] * 3, "500", *["good"] * (TASKS_PER_THREAD - 4), *["500"] * 20)
    ran = bench("filter", "--against", old, "--json")
    assert ran.code == EXIT_UNAVAILABLE
    assert (ran.json["same"], ran.json["undecided"], ran.json["not_reached"]) == (TASKS_PER_THREAD - 1, 9, 1)


def test_a_diff_of_everything_and_an_estimate_are_different_wishes(bench: Bench) -> None:
    rubric = bench.rubric(name="old.yaml")
    assert bench("filter", "--against", rubric, "--estimate").code == 2
    assert bench("filter", "--against", bench.folder / "missing.yaml").code == 78


@pytest.mark.slow
def test_on_a_terminal_no_key_is_cut_nothing_is_wider_and_reasons_are_whole(bench: Bench) -> None:
    reason = "The carry was forgotten in the second step, so that the sum is wrong by ten."
    bench.lines(GOOD, BAD, UNBOXED)
    bench("status")
    answer = bench.judge.content

    def content(request: dict[str, Any]) -> dict[str, Any]:
        said = answer(request)
        said["criteria"]["correct"]["reason"] = reason
        return said

    bench.judge.content = content  # type: ignore[method-assign]
    seen = in_terminal(bench.folder, ["filter", "--dry-run"], columns=80, home=bench.folder)
    assert seen.code == 0 and max(map(len, seen.lines)) <= 80
    shown = "\n".join(seen.lines)
    assert len(re.findall(r"^\S+ +(?:accepted|rejected) +\d\.\d\d", shown, re.M)) == 3
    words = " ".join(re.sub(r"[^\w.,]", " ", shown).split())
    assert words.count("The carry was forgotten") == 3
    assert "…" not in shown
    assert re.search(r"3 judged: 2 accepted, 1 rejected", shown)
    assert re.search(r"judging .* 3/3 .*left", shown)


@pytest.mark.slow
def test_what_a_users_function_prints_is_not_in_the_json(bench: Bench) -> None:
    (bench.folder / "mine.py").write_text(
        "def keep(task):\n    print('looking at', task['task_id'])\n    return True\n"
    )
    bench.chain = [{"type": "python", "params": {"path": "mine.py"}}]
    bench.rubric([*CRITERIA, {"id": "ours", "type": "python", "value": "mine.py:keep"}])
    bench.lines("good boxed")
    bench("status")
    command = [sys.executable, "-m", "flywheel", "filter", "--json"]
    ran = warm.run(command, cwd=bench.folder, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["accepted"] == 1
    assert "looking at" in ran.stderr


def test_a_source_that_is_missing_makes_it_end_with_1_and_the_others_are_judged(bench: Bench) -> None:
    bench.lines(GOOD)
    assert bench("filter", "--dry-run").code == 0
    config = yaml.safe_load((bench.folder / "flywheel.yaml").read_text())
    config["sources"].append({"path": "nowhere.sqlite"})
    other = bench.folder / "other.yaml"
    other.write_text(yaml.safe_dump(config))
    ran = bench.flywheel("filter", "--dry-run", "-c", other)
    assert ran.code == 1
    assert "nowhere.sqlite: there is no such file" in ran.err
    assert "1 judged: 1 accepted" in ran.out
    told = bench.flywheel("filter", "--dry-run", "--json", "-c", other)
    assert told.code == 1
    assert told.json["judged"] == 1
    assert "nowhere.sqlite" in told.json["error"]


def test_an_error_that_repeats_is_printed_once_with_a_count(bench: Bench) -> None:
    bench.lines(GOOD, GOOD, GOOD)
    bench.settings["base_url"] = "http://127.0.0.1:9/v1"
    ran = bench("filter", "--dry-run")
    assert ran.code == EXIT_UNAVAILABLE
    assert ran.out.count("Check judge.base_url") == 1
    assert "(3 tasks) cannot ask the judge" in ran.out
    assert ran.out.count("undecided") == 4, "each task has its line, and the sum"


def test_the_counts_of_a_diff_add_up(bench: Bench) -> None:
    bench.lines(GOOD, BAD, "short")
    bench.chain = [{"type": "rules", "params": {"min_answer_length": 8}}]
    bench.filter()
    bench.chain = []
    bench.rubric(threshold=0.9)
    old = bench.rubric(name="old.yaml")
    shown = bench.filter("--against", old)
    assert shown["tasks"] == shown["compared"] + shown["left_aside"] + shown["not_reached"] == 3
    assert (shown["compared"], shown["left_aside"]) == (2, 1)
    assert shown["compared"] == len(shown["flips"]) + shown["same"] + shown["undecided"]
    # The filters of a chain are not compared: these would reject all.
    bench.chain = [{"type": "rules", "params": {"min_answer_length": 1000}}]
    assert bench.filter("--against", old)["accepted"] == shown["accepted"] | {"old": 0.5, "new": 0.5}
    bench.chain = []
    shown = bench.filter("--against", old, "--limit", "1")
    assert (shown["compared"], shown["left_aside"], shown["not_reached"]) == (1, 1, 1)
    assert "1 of 3 tasks not compared: decided by a filter or a person" in bench("filter", "--against", old).out
