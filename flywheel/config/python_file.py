"""Options of SAGE's classes in a Python file, which is parsed and never run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, Final

from flywheel.config.sage import SAGE
from flywheel.config.section import put
from flywheel.errors import ConfigError
from flywheel.secrets import REDACTED, without_secrets
from flywheel.system.files import read_given

CLASSES: Final = {
    "AgentSFTConfig": "sft_config.",
    "RLTrainingConfig": "rl_config.",
    "AgentRewardConfig": "reward_config.",
    "TrainingPipelineConfig": "",
}
"""SAGE's classes of options, and where a YAML file has these."""


class Expression(str):
    """The text of a value that only running a Python file would tell, without keys and passwords in it."""


class _WithoutSecrets(ast.NodeTransformer):
    """Hides constants that are secrets by their value, or by the name of their keyword or key."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        return ast.keyword(node.arg, _WithoutSecrets(node.arg or "").visit(node.value))

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        names = [key.value if isinstance(key, ast.Constant) else "" for key in node.keys]
        values = [_WithoutSecrets(str(name)).visit(each) for name, each in zip(names, node.values, strict=True)]
        return ast.Dict(node.keys, values)

    def visit_Call(self, node: ast.expr) -> ast.AST:
        # What a function or a mapping gets is not what it returns.
        return _WithoutSecrets("").generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return self.visit_Call(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return node if without_secrets(node.value, self._name) is node.value else ast.Constant(REDACTED)


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
                    put(made, f"{CLASSES[name]}{option.arg or '**'}", _value_of(option))
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


def _value_of(option: ast.keyword) -> Any:
    try:
        return ast.literal_eval(option.value)
    except (ValueError, TypeError):
        return Expression(ast.unparse(_WithoutSecrets("").visit_keyword(option).value))
