"""What becomes of a command line of AgentJet, ASTuner or SAGE: Flywheel's command line, and a row for each option.

Options are names of tables as the keys of files are. `flywheel migrate` says what each becomes.
Nothing is read or run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Final

from flywheel.config.foreign import Made, Refusal, Row, Table, Without
from flywheel.config.sage import PPO, Option, rows_for, served
from flywheel.errors import ConfigError
from flywheel.secrets import REDACTED, without_secrets
from flywheel.system.yaml_file import yaml_value

COMMAND: Final = "flywheel"
"""In place of an option of Flywheel's: its command."""
LAUNCHER: Final = Table("migrate", {
    "backbone": Made(COMMAND, lambda values: "round --debug" if values["backbone"] == "debug" else "run"),
    "conf": "-c",
    "swarm-server swarm-overwatch": Refusal("for agents that run elsewhere", "Write the agent as a workflow."),
    "with-ray with-ray-cluster": Without("a round starts a Ray of its own, or uses that of `ray.address`"),
    "with-appworld with-bfcl with-crafters with-deepfinance with-exp-maker with-finworld with-webshop prefix":
        Without("no service of an environment is started: start it before the workflow asks it"),
    "with-logview": Without("`flywheel rollouts` shows rollouts, and `flywheel run --web` serves pages"),
    "exp-dir": Without("`state.dir` has the files of rounds"),
    "debug db bp breakpoint": Without("workflows run in processes of their own, which wait for no debugger"),
    "skip-check-avail-gpu": Without("no start waits for free GPUs; `flywheel doctor` looks at them"),
    "kill autokill": Without("nothing is ever killed by name: a round ends the processes that it started"),
    "reboot": Without("AgentJet does nothing with it either"),
}, refuses_close=True)  # fmt: skip
SAME: Final = "model sft-model base-model data benchmark output epochs beta num-samples metrics"
"""The options of SAGE's commands that Flywheel's have, too."""
AGENT: Final = Table("migrate", {
    "command": COMMAND,
    "config": "-c",
    **{name: f"--{name}" for name in SAME.split()},
    "ppo": Refusal(f"refused: {PPO}", "Use `flywheel train grpo`."),
    "algorithm": Without("it chooses the command"),
}, refuses_close=True)  # fmt: skip
LAUNCHED: Final[Mapping[str, str]] = {"backbone": "verl or trinity", "conf": ""}
"""What the launcher does without an option that Flywheel's line must have; empty where it does nothing."""
_TRAINING: Final = {"base-model": "Qwen/Qwen2.5-7B-Instruct", "data": "", "output": ""}
ASSUMED: Final[Mapping[str, Mapping[str, str]]] = {
    "train sft": _TRAINING, "train dpo": _TRAINING, "train grpo": _TRAINING, "train ppo": {},
    "evaluate": {"model": "", "benchmark": ""},
}  # fmt: skip
"""The same for each command of SAGE's."""
DATA_SET: Final = re.compile(r"[\w-]+:\w+")
"""A name and a split, as SAGE's registry of data has them."""
PROGRAM: Final = re.compile(r"(.*/)?(ajet|astuner|launcher\.py|sage-dev)|(ajet|astuner)(\.cli)?\.launcher")
SIGNS: Final = ";<>|&\n"
"""The characters of a shell that end a command, or send its output to a file."""
NO_WORD: Final = re.compile(
    rf"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?<![^\s{SIGNS}])(?:\#[^\n]*|\d+(?=[<>]))""", re.DOTALL
)
"""A comment, or the number of an output before `>`. The group has what is in quotes, where neither is one."""


@dataclass(frozen=True, slots=True)
class Translated:
    """What becomes of another program's command line."""

    program: str
    rows: list[Row]
    """Of each option, with its name as the place, and of what the program does without one, with an empty place.
    Flywheel's key is an option, or `COMMAND`."""
    lines: list[str]
    """Flywheel's, with a word in capitals for each value that is missing; none for a refused command."""
    file: Path | None
    """The configuration that it names."""

    @property
    def refused(self) -> list[Row]:
        return [row for row in self.rows if row.outcome == "refused"]


def data_set(name: str) -> str:
    """What to say of a data set of SAGE's (`agent_sft:train`) where a file is wanted; empty for other names, and if
    there is such a file."""
    is_one = DATA_SET.fullmatch(name) and not os.path.exists(name)  # noqa: PTH110 - False if it is too long
    return f"{name} is a data set of SAGE's, not a file" if is_one else ""


def translated(text: str, settings: Path | None = None) -> Translated:
    """What becomes of a command line as a shell has it, also behind other commands and variables. Flywheel's line
    names the file `settings`, if it is given, in place of the other program's configuration. Raises ConfigError for
    what is no command line of these programs."""
    attempted, hint = "translate a command line", "Write one as for a shell."
    lexer = shlex.shlex(NO_WORD.sub(r"\1", text.replace("\\\n", " ")), posix=True, punctuation_chars=SIGNS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        words = [*lexer]
    except ValueError as error:
        raise ConfigError(attempted, str(error), hint) from None
    # Neither is what is read from a file or written to one, with the name of the file.
    to_file = [set(word) <= {*SIGNS} and not {*"<>"}.isdisjoint(word) for word in ["", *words]]
    words = [word for at, word in enumerate(words) if not any(to_file[at : at + 2])]
    parts = [[*part] for _, part in groupby(words, lambda word: bool(word) and set(word) <= {*SIGNS})]
    found = [part[at:] for part in parts for at, word in enumerate(part) if PROGRAM.fullmatch(word)]
    if len(found) != 1:
        why = f"its programs are {len(found)} of ajet, astuner, launcher.py and sage-dev, not one"
        raise ConfigError(attempted, why, hint)
    return of_words(found[0][0], found[0][1:], settings)


def of_words(program: str, words: Sequence[str], settings: Path | None = None) -> Translated:
    """What becomes of the words of a command line behind its program."""
    name, table, typed = "SAGE", AGENT, [*takewhile(lambda word: not word.startswith("-"), words)]
    if not program.endswith("sage-dev"):
        name, table, typed = "ASTuner" if "astuner" in program else "AgentJet", LAUNCHER, []
    found = [*_options(words[len(typed) :])]
    given = {key: value for _, key, value in found}
    place = command = " ".join(typed[1:])
    if command == "train rl":
        command = f"train {given.get('algorithm', 'dpo')}"
    assumed = LAUNCHED if table is LAUNCHER else ASSUMED.get(command) if typed[:1] == ["agent"] else None
    if assumed is None:
        typed = ["sage-dev", *typed]
        why, hint = f"Flywheel has nothing like `{shlex.join(typed)}`", "It has `train sft|dpo|grpo` and `evaluate`."
        return Translated(name, [Row(shlex.join(typed), None, "refused", why=why, hint=hint)], [], None)
    if command:
        found.append((place, "ppo" if command == "train ppo" else "command", command))
    for key, value in assumed.items():
        # A base model is that of the adapter, or of the file, where one is named.
        if key not in given and not (key == "base-model" and {"sft-model", "config"} & given.keys()):
            found.append(("" if value else f"--{key}", key, value))
    of_class = _of_class(command, found) if "output" in assumed else []
    places = [row.place for row in of_class]
    rows = [_filled(row) for row in table.rows(each for each in found if each[0] not in places)]
    made = {row.use: row.made for row in rows if row.use}
    file = next((row.made for row in rows if row.use == "-c" and row.sets), None)
    if settings is not None and file is not None:
        made["-c"] = settings
    options = [str(each) for use in made if use != COMMAND for each in (use, made[use])]
    options += (each for row in of_class if row.sets for each in ("--set", f"{row.use}={json.dumps(row.made)}"))
    lines = [f"flywheel {made[COMMAND]} {shlex.join(options)}"] if COMMAND in made else []
    rows += of_class
    return Translated(name, rows, lines, Path(file) if file else None)


def _options(words: Sequence[str]) -> Iterator[Option]:
    """Each option as it is written, its name, and its value, which is True if it has none, and never a key. Any other
    word is an option without a value."""
    for before, word, after in zip(["=", *words], words, [*words[1:], "--"], strict=False):
        option, mark, value = word.partition("=")
        if word.startswith("--"):
            shown = without_secrets(value if mark else after.startswith("--") or after, option.replace("-", "_"))
            yield option, option[2:], REDACTED if shown is None else shown
        elif "=" in before or not before.startswith("--"):
            yield word, word, True


def _of_class(command: str, found: Sequence[Option]) -> list[Row]:
    """The rows of options of SAGE's class for a command that have no option of the same name here, as its file has
    them. Raises ConfigError for what is no value."""
    of, naming = "rl_config", ("", "rl_config.algorithm", command.split()[1])
    if command == "train sft":
        of, naming = "sft_config", ("", "run_sft", command)
    options = [
        (place, f"{of}.{key.replace('-', '_')}", yaml_value(str(value), f"use {place}", "Correct it."))
        for place, key, value in found
        if key not in AGENT.names and not AGENT.meant_by(key)
    ]
    rows = [*rows_for([naming, *options], {})]
    return [row for row in (*rows, *served(rows, {})) if row.place]


def _filled(row: Row) -> Row:
    """The row, refused where its value is missing or a data set, with a word to fill in."""
    is_data = row.use in ("--data", "--benchmark")
    why = f"`{row.place}` is missing" if row.made in ("", True) else data_set(row.made) if is_data else ""
    word = "FILE" if row.use == "-c" else row.use.lstrip("-").upper()
    return row._replace(outcome="refused", made=word, why=why, hint=f"Fill in {word}.") if why else row


def instead_of(words: Sequence[str]) -> str:
    """What to type instead of words behind `flywheel` that are of another program's command line."""
    found = of_words("ajet", words)
    if not words[0].startswith("-"):
        found = of_words("sage-dev", words if words[0] == "agent" else ["agent", *words])
    if not found.lines:
        return f"{found.refused[0].why}. {found.refused[0].hint}"
    return f"this is a command line of {found.program}. Use `{found.lines[0]}`."
