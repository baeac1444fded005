"""Ingest, filter, look: the loop up to the round, as a person turns it by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.factories.config import write_config, write_rubric
from tests.factories.judge_server import JudgeServer

STUDIO = Path(__file__).parent.parent / "data" / "studio"
NAMES = ("old", "new_v1", "new_v2", "new_oldclient", "migrated")


def labels(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (STUDIO / f"{name}.labels.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def truth() -> Callable[[str, str], bool]:
    """The labels' own verdicts: the judge is right when nobody can say otherwise."""
    good = {
        (label["query"], label["answer"])
        for name in NAMES
        for label in labels(name)
        if label["expected_verdict"] == "GOOD"
    }
    return lambda question, answer: (question, answer) in good


@pytest.fixture
def config(tmp_path: Path, judge: JudgeServer, truth: Callable[[str, str], bool]) -> Path:
    judge.verdict = truth
    write_rubric(tmp_path)
    return write_config(
        tmp_path,
        sources=[{"path": str(shutil.copy(STUDIO / "new_v2.sqlite", tmp_path / "studio.sqlite"))}],
        judge={"base_url": judge.base_url, "model": "judge", "max_thread": 8},
        filter={"rubric": "rubric.yaml"},
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_visible_reply_comes_out_once_and_the_rest_has_a_reason(
    flywheel: Run, tmp_path: Path, name: str
) -> None:
    first = flywheel("ingest", "--source", STUDIO / f"{name}.sqlite", "--out", tmp_path / "out.jsonl", "--json")
    again = flywheel("ingest", "--source", STUDIO / f"{name}.sqlite", "--out", tmp_path / "out.jsonl", "--json")
    assert first.code == again.code == 0
    [source] = first.json["sources"]
    assert source["replies"] == source["tasks"] + sum(source["skipped"].values()) == 105
    assert first.json["new"] == first.json["tasks"] == source["tasks"]
    assert again.json["new"] == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == first.json["tasks"]
    keys = [(sorted(line), sorted(line["metadata"])) for line in lines]
    assert all(entry == keys[0] for entry in keys), "the same keys on every line"
    came_out = {line["metadata"]["span_id"]: line for line in lines}
    for label in labels(name):
        line = came_out.pop(str(label["span_id"]), None)
        if line is not None:
            assert line["main_query"] == label.get("user_query", label["query"])
            assert line["answer"] == line["metadata"]["answer"] == label["answer"]
        else:
            assert not label["user_visible"] or label["status"] != "OK" or label["kind"] == "interrupted"
    assert came_out == {}


def test_all_sources_at_once_share_what_is_the_same_reply(flywheel: Run, tmp_path: Path) -> None:
    sources = [word for name in NAMES for word in ("--source", STUDIO / f"{name}.sqlite")]
    ran = flywheel("ingest", *sources, "--json")
    assert ran.code == 0
    assert len(ran.json["sources"]) == 5
    lines = (tmp_path / "home" / "tasks.jsonl").read_text().splitlines()
    # migrated.sqlite holds the conversations of old.sqlite.
    assert len(lines) == ran.json["new"] == ran.json["tasks"] - ran.json["sources"][0]["tasks"]
    assert flywheel("audit", "--json").json["balanced"]


@pytest.mark.slow
def test_verdicts_are_those_of_the_judge_and_are_paid_for_once(
    flywheel: Run, config: Path, judge: JudgeServer
) -> None:
    ran = flywheel("filter", "-c", config, "--json")
    assert ran.code == 0
    expected = {label["span_id"]: label["expected_verdict"] for label in labels("new_v2")}
    verdicts = ran.json["verdicts"]
    assert len(verdicts) == ran.json["judged"] > 90
    for verdict in verdicts:
        wanted = "accepted" if expected[verdict["span_id"]] == "GOOD" else "rejected"
        # The last stage of a pipeline is judged by the user's question, which the label's pair does not have.
        if verdict["outcome"] != wanted:
            kinds = {label["kind"] for label in labels("new_v2") if label["span_id"] == verdict["span_id"]}
            assert kinds == {"pipeline_last"}
    assert ran.json["usage"]["calls"] == judge.calls == len(verdicts)
    assert ran.json["usage"]["prompt_tokens"] == 100 * judge.calls
    again = flywheel("filter", "-c", config, "--json").json
    assert (again["judged"], again["usage"]["calls"]) == (0, 0)
    assert judge.calls == len(verdicts)
    books = flywheel("audit", "-c", config, "--json").json
    assert books["balanced"]
    assert books["accepted"] == ran.json["accepted"]


def test_the_table_shows_what_a_person_wants_to_know(
    flywheel: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ran = flywheel("filter", "-c", config, "--dry-run", "--limit", "20")
    assert ran.code == 0
    words = ("score", "verdict", "failed", "reason", "accepted", "rejected", "it is not so", "nothing was written")
    for word in words:
        assert word in ran.out


@pytest.mark.slow
def test_status_audit_and_why_agree(flywheel: Run, config: Path) -> None:
    flywheel("filter", "-c", config, "--limit", "30")
    status = flywheel("status", "-c", config, "--json").json
    books = flywheel("audit", "-c", config, "--json").json
    assert status["tasks"]["accepted"] == books["accepted"]
    assert status["balance"]["pending"] == books["pending"]
    assert status["sources"][0]["schema"] == "generation 2"
    assert status["judge"]["usage"]["calls"] == 30
    assert status["deployment"]["adapter"] is None
    line = json.loads((config.parent / "state" / "tasks.jsonl").read_text().splitlines()[0])
    for subject in (line["task_id"], line["metadata"]["span_id"], line["metadata"]["trace_id"]):
        story = flywheel("why", subject, "-c", config, "--json").json
        [told] = [reply for reply in story["replies"] if reply["span_id"] == line["metadata"]["span_id"]]
        assert told["task"]["task_id"] == line["task_id"]
        assert told["task"]["verdicts"][0]["outcome"] in ("accepted", "rejected")
    skipped = next(label for label in labels("new_v2") if label["role"] == "nested")
    ran = flywheel("why", skipped["span_id"], "-c", config)
    assert "nested" in ran.out
    for command in ("status", "audit"):
        assert flywheel(command, "-c", config).code == 0


def test_init_lays_out_files_that_load_and_leaves_existing_ones_alone(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "mine" / "rubrics").mkdir(parents=True)
    (tmp_path / "mine" / "rubrics" / "math-boxed.yaml").write_text("mine")
    assert flywheel("init", "mine", "--systemd").code == 0
    assert (tmp_path / "mine" / "rubrics" / "math-boxed.yaml").read_text() == "mine"
    assert flywheel("rubric", "check", tmp_path / "mine" / "rubrics" / "qa-quality.yaml").code == 0
    assert flywheel("status", "-c", tmp_path / "mine" / "flywheel.yaml").code == 0
    assert (tmp_path / "mine" / "systemd" / "flywheel.service").exists()
    assert flywheel("rubric", "check", tmp_path / "mine" / "rubrics" / "math-boxed.yaml").code == 78
