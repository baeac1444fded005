"""Options of SAGE's classes in a Python file, which is parsed and never run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, Final

from flywheel.config.sage import SAGE
from flywheel.config.section import put
from flywheel.errors import ConfigError
from flywheel.system.files import read_given

CLASSES: Final = {
    "AgentSFTConfig": "sft_config.",
    "RLTrainingConfig": "rl_config.",
    "AgentRewardConfig": "reward_config.",
    "TrainingPipelineConfig": "",
}
"""SAGE's classes of options, and where a YAML file has these."""


class Expression(str):
    """The text of a value that only running a Python file would tell."""


def options_in(file: Path, attempted: str) -> dict[str, Any]:
    """The options in the calls of SAGE's classes, as a YAML file has them. Raises ConfigError."""
    try:
        nodes = [*ast.walk(ast.parse(read_given(file)))]
        named = [(ast.unparse(node.func).rpartition(".")[2], node) for node in nodes if isinstance(node, ast.Call)]
        calls = [(name, call) for name, call in named if name in CLASSES]
        sections = {CLASSES[name] for name, _ in calls}
        # A class is there without options, too; the one of the pipeline runs SFT unless it says otherwise.
        made: dict[str, Any] = {CLASSES[name][:-1] or "run_sft": {} if CLASSES[name] else True for name, _ in calls}
        for name, call in calls:
            for option in call.keywords:
                # A section of the pipeline is that of its class, called here or above.
                if f"{option.arg}." not in sections:
                    put(made, f"{CLASSES[name]}{option.arg or '**'}", _value_of(option.value))
        stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
        targets = [node.value if isinstance(node, ast.Subscript) else node for node in stored]
        options = {
            key.removeprefix(section).partition(".")[0]
            for section in sections
            for key in SAGE.names
            if key.startswith(section) and (section or "." not in key)
        }
        # Attributes of `self` are those of a class of the file.
        changed = [
            (node.lineno, ast.unparse(node))
            for node in targets
            if isinstance(node, ast.Attribute) and node.attr in options and ast.unparse(node.value) != "self"
        ]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = f"it cannot be read: {str(error) or 'it is nested too deep'}"
        raise ConfigError(attempted, why, "Name a file in Python or YAML.") from None
    if len({name for name, _ in calls}) != len(calls) or any(each.args for _, each in calls) or not calls:
        why = f"it has no calls of {', '.join(CLASSES)}, two of one, or options without their names"
        raise ConfigError(attempted, why, "Leave one call of each, with KEY=VALUE for each option.")
    for line, name in changed:
        why = f"line {line}: `{name}` is set after the call that has the option, and Python files are not run"
        raise ConfigError(attempted, why, "Write the value into the call, and remove the line.")
    return made


def _value_of(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return Expression(ast.unparse(node))
