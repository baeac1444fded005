"""What a genuine AgentScope 2.0.10 agent records, from its database to `status`, `why`, metrics and the doctor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.sources.studio.writer import DATA

FIXTURE = DATA / "dialogues" / "agentscope_2_0_10.sqlite"
LABELS = [json.loads(line) for line in FIXTURE.with_suffix(".jsonl").read_text().splitlines()]


@pytest.fixture
def ingested(flywheel: Run, tmp_path: Path) -> Path:
    config = tmp_path / "flywheel.yaml"
    write(config)
    assert flywheel("ingest").code == 0
    return config


def write(config: Path, *, models: dict[str, Any] | None = None, **sections: Any) -> None:
    database = config.parent / "studio.sqlite"
    if not database.exists():
        shutil.copy(FIXTURE, database)
    source = {"path": str(database), **({"models": models} if models else {})}
    config.write_text(json.dumps({"state": {"dir": "home"}, "sources": [source], **sections}))


def span(**wanted: Any) -> str:
    return str(next(each["span_id"] for each in LABELS if wanted.items() <= each.items()))


def test_lines_status_and_metrics_say_why_and_what_to_do(flywheel: Run, ingested: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (tmp_path / "home" / "tasks.jsonl").read_text().splitlines()]
    by_span = {label["span_id"]: label for label in LABELS}
    assert len(lines) == sum(not label["error"] for label in LABELS)
    for about in (line["metadata"] for line in lines):
        label = by_span[about["span_id"]]
        assert about["prompt_exact"] is not label["runtime_reminder"]
        assert bool(about["prompt_reason"]) is label["runtime_reminder"]
        assert (about["prompt_source"], about["adapter"], about["adapter_source"]) == ("trace", "", "")
    state = flywheel("status", "--json").json
    counts = {each["reason"]: each["tasks"] for each in state["left_out"]}
    assert counts == {"hidden": 26, "model": 6}
    assert state["prompts"] == {"tasks": 46, "exact": 20, "inexact": {"hidden": 26}}
    assert state["other_models"] == {"helper-model": 6}
    # Those of the other model are no part of what the base model's acceptance is made of.
    assert [(each["adapter"], each["other"]) for each in state["by_adapter"]] == [("", 40)]
    told = " ".join(flywheel("status").out.split())
    assert "20 of 46 exact (43%); 26 hidden" in told and "helper-model 6" in told
    assert "26 tasks: the model was sent a message that the trace does not show" in told
    assert "Agent(…, injection_config=InjectionConfig(inject_runtime_state=False))" in told
    metrics = flywheel("status", "--metrics").out
    for line in ('left_out{reason="hidden"} 26.0', "prompts_exact 20.0", 'prompts_inexact{reason="hidden"} 26.0'):
        assert line in metrics


def test_why_names_every_reason(flywheel: Run, ingested: Path) -> None:
    (reply,) = flywheel("why", span(model="helper-model"), "--json").json["replies"]
    assert {each["reason"] for each in reply["task"]["left_out"]} == {"hidden", "model"}
    write(ingested, rollout={"agent": "reply"})
    (reply,) = flywheel("why", span(model="helper-model"), "--json").json["replies"]
    reasons = {each["reason"]: each["why"] for each in reply["task"]["left_out"]}
    assert reasons.keys() == {"hidden", "tools", "model"}
    assert "helper-model" in reasons["model"]
    told = flywheel("why", span(model="helper-model")).out
    assert told.count("excluded from rounds: ") == 3
    (plain,) = flywheel("why", span(runtime_reminder=False), "--json").json["replies"]
    assert plain["task"]["left_out"] == []


def test_a_source_can_take_other_models(flywheel: Run, tmp_path: Path) -> None:
    write(tmp_path / "flywheel.yaml", models={"include": ["helper-*"], "exclude": ["my-agent"]})
    assert flywheel("ingest").code == 0
    counts = {each["reason"]: each["tasks"] for each in flywheel("status", "--json").json["left_out"]}
    assert counts == {"hidden": 26, "model": 40}
