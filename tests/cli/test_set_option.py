"""`--set KEY=VALUE`: single settings of the command line, above those of the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.daemon.rounds.workers import works
from tests.factories.commands import root
from tests.factories.config import told_settings, write_yaml


def ajet(model: dict[str, Any]) -> dict[str, Any]:
    """A configuration of AgentJet."""
    reader = {"feedback_tracing": {"base_url": "a.sqlite", "filters": [{"type": "rules"}]}}
    rollout = {"temperature": 0.9, "mine": {"depth": 1}}
    return {"ajet": {"model": model, "rollout": rollout, "task_reader": reader}}


def commands(group: Any, name: str = "flywheel") -> Iterator[tuple[str, Any]]:
    yield name, group
    for word, inner in getattr(group, "commands", {}).items():
        yield from commands(inner, f"{name} {word}")


def test_every_command_with_a_configuration_takes_settings() -> None:
    found = {name: {option for each in command.params for option in each.opts} for name, command in
             commands(root())}  # fmt: skip
    assert {name for name, options in found.items() if "--config" in options} == {
        name for name, options in found.items() if "--set" in options
    }
    assert {"flywheel", "flywheel run", "flywheel tasks release", "flywheel train sft"} <= found.keys()


def test_a_setting_goes_above_the_file_and_is_named_as_the_origin(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "flywheel.yaml").write_text(
        "judge: {model: of-the-file, max_thread: 3}\nsources: [{path: a.sqlite}, {type: jsonl, path: b.jsonl}]\n"
    )
    given = ("--set", "judge.model=given", "--set", "sources.1.path=c.jsonl", "--set", "training.stages=[sft, grpo]")
    found = told_settings(flywheel("config", "show", "--json", *given))
    assert found["judge.model"] == ("given", "--set")
    assert found["sources.1.path"] == (str(tmp_path / "c.jsonl"), "--set")
    assert found["training.stages"] == (["sft", "grpo"], "--set")
    assert found["judge.max_thread"] == (3, "given")
    assert found["sources.0.path"] == (str(tmp_path / "a.sqlite"), "given")
    assert found["sources.1.type"] == ("jsonl", "given")
    stages = [{"sft": {"epochs": 2}}, "sft"], [{"sft": {"samples": 9, "epochs": 1}}]
    for given, shown in (("[{sft: {epochs: 2}}, sft]", stages[0]), ("[{sft: {samples: 9, epochs: 1}}]", stages[1])):
        found = told_settings(flywheel("config", "show", "--json", "--set", f"training.stages={given}"))
        assert found["training.stages"] == (shown, "--set"), "what a stage does not set is no default of its own"


def test_it_stands_before_or_after_the_command_and_needs_no_file(flywheel: Run) -> None:
    ran = flywheel("--set", "judge.model=first", "--set", "judge.max_thread=2", "config", "show", "--json", "--set",
                   "judge.model=second")  # fmt: skip
    found = told_settings(ran)
    assert (found["judge.model"], found["judge.max_thread"]) == (("second", "--set"), (2, "--set"))
    found = told_settings(flywheel("config", "show", "--json"))
    assert found["judge.max_thread"] == (16, "default"), "those of another command line are forgotten"


def test_keys_of_another_program_are_set_before_they_are_translated(flywheel: Run, tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "ajet.yaml", ajet({"path": "of/the-author"}))
    given = ("ajet.model.path=of/the-author", "judge.base_url=http://127.0.0.1:9/v1", "ajet.rollout.mine.depth=2")
    ran = flywheel("config", "show", "--json", "-c", file, *(f"--set={each}" for each in given))
    found = told_settings(ran)
    assert found["model.base"] == ("of/the-author", "--set")
    assert found["judge.base_url"] == ("http://127.0.0.1:9/v1", "--set")
    assert found["rollout.temperature"] == (0.9, "ajet.rollout.temperature")
    assert found["judge.model"] == (None, "default")
    ran = flywheel("config", "show", "--json", "-c", write_yaml(file, ajet({})), "--set=ajet.model.path=other/one")
    assert told_settings(ran)["model.base"] == ("other/one", "--set"), "also where the file has none"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("judge.max_threads=3", "unknown key `judge.max_threads` (did you mean `max_thread`?)"),
        ("judgement.model=3", "unknown key `judgement`"),
        ("judge.max_thread=many", "`judge.max_thread`: it must be a whole number"),
        ("judge.model=[1", "its value is not YAML"),
        ("judge.model", "it has no ="),
        ("=3", "it has no key"),
        ("sources.1.path=b", "`1` stands where a list of 1 item is"),
        ("judge.model.name=b", "`name` stands below a value"),
    ],
)
def test_what_is_wrong_names_the_setting(flywheel: Run, tmp_path: Path, given: str, why: str) -> None:
    (tmp_path / "flywheel.yaml").write_text("judge:\n  model: j\nsources:\n  - path: a.sqlite\n")
    ran = flywheel("config", "show", "--set", given)
    assert ran.code == 78
    assert why in ran.err
    assert f"--set {given.partition('=')[0]}" in ran.err
    assert "line 1:" not in ran.err, "the file is not to blame"


def test_without_a_file_and_in_training_by_hand_and_the_doctor_as_well(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("")
    train = ("train", "dpo", "--data", "pairs.jsonl", "--base-model", "m", "--output", "made")
    for command, given, why in (
        (
            ("config", "show"),
            "judge.max_threads",
            "cannot use configuration without a file with --set judge.max_threads",
        ),
        (train, "training.sed", "--set training.sed: unknown key `training.sed` (did you mean `seed`?)"),
        (("doctor",), "judge.modle", "unknown key `judge.modle`"),
    ):
        ran = flywheel(*command, "--set", f"{given}=1")
        assert (ran.code, why in " ".join((ran.out + ran.err).split())) == (78, True), ran


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("ajet.model.pth=x", "model.base"),
        ("astuner.model.path=x", "model.base"),
        ("ajet.task_reader.feedback_tracing.base_ulr=x", "sources[].path"),
        ("feedback_tracing.alien_llm_model=x", "judge.model"),
        ("ajet.rollout.numrepeat=4", "training.group_size"),
        ("ajet.dpo_config.betta=1", "training.dpo.beta"),
        ("buffer.batch_size=3", "training.prompts_per_step"),
        ("ajet.rollout.name=vllm", ""),
        ("ajet.task_reader.feedback_tracing.filters.0.type=pii", "filter.chain"),
    ],
)
def test_a_key_of_another_program_without_effect_is_an_error_that_names_ours(
    flywheel: Run, tmp_path: Path, given: str, ours: str
) -> None:
    file = write_yaml(tmp_path / "ajet.yaml", ajet({"path": "of/the-author"}))
    flywheel("config", "show", "-c", file, "--set", given).fails(
        78, ours, f"cannot use --set {given.partition('=')[0]}: "
    )


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("ajet.model.path=x", "model.base"),
        ("astuner.trainer_common.optim.lr=1", "training.learning_rate"),
        ("feedback_tracing.base_url=a.sqlite", "sources[].path"),
        ("buffer.batch_size=3", "training.prompts_per_step"),
        ("explorer.max_timeout=9", "rollout.agent_timeout_seconds"),
    ],
)
def test_a_file_of_our_own_takes_no_key_of_another_program(
    flywheel: Run, tmp_path: Path, given: str, ours: str
) -> None:
    (tmp_path / "flywheel.yaml").write_text("judge: {model: j}\n")
    flywheel("config", "show", "--set", given).fails(78, f"is {ours}. See")


def test_what_it_sets_is_known_by_every_name_that_the_file_may_use(flywheel: Run, tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "ajet.yaml", ajet({"path": "of/the-author"}))
    given = ("ajet.task_reader.feedback_tracing.base_url=b.sqlite", "ajet.trainer_common.kl_loss_coef=0.5",
             "ajet.rollout.multi_turn={max_steps: 3}", "ajet.dpo_config.beta=0.3")  # fmt: skip
    found = told_settings(flywheel("config", "show", "--json", "-c", file, *(f"--set={each}" for each in given)))
    assert found["sources.0.path"] == (str(tmp_path / "b.sqlite"), "--set")
    assert found["training.beta"] == (0.5, "--set")
    assert found["rollout.max_turns"] == (3, "--set")
    assert found["training.dpo.beta"] == (0.3, "--set")
    assert found["rollout.temperature"] == (0.9, "ajet.rollout.temperature")


def test_a_key_without_effect_is_an_error_also_where_a_workflow_gets_the_whole_file(
    flywheel: Run, tmp_path: Path
) -> None:
    whole = ajet({"path": "m"})
    whole["ajet"]["rollout"]["user_workflow"] = "agents.sums->Sums"
    flywheel(
        "config", "show", "-c", write_yaml(tmp_path / "a.yaml", whole), "--set", "ajet.rollout.numrepeat=4"
    ).fails(78, "Flywheel does not use this key")


def test_the_rest_of_a_wrong_file_keeps_its_lines(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "flywheel.yaml").write_text("judge:\n  model: j\ntrigger:\n  min_samples: many\n")
    ran = flywheel("config", "show", "--set", "judge.max_thread=0")
    assert "with --set judge.max_thread: `judge.max_thread`: it must be above 0" in ran.err
    assert "; line 4: `trigger.min_samples`" in ran.err


@pytest.mark.slow
def test_a_round_has_the_settings(
    flywheel: Run, due_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works(tmp_path, monkeypatch, "exit 1")
    flywheel("run", "--once", "-c", due_config(), "--set", "training.steps=7")
    spec = json.loads((tmp_path / "state" / "rounds" / "r0001" / "spec.json").read_text())
    assert spec["settings"]["training"]["steps"] == 7
