"""`flywheel rubric calibrate` against a real judge over HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import EXIT_UNAVAILABLE
from tests.cli.conftest import Run
from tests.factories.config import write_chain, write_config
from tests.factories.documented_json import compare, documented
from tests.factories.judge_server import JudgeServer
from tests.factories.state import execute
from tests.factories.trace import START, write_lines

RUBRIC = """id: r
threshold: 0.7
criteria:
  - {id: correct, value: It is right., weight: 3}
  - {id: long, type: min-length, value: 3}
"""


@pytest.fixture
def config(tmp_path: Path, judge: JudgeServer) -> Path:
    judge.verdict = lambda _, answer: "seven" in answer
    (tmp_path / "r.yaml").write_text(RUBRIC)
    return write_settings(tmp_path, judge)


def write_settings(folder: Path, judge: JudgeServer, filters: dict[str, str] | None = None, **settings: Any) -> Path:
    own = {"base_url": judge.base_url, "model": "judge", "max_thread": 4, "max_attempts": 1, **settings}
    return write_config(folder, judge=own, filter=filters or {})


def write_labels(tmp_path: Path, *lines: dict[str, Any] | str) -> Path:
    return write_lines(tmp_path / "labels.jsonl", *lines)


def label(answer: str, verdict: Any, **more: Any) -> dict[str, Any]:
    return {"query": "What is 3 plus 4?", "answer": answer, "verdict": verdict, **more}


LABELS = [
    *(label(f"It is seven, {n}.", "accept") for n in range(6)),
    *(label(f"It is eight, {n}.", "reject") for n in range(5)),
    label("7", "accept", reason="short but right"),
    label("It is seven o'clock.", "reject", reason="beside the point"),
]


@pytest.mark.slow
def test_the_figures_and_the_worst_disagreements(
    flywheel: Run, config: Path, tmp_path: Path, judge: JudgeServer
) -> None:
    labels = write_labels(tmp_path, *LABELS)
    ran = flywheel("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config, "--repeats", 3, "--json")
    assert ran.code == 0, ran.err
    said = ran.json
    compare(said, documented("rubric calibrate"), "rubric calibrate")
    assert said["confusion"] == {
        "accept": {"accepted": 6, "rejected": 1},
        "reject": {"accepted": 1, "rejected": 5},
    }
    assert said["judged"] == 13
    assert said["base_rate"] == pytest.approx(7 / 13)
    assert said["agreement"] == pytest.approx(11 / 13)
    expected = (49 + 36) / 169
    assert said["kappa"]["value"] == pytest.approx((11 / 13 - expected) / (1 - expected))
    assert -1 <= said["kappa"]["low"] < said["kappa"]["value"] < said["kappa"]["high"] <= 1
    assert said["consistency"] == {"pairs": 1.0, "unanimous": 1.0}
    assert [(each["label"], each["verdict"], each["label_reason"]) for each in said["worst"]] == [
        ("accept", "rejected", "short but right"),
        ("reject", "accepted", "beside the point"),
    ]
    assert all(each["reason"] for each in said["worst"])
    assert judge.calls == said["usage"]["calls"] == 39
    shown = flywheel("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config)
    assert shown.code == 0
    for words in ("Cohen's kappa 0.69 (95 % interval", "accepted: human 54%", "short but right", "judge: accept"):
        assert words in shown.out


def test_a_judge_that_changes_its_mind_is_shown(
    flywheel: Run, config: Path, tmp_path: Path, judge: JudgeServer
) -> None:
    seen: dict[str, int] = {}

    def moody(question: str, answer: str) -> bool:
        seen[answer] = seen.get(answer, 0) + 1
        return seen[answer] != 2

    judge.verdict = moody
    labels = write_labels(tmp_path, *(label(f"Answer {n}", "accept" if n % 2 else "reject") for n in range(4)))
    said = flywheel("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config, "--repeats", 3, "--json").json
    assert said["consistency"] == {"pairs": pytest.approx(1 / 3), "unanimous": 0.0}
    assert said["confusion"]["reject"] == {"accepted": 2, "rejected": 0}


def spent(tmp_path: Path) -> list[tuple[int, int]]:
    """Calls and tokens of today."""
    query = "SELECT calls, prompt_tokens + completion_tokens FROM judge_days"
    return execute(tmp_path / "state" / "state.db", query)


def test_it_says_first_what_it_will_take_and_counts_in_the_days_budget(
    flywheel: Run, config: Path, tmp_path: Path, judge: JudgeServer
) -> None:
    prices = {"input_per_million": 1000, "output_per_million": 5000, "currency": "EUR"}
    write_settings(tmp_path, judge, prices=prices)
    labels = write_labels(tmp_path, *LABELS)
    wanted = ("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config)
    ran = flywheel(*wanted, "--repeats", 2)
    # One of the replies is too short for its check, which is no required one: the judge is asked of all.
    told = re.match(r"13 replies, 2 times each: 26 calls, about (\S+) tokens sent, (\S+) received, about ", ran.err)
    assert told is not None
    assert "26 calls; 2,600 tokens sent, 520 received; about 5.20 EUR" in ran.out
    assert spent(tmp_path) == [(26, 26 * 120)]
    once = sum(int(number.replace(",", "")) for number in told.groups()) // 2
    write_settings(tmp_path, judge, prices=prices, budget={"tokens_per_day": 26 * 120 + once})
    assert flywheel(*wanted, "--json").json["cost"] == {"amount": pytest.approx(2.6), "currency": "EUR"}
    # Then there is no room for another one, and nobody is asked.
    calls = judge.calls
    flywheel(*wanted).fails(1, f"and the budget has {once - 13 * 120:,} tokens left. Use fewer labels")
    assert judge.calls == calls


def test_a_budget_that_does_not_suffice_after_all_ends_it_and_what_was_spent_is_known(
    flywheel: Run, config: Path, tmp_path: Path, judge: JudgeServer
) -> None:
    judge.behave("costly")
    write_settings(tmp_path, judge, budget={"tokens_per_run": 30000})
    labels = write_labels(tmp_path, *LABELS)
    ran = flywheel("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config, "--json")
    assert ran.code == 1
    assert "the budget of 30,000 tokens a run is spent" in ran.json["error"]
    assert judge.calls < 13
    assert spent(tmp_path) == [(judge.calls, judge.calls * 8000)]


def test_it_is_judged_as_tasks_are_and_held_to_the_bar(
    flywheel: Run, config: Path, tmp_path: Path, judge: JudgeServer
) -> None:
    write_chain(tmp_path, {"type": "llm_evaluate", "params": {"temperature": 0.3}})
    labels = write_labels(tmp_path, *LABELS)
    for bar, shortfall in ((0.95, "judge.min_kappa is 0.95, but kappa of the rubric is 0.69 (13 labels"), (0.5, "")):
        write_settings(tmp_path, judge, {"chain": "chain.yaml", "rubric": "r.yaml"}, min_kappa=bar)
        ran = flywheel("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config, "--json")
        assert (ran.code, (ran.json["shortfall"] or "").startswith(shortfall)) == (int(bool(shortfall)), True)
    assert ran.json["shortfall"] is None
    assert {request["temperature"] for request in judge.requests} == {0.3}
    # It is the calibration that a round asks for: another reason is left why there is none.
    ran = flywheel("round", "-c", config)
    assert "min_kappa" not in ran.err + ran.out


def test_every_form_of_a_label_and_those_by_task_id(flywheel: Run, config: Path, tmp_path: Path) -> None:
    labels = write_labels(
        tmp_path,
        label("It is seven.", "GOOD"),
        label("It is eight.", "bad"),
        {"query": "q", "answer": "seven of them", "expected_verdict": "GOOD"},
        {"main_query": "q", "answer": "seven", "label": True, "metadata": {"trajectory_json": "[]"}},
        {"query": "q", "answer": None, "verdict": "reject"},
        {"query": "q", "answer": "a", "verdict": None},
        "",
    )
    said = flywheel("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config, "--json").json
    assert (said["labels"], said["left_out"], said["agreement"]) == (4, 2, 1.0)
    started = {"started_at": START.isoformat()}
    lines = [{"question": f"What is {n}?", "answer": "It is seven.", "metadata": started} for n in range(3)]
    write_lines(tmp_path / "tasks.jsonl", *lines)
    config.write_text(f"{config.read_text()}sources:\n  - {{type: jsonl, path: tasks.jsonl}}\n")
    ran = flywheel("ingest", "-c", config, "--out", "out.jsonl")
    assert ran.code == 0, ran.err
    ids = [json.loads(line)["task_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    labels = write_labels(tmp_path, *({"task_id": name, "verdict": "accept"} for name in ids))
    said = flywheel("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config, "--json").json
    assert said["judged"] == 3
    assert {each["task_id"] for each in flywheel("labels", "--json", "-c", config).json["labels"]} == set(ids)
    labels = write_labels(tmp_path, {"task_id": "t-nobody", "verdict": "accept"})
    flywheel("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config).fails(
        78, "task t-nobody is not in the state"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: "),
        ("[1]", "line 1: it is a list"),
        ({"query": "q", "answer": "a"}, "line 1: it has no `verdict`"),
        (label("a", "perhaps"), "line 1: `verdict` is 'perhaps'"),
        ({"answer": "a", "verdict": "accept"}, "neither a `query` nor a `task_id`"),
        ({"query": 3, "answer": "a", "verdict": "accept"}, "must be texts"),
        (label("a", "accept", init_messages="hi"), "`init_messages` is not a list of messages"),
        (label("a", "accept", init_messages=["hi"]), "`init_messages` is not a list of messages"),
        (label("a", "accept", metadata={"tools_json": "{"}), "`metadata.tools_json` is not JSON"),
        ("", "it has no label"),
        (label("a", None), "it has no label"),
    ],
)
def test_labels_that_cannot_be_used(
    flywheel: Run, config: Path, tmp_path: Path, judge: JudgeServer, line: Any, words: str
) -> None:
    flywheel("rubric", "calibrate", "r.yaml", "--labels", write_labels(tmp_path, line), "-c", config).fails(78, words)
    assert judge.calls == 0


def test_a_judge_that_is_away_stores_nothing(flywheel: Run, config: Path, tmp_path: Path, judge: JudgeServer) -> None:
    labels = write_labels(tmp_path, *LABELS)
    judge.behave("500")
    ran = flywheel("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config)
    assert ran.code == EXIT_UNAVAILABLE
    judge.behave("nonsense")
    flywheel("rubric", "calibrate", "r.yaml", "--labels", labels, "-c", config).fails(
        EXIT_UNAVAILABLE, "none of the 13 replies was decided"
    )
    write_settings(tmp_path, judge, min_kappa=0.1)
    judge.behave("good")
    flywheel("round", "-c", config, "--force").fails(1, "the rubric is not calibrated")
