"""Command lines of AgentJet's launcher and of SAGE: what each option becomes, and Flywheel's line."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.command_lines import AGENT, ASSUMED, LAUNCHER, Translated, data_set, translated
from flywheel.errors import ConfigError
from flywheel.secrets import REDACTED
from tests.factories.commands import root

SFT = """sage-dev agent train sft \\
    --base-model Qwen/Qwen3-4B --data d --output ./output/agent_sft_v1 --epochs 3 \\
    --task-weights '{"tool_selection": 0.35, "planning": 0.30}'"""
DPO = "sage-dev agent train dpo --sft-model ./sft --data d.jsonl --output ./dpo --beta 0.1 --num-samples 4"
LINES = {
    "ajet --conf tutorial/a.yaml --backbone='trinity' --with-ray": "run -c tutorial/a.yaml",
    "astuner --conf=a.yaml --backbone verl": "run -c a.yaml",
    "ajet --conf a.yaml": "run -c a.yaml",
    "ajet --conf 'my file.yaml' --backbone=debug": "round --debug -c 'my file.yaml'",
    "python -m ajet.cli.launcher --backbone debug --conf a.yaml": "round --debug -c a.yaml",
    "clear && X=1 python launcher.py --with-logview --conf a.yaml > log 2>&1 | tee b": "run -c a.yaml",
    "sage-dev agent train sft --base-model m \\\n  --data d.jsonl --output ./sft --epochs 3":
        "train sft --base-model m --data d.jsonl --output ./sft --epochs 3",
    DPO: DPO.removeprefix("sage-dev agent "),
    "sage-dev agent train rl --algorithm grpo --sft-model s --data d --output o":
        "train grpo --sft-model s --data d --output o",
    "sage-dev agent train rl --sft-model s --data d --output o": "train dpo --sft-model s --data d --output o",
    "sage-dev agent train sft --data d --output o":
        "train sft --base-model Qwen/Qwen2.5-7B-Instruct --data d --output o",
    "sage-dev agent train sft --config y.yaml --data d --output o": "train sft -c y.yaml --data d --output o",
    "sage-dev agent evaluate --model ./dpo --benchmark b.jsonl --metrics tool_accuracy,plan_success,efficiency":
        "evaluate --model ./dpo --benchmark b.jsonl --metrics tool_accuracy,plan_success,efficiency",
}  # fmt: skip
REFUSED = {
    "ajet --backbone debug": ("`--conf` is missing. Fill in FILE.", "round --debug -c FILE"),
    "ajet --conf": ("`--conf` is missing. Fill in FILE.", "run -c FILE"),
    "ajet --kill='python|ray|vllm'": ("`--conf` is missing. Fill in FILE.", "run -c FILE"),
    "sage-dev agent train sft --data d --output o --config": (
        "`--config` is missing. Fill in FILE.",
        "train sft -c FILE --data d --output o",
    ),
    "ajet --conf a --swarm-server": ("`--swarm-server` is for agents that run elsewhere. Write", "run -c a"),
    "ajet --conf a --backbonne debug": (
        "unknown key `--backbonne` (did you mean `backbone`?). Correct it",
        "run -c a",
    ),
    "sage-dev agent train sft --data agent_sft:train --base-model m --output o": (
        "agent_sft:train is a data set of SAGE's, not a file. Fill in DATA.",
        "train sft --base-model m --data DATA --output o",
    ),
    "sage-dev agent train sft --base-model m --data d --output o --epoch 3": (
        "unknown key `--epoch` (did you mean `epochs`?). Correct it.",
        "train sft --base-model m --data d --output o",
    ),
    "sage-dev agent evaluate --model m --benchmark agent_benchmark:test": (
        "agent_benchmark:test is a data set of SAGE's, not a file. Fill in BENCHMARK.",
        "evaluate --model m --benchmark BENCHMARK",
    ),
    "sage-dev agent train ppo --data d": ("`train ppo` is refused: PPO is no part of TRL's stable API", None),
    "sage-dev agent train rl --algorithm ppo": ("`train rl` is refused: PPO is no part of TRL's stable API", None),
    "sage-dev agent train cpt": ("Flywheel has nothing like `sage-dev agent train cpt`. It has `train", None),
    "sage-dev agent": ("Flywheel has nothing like `sage-dev agent`. It has `train sft", None),
    "sage-dev data list": ("Flywheel has nothing like `sage-dev data list`. It has", None),
}
WITHOUT = {
    "--autokill": "nothing is ever killed by name",
    "--kill 'ray|vllm'": "nothing is ever killed by name",
    "--with-ray": "a round starts a Ray of its own",
    "--with-appworld": "start it before the workflow asks it",
    "--other x": "Flywheel has nothing like it",
}


def lines_of(found: Translated) -> str | None:
    assert len(found.lines) <= 1
    return found.lines[0].removeprefix("flywheel ") if found.lines else None


@pytest.mark.parametrize("text", LINES)
def test_a_command_line_becomes_flywheels(text: str) -> None:
    found = translated(text)
    assert (lines_of(found), found.refused) == (LINES[text], [])
    assert not [row for row in found.rows if "nothing like it" in row.why]
    words = shlex.split(LINES[text])
    assert found.file == (Path(words[words.index("-c") + 1]) if "-c" in words else None)
    assert found.program == ("SAGE" if "sage" in text else "ASTuner" if "astuner" in text else "AgentJet")


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_or_missing_has_its_reason_and_a_line_to_fill_in(text: str) -> None:
    found, (said, line) = translated(text), REFUSED[text]
    assert f"{found.refused[0].why}. {found.refused[0].hint}".startswith(said)
    assert lines_of(found) == line
    assert found.file == (Path("a") if "--conf a" in text else None)


SHELL = {
    "ajet --conf a.yaml; echo": "run -c a.yaml",
    "ajet --conf a.yaml&": "run -c a.yaml",
    "cd x&&ajet --conf a.yaml>log 2>&1|tee log": "run -c a.yaml",
    "ajet --backbone debug 2>/dev/null --conf=b.yaml; ls": "round --debug -c b.yaml",
    "# ajet --kill='python|ray'  (don't forget)\najet --conf a.yaml # --backbone debug\necho done": "run -c a.yaml",
    "ajet --conf a#b.yaml": "run -c 'a#b.yaml'",
    "ajet --conf 'a # b;c.yaml'": "run -c 'a # b;c.yaml'",
    'ajet --conf "a # it\'s > b.yaml"': """run -c 'a # it'"'"'s > b.yaml'""",
    "ajet --conf a\\ b.yaml": "run -c 'a b.yaml'",
    "ajet --conf $(pwd)/a.yaml": "run -c '$(pwd)/a.yaml'",
}


@pytest.mark.parametrize("text", SHELL)
def test_words_are_those_of_a_shell(text: str) -> None:
    found = translated(text)
    assert lines_of(found) == SHELL[text]
    assert {row.place for row in found.rows} <= {"--conf", "--backbone", ""}


@pytest.mark.parametrize("option", WITHOUT)
def test_an_option_without_effect_has_its_reason(option: str) -> None:
    found = translated(f"ajet --conf a {option} --backbone debug")
    [row] = [row for row in found.rows if row.outcome == "without effect"]
    assert row.place == option.partition(" ")[0]
    assert WITHOUT[option] in row.why
    assert lines_of(found) == "round --debug -c a"


def test_other_options_are_settings_as_in_a_file_of_sage() -> None:
    options = "--lora-r 128 --batch-size 4 --optim adamw --use-dora --lr_scheduler=cosine --lora-alhpa 2"
    found = translated(f"sage-dev agent train sft --data d --output o {options}")
    assert (lines_of(found) or "").endswith(
        "--output o --set training.lora.r=128 --set training.sft.batch_size=64 "
        """--set 'training.sft.scheduler="cosine"' --set serving.max_lora_rank=128"""
    )
    rows = {row.place: (row.outcome, row.why) for row in found.rows if row.outcome in ("refused", "without effect")}
    assert rows == {
        "--optim": ("without effect", "adapter and optimizer are float32, and small"),
        "--use-dora": ("refused", "`--use-dora` is True: vLLM cannot serve DoRA"),
        "--lora-alhpa": ("refused", "unknown key `--lora-alhpa` (did you mean `sft_config.lora_alpha`?)"),
    }
    found = translated("sage-dev agent train grpo --sft-model s --data d --output o --learning-rate 2.0e-5")
    assert (lines_of(found) or "").endswith(" --output o --set training.learning_rate=2e-05")


def test_classes_of_sage_are_printed_with_the_nearest_and_not_written() -> None:
    found = translated(SFT)
    [row] = found.refused
    assert row.why == "`--task-weights`: classes of SAGE are found by words, and those here by structure"
    assert row.hint == "The nearest are `training.task_weights: {one_tool: 0.35, several_tools: 0.3}`."
    assert (
        lines_of(found) == "train sft --base-model Qwen/Qwen3-4B --data d --output ./output/agent_sft_v1 --epochs 3"
    )


def test_each_line_has_a_command_and_options_that_flywheel_has() -> None:
    for line in LINES.values():
        command, words = root(), shlex.split(line)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        _, rest, _ = command.make_parser(command.context_class(command)).parse_args(words)
        assert rest == [], line


def test_a_key_is_in_no_row() -> None:
    key = "sk-" + "0123456789abcdef" * 2
    for option in (f"--api-key {key}", f"--api-key={key}", "--hf-token short-one", f"--other {key}"):
        found = translated(f"ajet --conf a {option}")
        assert [row.value for row in found.rows if row.outcome == "without effect"] == [REDACTED]


def test_a_file_with_the_name_of_a_data_set_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert data_set("agent_sft:train")
    assert not data_set("n" * 999 + ".jsonl")
    Path("agent_sft:train").touch()
    assert not data_set("agent_sft:train")


@pytest.mark.parametrize("text", ["", "trinity run --config x", "ajet 'open", "ajet --kill ray\najet --conf a"])
def test_what_is_not_one_command_line_of_these_programs_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot translate a command line: .*Write one as for a shell\.$"):
        translated(text)


NAMES = sorted({*LAUNCHER.names, *AGENT.names})
WORDS = st.one_of(
    st.sampled_from([*(f"--{name}" for name in NAMES), "agent", "train", "rl", "evaluate", "", "--", "=", "a:b"]),
    st.builds("--{}={}".format, st.sampled_from(NAMES), st.text(max_size=5)),
    st.text(max_size=5),
)


@given(
    st.sampled_from(["ajet", "sage-dev", *(f"sage-dev agent {name}" for name in ASSUMED)]),
    st.lists(WORDS, max_size=8),
)
def test_any_words_are_rows_with_reasons_and_a_line_or_a_refusal(program: str, words: list[str]) -> None:
    try:
        found = translated(f"{program} {shlex.join(words)}")
    except ConfigError as error:
        assert error.hint
        return
    assert found.lines or found.refused
    assert all(row.why and row.hint for row in found.refused)
    assert all(row.why for row in found.rows if row.outcome == "without effect")
    for line in found.lines:
        assert shlex.split(line)[0] == "flywheel"


@given(st.text())
def test_any_text_is_translated_or_an_error(text: str) -> None:
    for given_text in (text, f"ajet {text}", f"sage-dev agent train sft {text}"):
        try:
            translated(given_text)
        except ConfigError as error:
            assert error.hint
