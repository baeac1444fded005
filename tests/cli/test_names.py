"""What people type first leads to what they meant: `-c` in both places, other names, hints, completion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flywheel.cli.app import ALIASES, COMMANDS, HINTS
from tests.cli.conftest import Run
from tests.factories.commands import root

COMMAND = Path(sys.executable).parent / "flywheel"


@pytest.fixture
def configs(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "one.yaml", tmp_path / "two.yaml"
    for path in paths:
        path.write_text(json.dumps({"sources": [], "state": {"dir": path.stem}}))
    return paths


def test_the_configuration_is_named_before_or_after_the_command(flywheel: Run, configs: tuple[Path, Path]) -> None:
    one, two = configs

    def state(*words: str | Path) -> str:
        return Path(flywheel(*words, "--json").json["state_dir"]).name

    assert state("-c", one, "status") == "one"
    assert state("--config", one, "status") == "one"
    assert state("status", "-c", one) == "one"
    assert state("-c", one, "status", "-c", two) == "two"
    assert flywheel("status").code == 78, "the one before is forgotten"
    # Groups have it in a third place.
    assert flywheel("-c", "missing.yaml", "tasks", "--json").code == 78
    assert flywheel("-c", one, "tasks", "--json").code == 0
    assert flywheel("-c", "missing.yaml", "config", "show").code == 78
    assert flywheel("-c", "missing.yaml", "dead-letters").code == 78


@pytest.mark.parametrize("alias", ALIASES)
def test_another_name_is_the_same_command(flywheel: Run, alias: str) -> None:
    def told(name: str) -> str:
        return flywheel(name, "--help").out.replace(f"flywheel {name} ", "flywheel NAME ")

    assert told(alias) == told(ALIASES[alias])
    assert f"The same as `{ALIASES[alias]}`." in flywheel("--help").out


def test_another_name_does_it(flywheel: Run, configs: tuple[Path, Path]) -> None:
    assert flywheel("judge", "-c", configs[0], "--json").json["judged"] == 0
    assert "explain nothing" in flywheel("explain", "nothing", "-c", configs[0]).err


def test_each_command_is_in_the_module_that_is_imported_for_it() -> None:
    commands = root().commands
    assert list(commands) == list(COMMANDS)
    for name, command in commands.items():
        [own, *_] = getattr(command, "commands", {}).values() or [command]
        assert own.callback is not None and own.callback.__module__ == f"flywheel.cli.{COMMANDS[name]}", name


def test_a_hint_names_a_command_that_is_there(flywheel: Run) -> None:
    group = root()
    options = {option for parameter in group.params for option in parameter.opts} | {"--help"}
    for word, hint in HINTS.items():
        assert word not in group.commands, f"{word} is a command"
        first, *rest = hint.split()
        assert first in group.commands or first in options, hint
        if rest and rest[0].islower() and hasattr(group.commands[first], "commands"):
            assert rest[0] in group.commands[first].commands, hint
    ran = flywheel("list")
    assert ran.code == 2
    assert "No such command 'list'. Use `flywheel tasks`." in ran.err
    for option in ("metrics", "watch"):
        assert f"Use `flywheel status --{option}`." in flywheel(option).err
        assert f"--{option}" in {name for parameter in group.commands["status"].params for name in parameter.opts}
    assert "Did you mean 'status'?" in flywheel("statsu").err
    assert "'nonsense'" in flywheel("nonsense").err


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("--conf x.yaml", "this is a command line of AgentJet. Use `flywheel run -c x.yaml`."),
        ("--conf=x.yaml --with-ray", "Use `flywheel run -c x.yaml`."),
        ("--backbone debug --conf x.yaml", "Use `flywheel round --debug -c x.yaml`."),
        ("--with-ray", "Use `flywheel run -c FILE`."),
        ("agent train sft --data d --output o", "this is a command line of SAGE. Use `flywheel train sft --base"),
        ("agent evaluate --model m", "Use `flywheel evaluate --model m --benchmark BENCHMARK`."),
        ("agent trian", "Flywheel has nothing like `sage-dev agent trian`. It has `train"),
        ("train ppo --data d", "`train ppo` is refused: PPO is no part of TRL's stable API"),
        ("agent train ppo", "Use `flywheel train grpo`."),
        ("train rl --data d --sft-model s --output o", "Use `flywheel train dpo --sft-model s --data d --output o`."),
        ("train sft --data agent_sft:train --output o", "agent_sft:train is a data set of SAGE's, not a file: name"),
    ],
)
def test_another_programs_command_line_is_answered_with_flywheels(flywheel: Run, typed: str, answer: str) -> None:
    ran = flywheel(*typed.split())
    assert (ran.code, ran.out) == (2, "")
    [error] = [line for line in ran.err.splitlines() if line.startswith(("Error: ", "Invalid value"))]
    assert answer in error


def test_flywheels_own_spellings_are_not_taken_for_another_programs(flywheel: Run) -> None:
    assert "No such option: --confg" in flywheel("--confg", "x").err
    assert "No such command 'agents'" in flywheel("agents").err
    assert "No such command 'ppos'" in flywheel("train", "ppos").err
    assert flywheel("--config", "missing.yaml", "tasks").code == 78


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str, tmp_path: Path) -> None:
    def completed(line: str) -> str:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": line}
        env = {
            **os.environ,
            "_FLYWHEEL_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            **words,
        }
        return subprocess.run(
            [COMMAND], env=env, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
        ).stdout

    assert {"status", "start"} & set(completed("flywheel stat").replace('"', " ").split()) == {"status"}
    assert "--split" in completed("flywheel export --spl")
    assert "trl-sft" in completed("flywheel export --format trl-s")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_printed_completion_works_in_bash(tmp_path: Path) -> None:
    script = 'eval "$(flywheel --show-completion)"; complete -p flywheel; COMP_WORDS=(flywheel rol); COMP_CWORD=1;'
    env = {**os.environ, "PATH": f"{COMMAND.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", f'{script} _flywheel_completion flywheel rol; echo "${{COMPREPLY[*]}}"'],
        env=env, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert set(done.stdout.splitlines()[-1].split()) == {"rollouts", "rollback"}, done.stderr


def test_the_format_of_the_log_is_an_option(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "flywheel.yaml").write_text("ajet: {model: {path: m}, feedback_tracing: {}, other: 1}\n")
    lines = flywheel("--log-format", "json", "status").err.splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(each["level"], each["logger"]) for each in told] == [("WARNING", "flywheel.config.foreign")]
    assert flywheel("--log-format", "xml", "status").code == 2
