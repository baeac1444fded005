"""The forecast of what rounds could train on, in the commands that come before a round; and a pasted file's way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config.file import Config, load
from flywheel.records.round import RoundSpec
from tests.cli.conftest import Ran, Run
from tests.cli.terminal import Seen, in_terminal
from tests.factories.config import base_model, told_settings
from tests.factories.judge_server import JudgeServer
from tests.factories.round import planned_round
from tests.factories.state import in_thread, open_state
from tests.sources.studio.writer import DATA, labels

NOTHING = (
    "96 tasks: 37 held out; of 59 for training 0 usable. Answered by another model (`sources[].models.include`): 59;"
    " no exact prompt (`training.inexact_prompts`): 59; tools uncalled (`rollout.tools.uncalled`): 13."
    " All three together: 59."
)
QUESTION = "No round could train on these tasks. Call the judge anyway? [y/N]"
GOOD = {each["answer"] for each in labels("old") if each["expected_verdict"] == "GOOD"}


def write(folder: Path, judge: JudgeServer, **sections: Any) -> Path:
    """Flywheel's own configuration of the fixture `old`, whose replies are another model's."""
    judge.verdict = lambda _, answer: answer in GOOD
    shutil.copy(DATA / "old.sqlite", folder)
    own = {
        "state": {"dir": "state"},
        "sources": [{"path": "old.sqlite"}],
        "judge": {"base_url": judge.base_url, "model": "judge"},
        **sections,
    }
    path = folder / "flywheel.yaml"
    path.write_text(yaml.safe_dump(own))
    return path


TRAINS = {"model": {"base": "Qwen/Qwen3-0.6B"}}


def test_ingest_filter_doctor_and_round_say_it(flywheel: Run, judge: JudgeServer, tmp_path: Path) -> None:
    write(tmp_path, judge, **TRAINS)
    assert f"forecast  {NOTHING}" in flywheel("ingest").out
    assert NOTHING in flywheel("doctor").out
    ran = flywheel("round")
    assert (ran.code, ran.out) == (1, f"{NOTHING}\n")
    assert judge.calls == 0
    ran = flywheel("filter", "--limit", "2")
    assert (ran.code, ran.out.startswith(f"{NOTHING}\n")) == (0, True), "a pipe is never asked"
    assert judge.calls > 0


def test_their_json_has_it_as_an_object(flywheel: Run, judge: JudgeServer, tmp_path: Path) -> None:
    write(tmp_path, judge, **TRAINS)
    expected = flywheel("ingest", "--json").json["forecast"]
    assert {key: value for key, value in expected.items() if key != "reasons"} == {
        "tasks": 96, "held_out": 37, "for_training": 59, "usable": 0, "left_out": 59,
    }  # fmt: skip
    assert [(each["exclusions"], each["tasks"]) for each in expected["reasons"]] == [
        (["model"], 59), (["hidden", "inexact"], 59), (["uncalled"], 13),
    ]  # fmt: skip
    doctor = flywheel("doctor", "--json").json
    assert doctor["forecast"] == expected
    assert next(each["result"] for each in doctor["checks"] if each["name"] == "forecast") == "warning"
    assert flywheel("filter", "--dry-run", "--limit", "1", "--json").json["forecast"] == expected
    changed = ["--set", "training.inexact_prompts=use", "--set", "sources.0.models.include=[gpt-4o-mini]"]
    assert flywheel("doctor", "--json", *changed).json["forecast"]["usable"] == 46, "as it would be, at once"


def test_changed_settings_count_in_the_next_command(flywheel: Run, judge: JudgeServer, tmp_path: Path) -> None:
    write(tmp_path, judge, **TRAINS)
    assert flywheel("ingest", "--json").json["forecast"]["usable"] == 0
    changed = ["--set", "training.inexact_prompts=use", "--set", "sources.0.models.include=[gpt-4o-mini]"]
    assert flywheel("ingest", "--json", *changed).json["forecast"]["usable"] == 46
    other = str(shutil.copy(DATA / "new_v2.sqlite", tmp_path))
    told = flywheel("ingest", "--json", "--source", other, *changed).json["forecast"]
    assert told["usable"] == 46 < told["for_training"] - 13, "of an unconfigured source, only the alias counts"
    assert flywheel("filter", "--limit", "1", "--json").json["forecast"]["usable"] == 0


def test_a_configuration_that_only_judges_has_none(flywheel: Run, judge: JudgeServer, tmp_path: Path) -> None:
    write(tmp_path, judge)
    assert "forecast" not in flywheel("ingest").out
    assert "usable" not in flywheel("filter", "--limit", "1").out
    assert flywheel("ingest", "--json").json["forecast"] is None
    assert flywheel("filter", "--limit", "1", "--json").json["forecast"] is None
    doctor = flywheel("doctor", "--json").json
    assert doctor["forecast"] is None
    assert next(each["result"] for each in doctor["checks"] if each["name"] == "forecast") == "skipped"


def terminal(folder: Path, *arguments: str, typed: bytes = b"", **more: Any) -> Seen:
    command = ["filter", "--limit", "1", *arguments]
    return in_terminal(folder, command, columns=1000, home=folder, typed=typed, **more)


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"\n", 1), (b"y\n", 0)])
def test_filter_asks_on_a_terminal_before_it_pays_for_nothing(
    answer: bytes, code: int, judge: JudgeServer, tmp_path: Path
) -> None:
    write(tmp_path, judge, **TRAINS)
    seen = terminal(tmp_path, typed=answer)
    assert NOTHING in seen.screen
    assert seen.screen.index(NOTHING) < seen.screen.index(QUESTION)
    assert seen.code == code
    assert (judge.calls > 0) is (code == 0)


@pytest.mark.slow
def test_an_interrupt_at_the_question_ends_the_command_and_pays_nothing(judge: JudgeServer, tmp_path: Path) -> None:
    write(tmp_path, judge, **TRAINS)
    seen = terminal(tmp_path, interrupted_at=b"anyway? [y/N]")
    assert seen.code == 1
    assert judge.calls == 0


USED = {
    **TRAINS,
    "sources": [{"path": "old.sqlite", "models": {"include": ["*"]}}],
    "training": {"inexact_prompts": "use"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "arguments", "piped"),
    [(TRAINS, ["--yes"], False), (TRAINS, ["--json"], False), (TRAINS, [], True), ({}, [], False), (USED, [], False)],
    ids=["yes", "json", "piped", "nothing is trained", "something can be used"],
)
def test_filter_does_not_ask(
    sections: dict[str, Any], arguments: list[str], piped: bool, judge: JudgeServer, tmp_path: Path
) -> None:
    write(tmp_path, judge, **sections)
    seen = terminal(tmp_path, *arguments, piped=piped, typed=b"n\n")
    assert (seen.code, QUESTION in seen.screen + seen.piped) == (0, False)
    assert not piped or NOTHING in seen.piped
    assert judge.calls > 0


DOCUMENT = r"""
astuner:
  # ...
  task_reader:
    # use tracing log as tasks
    type: tracing
    feedback_tracing:
      base_url: ./tutorial/example_feedback_tracing/database.sqlite
      train_output_path: ./tutorial/example_feedback_tracing/tasks.jsonl
      alien_llm_model: qwen3-235b-a22b-instruct-2507
      alien_llm_response_length: 2048
      filters:
        - type: llm_evaluate
          enabled: true
          params:
            custom_rubrics: |
              1. Check the answer and drop the task if it does not answer or answer is wrong.
              2. Consider a response is invalid if it does not wrap the final answer in \boxed{}.
            temperature: 0.5
            print_reason: false
            max_thread: 16
"""
"""The section that ASTuner's page on tracing-feedback training shows. It names AgentScope 1.0.7 with Studio 23eb7c0b,
which wrote the fixture `old`."""


async def planned(config: Config) -> RoundSpec:
    async with open_state(config.state_dir) as store:
        return await planned_round(store, config)


def test_astuners_page_leads_to_a_planned_round(flywheel: Run, judge: JudgeServer, tmp_path: Path) -> None:
    """With model and judge of one's own, and a gate for which a hundred replies are enough."""
    home = tmp_path / "tutorial" / "example_feedback_tracing"
    home.mkdir(parents=True)
    judge.verdict = lambda _, answer: answer in GOOD
    shutil.copy(DATA / "old.sqlite", home / "database.sqlite")
    path = home / "example_feedback_tracing.yaml"
    path.write_text(DOCUMENT)
    given = [
        f"astuner.model.path={base_model(tmp_path)}",
        f"judge.base_url={judge.base_url}",
        f"state.dir={tmp_path / 'state'}",
        "gate.min_tasks=8",
        "gate.min_power=0",
        "trigger.min_samples=16",
    ]

    def run(*command: str) -> Ran:
        ran = flywheel(*command, "-c", path, *(f"--set={each}" for each in given))
        assert ran.code == 0, ran.err
        return ran

    shown = told_settings(run("config", "show", "--json"))
    for key, value in (
        ("sources.0.models.include", ["*"]),
        ("training.inexact_prompts", "use"),
        ("rollout.tools.uncalled", "use"),
    ):
        assert shown[key] == (value, "AgentJet's default")
    usable = "96 tasks: 37 held out; of 59 for training 59 usable."
    assert usable in run("ingest").out
    told = run("filter", "--json").json
    assert (told["due"], told["forecast"]["usable"], told["undecided"]) == (96, 59, 0)
    assert told["accepted"] > 40
    spec = in_thread(planned(load(path, given)))
    lines = [json.loads(line) for line in (home / "tasks.jsonl").read_text().splitlines()]
    good = {each["task_id"] for each in lines if each["answer"] in GOOD and each["metadata"]["split"] == "train"}
    assert good == {task.task_id for task in spec.train}
    assert len(good) == run("ingest", "--json").json["forecast"]["usable"] > 16
    assert len(spec.held_out) >= 8
