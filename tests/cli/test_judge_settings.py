"""No reply is sent to a judge that nobody named: what judges says what is missing, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import EXIT_CONFIG
from tests.cli.conftest import Run
from tests.factories.config import write_rubric, write_yaml
from tests.factories.judge_server import JudgeServer
from tests.factories.trace import write_lines

CHECKS: dict[str, Any] = {"id": "checks", "criteria": [{"id": "boxed", "type": "regex", "value": "boxed"}]}
MISSING = "judge.base_url and judge.model are not set"
LABELS = [{"query": f"{n} + 1", "answer": "2", "label": label} for n, label in enumerate(["accept", "reject"] * 5)]
Configure = Callable[..., Path]


@pytest.fixture
def configure(flywheel: Run, tmp_path: Path) -> Configure:
    """Writes a configuration with a source and, unless it is given, without a judge."""
    write_lines(tmp_path / "source.jsonl", {"main_query": "1 + 1", "answer": "2"})
    write_rubric(tmp_path)
    write_rubric(tmp_path, name="checks.yaml", **CHECKS)
    sources = [{"type": "jsonl", "path": "source.jsonl"}]

    def write(rubric: str = "rubric.yaml", **sections: Any) -> Path:
        return write_yaml(
            tmp_path / "flywheel.yaml",
            {"state": {"dir": "state"}, "sources": sources, "filter": {"rubric": rubric}, **sections},
        )

    return write


def test_what_judges_says_what_is_missing(
    flywheel: Run, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-a-hosted-model")
    write_lines(tmp_path / "labels.jsonl", *LABELS)
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "a.md").write_text("# A city\n\nIt has 1,000 towers, which were built in 1805. " * 20)
    configure()
    for reads in ("ingest", "status", "config show", "filter --estimate"):
        assert flywheel(*reads.split()).code == 0, "only what judges needs a judge"
    for command in (
        "run --once", "filter", "filter --dry-run", "round --force --yes",
        "rubric calibrate rubric.yaml --labels labels.jsonl", "rubric suggest --labels labels.jsonl",
        "tasks from-documents documents --count 1",
        "evaluate --model m --base-url http://127.0.0.1:9/v1 --benchmark source.jsonl",
    ):  # fmt: skip
        ran = flywheel(*command.split())
        assert (ran.code, MISSING in ran.err) == (EXIT_CONFIG, True), command
    assert flywheel("tasks", "--state", "pending", "--json").json["total"] == 1


def test_a_rubric_that_asks_no_judge_needs_none(flywheel: Run, configure: Configure) -> None:
    configure("checks.yaml")
    assert flywheel("run", "--once").code == 0
    assert flywheel("tasks", "--state", "rejected", "--json").json["total"] == 1
    findings = flywheel("doctor", "--json").json["checks"]
    assert not [each for each in findings if each["name"] == "judge"]
    configure()
    [finding] = [each for each in flywheel("doctor", "--json").json["checks"] if each["name"] == "judge"]
    assert finding["result"] == "failed" and MISSING in finding["found"]


def test_a_run_looks_at_the_rubrics_of_targets_and_suites_as_well(flywheel: Run, configure: Configure) -> None:
    own = {"rubric": "rubric.yaml"}
    for sections in ({"targets": {"a": own}}, {"gate": {"suites": {"s": {"file": "source.jsonl", **own}}}}):
        configure("checks.yaml", **sections)
        ran = flywheel("run", "--once")
        assert (ran.code, MISSING in ran.err) == (EXIT_CONFIG, True), sections


def test_the_endpoint_may_be_in_the_environment_and_the_model_in_the_rubric(
    flywheel: Run, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rubric(tmp_path, name="named.yaml", judge={"model": "of-the-rubric"})
    configure("named.yaml")
    with JudgeServer() as judge:
        monkeypatch.setenv("OPENAI_BASE_URL", judge.base_url)
        assert flywheel("run", "--once").code == 0
        assert [each["model"] for each in judge.requests] == ["of-the-rubric"]
        configure("rubric.yaml")
        flywheel("run", "--once").fails(EXIT_CONFIG, "judge.model is not set")
        assert judge.calls == 1
