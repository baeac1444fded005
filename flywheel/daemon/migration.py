"""What `flywheel migrate` makes of another program's file: its rows, and files for Flywheel with the same meaning.

Paths are written so that they mean the same from the folder of these files. Python files are parsed, and never run.
"""

from __future__ import annotations

import ast
import os
import pprint
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from flywheel.config import agentjet
from flywheel.config.file import Config, parse
from flywheel.config.foreign import Row, fit_engines, variable_of
from flywheel.config.interpolation import values_of
from flywheel.config.sage import ROOTS
from flywheel.config.section import GivenSetting, has, leaves, merged, put, value_at
from flywheel.config.translation import Translation, translate
from flywheel.config.trinity import EPOCHS, TRINITY
from flywheel.errors import ConfigError, ExportError
from flywheel.judge.filters.chain import entries_of
from flywheel.judge.filters.llm_evaluate import AGENTJET_CRITERIA, AGENTJET_TEMPERATURE, LlmEvaluate
from flywheel.judge.filters.python_filter import PythonFile
from flywheel.secrets import without_secrets
from flywheel.system.files import read_given, write_atomic
from flywheel.system.yaml_file import YamlDocument, read_yaml

SETTINGS: Final = "flywheel.yaml"
SCRIPT: Final = "tune.py"
CHAIN: Final = "filters/agentjet.yaml"
RUBRIC: Final = "rubrics/agentjet.yaml"
"""The files of AgentJet's filters, and of the rubric that is in them."""
CLASSES: Final[Mapping[str, str]] = {
    "AgentSFTConfig": "sft_config.",
    "RLTrainingConfig": "rl_config.",
    "AgentRewardConfig": "reward_config.",
    "TrainingPipelineConfig": "",
}
"""SAGE's classes of options, and where a YAML file has these."""
BACKBONE_COUNTS: Final = "`--backbone` counts"
TO_FILL_IN: Final = "a-model-to-fill-in"
"""Stands for a model that the file does not name, until the settings are written."""
PROGRAM: Final = '''"""A round of a Trinity-RFT file: `python tune.py WORKFLOW.py:FUNCTION [JUDGE.py:FUNCTION]`."""

import sys

from flywheel.tuner import tune

SETTINGS = {}

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    made = tune(sys.argv[1], SETTINGS, judge_func=sys.argv[2] if len(sys.argv) > 2 else None)
    print(made.adapter, made.is_better, made.reason)
'''


class _Dumper(yaml.SafeDumper):
    """Texts of several lines are written as they are."""


_Dumper.add_representer(
    str, lambda self, text: self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


class Expression(str):
    """The text of a value that only running a Python file would tell."""


@dataclass(frozen=True, slots=True)
class Migration:
    """What becomes of a file.

    Attributes:
        program: The program that it is of.
        rows: What becomes of each key, and what the program assumes.
        config: The settings in effect, as `-c FILE` has them; None where a row is refused, and for Trinity-RFT.
        files: Texts for `write`, by names in the folder. There are none where a row is refused, unless that is a
            model that is missing, whose line is to be filled in.
    """

    program: str
    rows: Sequence[Row]
    config: Config | None
    files: Mapping[str, str]


def migrated(file: Path, folder: Path, *, backbone: bool = False) -> Migration:
    """Translate a file, for a folder that is to get Flywheel's; both are absolute. Nothing is written. The file's
    `backbone` does not count with the `backbone` of AgentJet's command line. Raises ConfigError."""
    attempted, document = f"migrate {file}", None
    if file.suffix == ".py":
        raw: Any = _of_python(file, attempted)
    else:
        document = read_yaml(file, attempted, "Name a configuration of another program.", keys_once=True)
        raw = values_of(document, attempted)
    places = [place for root in ROOTS if has(raw, place := f"{root}.backbone")] if backbone else []
    over = [Row(place, value_at(raw, place), "without effect", why=BACKBONE_COUNTS) for place in places]
    for place in places:
        raw = GivenSetting(place, None).put_into(raw)
    if not isinstance(raw, Mapping) or not (found := translate(raw, file)).program:
        why = "it has no key of AgentJet, ASTuner, Trinity-RFT or SAGE"
        raise ConfigError(attempted, why, "Flywheel's own files are used with `-c FILE`.")
    rows = [*map(_known, found.rows), *over]
    refused = [row for row in rows if row.outcome == "refused"]
    if is_unfinished := [(row.use, row.value) for row in refused] == [("model.base", None)]:
        raw = merged(raw, {"model": {"base": TO_FILL_IN}})
        found = translate(raw, file)
    if refused and not is_unfinished:
        return Migration(found.program, rows, None, {})
    if found.page == TRINITY.page:
        return Migration(found.program, rows, None, {SCRIPT: _script(found)})
    config = parse(raw, str(file), file.parent, file=file, document=document)
    parts, more = _filters(raw, config, folder)
    files = dict(_files(found, {**found.rubrics, **parts}, config, folder))
    rows = [
        row._replace(outcome="replaced by", made=CHAIN) if row.use == "filter.chain" and parts else row
        for row in rows
    ]
    return Migration(found.program, [*rows, *more], None if is_unfinished else config, files)


def _of_python(file: Path, attempted: str) -> dict[str, Any]:
    """The options in the calls of SAGE's classes in a Python file, as a YAML file has them. Raises ConfigError."""
    try:
        nodes = [node for node in ast.walk(ast.parse(read_given(file))) if isinstance(node, ast.Call)]
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(attempted, f"it cannot be read: {error}", "Name a file in Python or YAML.") from None
    made, calls = dict[str, Any](), [(name, each) for each in nodes if (name := _class_of(each)) in CLASSES]
    if len({name for name, _ in calls}) != len(calls) or any(each.args for _, each in calls) or not calls:
        why = f"it has no calls of {', '.join(CLASSES)}, two of one, or options without their names"
        raise ConfigError(attempted, why, "Leave one call of each, with KEY=VALUE for each option.")
    # A class is there without options, too; the one of the pipeline runs SFT unless it says otherwise.
    made |= {CLASSES[name].removesuffix(".") or "run_sft": {} if CLASSES[name] else True for name, _ in calls}
    for name, call in calls:
        for option in call.keywords:
            if isinstance(option.value, ast.Call) and _class_of(option.value) in CLASSES:
                continue
            try:
                value = ast.literal_eval(option.value)
            except ValueError:
                value = Expression(ast.unparse(option.value))
            put(made, f"{CLASSES[name]}{option.arg or '**'}", value)
    return made


def _class_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _known(row: Row) -> Row:
    """The row; refused where Flywheel would need a value that it does not know."""
    if not row.sets or not isinstance(row.value, Expression):
        return row
    why = f"`{row.place}` is {row.value}, and Python files are not run"
    return row._replace(outcome="refused", made=None, why=why, hint="Write its value.")


def _files(found: Translation, parts: Mapping[str, Any], config: Config, folder: Path) -> Iterator[tuple[str, str]]:
    """The files: rubric and chain, which are `parts`, and last that of the settings."""
    settings, here = dict(found.settings_in(config.file)), config.model_dump(mode="json")
    # The name of a base model stays as it is written: what is not the same by a relative path gets an absolute one.
    for start in (folder, None):
        there = parse(settings, SETTINGS, folder).model_dump(mode="json")
        settings = _rebased(settings, there, here, start)
    if (read := value_at(settings, "rollout.agent.config")) is not None:
        # A workflow gets None for them in any case.
        put(settings, "rollout.agent.config", without_secrets(read))
    for name, content in parts.items():
        put(settings, "filter.chain" if name == CHAIN else "filter.rubric", name)
        yield name, _yaml(content)
    notes = {row.use: row.place or f"{found.program}'s default" for row in found.rows if row.sets}
    if config.model.base == TO_FILL_IN:
        put(settings, "model.base", None)
        notes["model.base"] = "FILL IN the model that is trained"
    yield SETTINGS, _yaml(settings, notes)


def _filters(raw: Mapping[str, Any], config: Config, folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """The chain of AgentJet's file and the rubric that is in it, by the names of their files, and the rows of what
    is in the filters."""
    if config.project is None or config.filter.chain != config.file:
        return {}, []
    parts, rows, chain = dict[str, Any](), list[Row](), agentjet.filters_in(raw)
    section = agentjet.section_in(raw)[0]
    for at, (given, (_, read)) in enumerate(zip(chain["filters"], entries_of(config), strict=True)):
        place, params = f"{section}.filters.{at}.params", given.get("params", {})
        key = params.get("api_key")
        params = {name: value for name, value in without_secrets(params).items() if value is not None}
        if isinstance(read, PythonFile):
            path = config.project.folder / Path(read.path).expanduser()
            params["path"] = _from(str(path), (folder / CHAIN).parent)
        if isinstance(read, LlmEvaluate) and read.custom_rubrics is not None:
            criteria = [*AGENTJET_CRITERIA] if read.builtin else []
            parts[RUBRIC] = {"id": chain["id"], "custom_rubrics": read.custom_rubrics, "criteria": criteria}
            text = f"{place}.custom_rubrics", read.custom_rubrics
            rows.append(Row(*text, "replaced by", "filter.rubric", RUBRIC))
            params = {name: value for name, value in params.items() if name not in ("custom_rubrics", "builtin")}
            if config.judge.temperature is None:
                params.setdefault("temperature", AGENTJET_TEMPERATURE)
        if key:
            name = variable_of(key) or params.get("api_key_env", "OPENAI_API_KEY")
            params["api_key_env"], why = name, f"files have no keys: ${name} is to have it"
            rows.append(Row(f"{place}.api_key", f"${name}", "replaced by", f"api_key_env in {CHAIN}", name, why))
        chain["filters"][at] = {**given, "params": params}
    return {**parts, CHAIN: chain}, rows


def _rebased(given: Any, there: Any, here: Any, folder: Path | None) -> Any:
    """The settings `given`, which mean `here`, with that in place of what means something else `there`; in the order
    of the documentation. Paths are relative to the `folder`, without one absolute."""
    if isinstance(here, Mapping) and isinstance(there, Mapping) and isinstance(given, Mapping | None):
        given = given or {}
        keys = [key for key in here if key in given or there.get(key) != here[key]]
        known = {key: _rebased(given.get(key), there.get(key), here[key], folder) for key in keys}
        return {**known, **{key: given[key] for key in given if key not in here}}
    if all(isinstance(each, list) and len(each) == len(here) for each in (given, there, here)):
        return [_rebased(*each, folder) for each in zip(given, there, here, strict=True)]
    return given if here == there else _from(here, folder) if isinstance(here, str) else here


def _from(path: str, folder: Path | None) -> str:
    """An absolute path as it is from a folder, if there is one; other texts as they are."""
    if folder is None or not Path(path).is_absolute():
        return path
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith(".") else f"./{relative}"


def _script(found: Translation) -> str:
    """The program of a file of Trinity-RFT. Its relative paths start at the working directory, and are absolute
    here."""
    made = merged({"train_dataset": {"total_epochs": EPOCHS}}, found.settings)
    fit_engines(made.setdefault("rollout", {}), found.rows, SCRIPT)
    for place, value in leaves(made):
        if place.endswith((".path", ".base")) and os.path.exists(str(value)):  # noqa: PTH110 - False for other names
            made = GivenSetting(place, str(Path(value).absolute())).put_into(made)
    return PROGRAM.replace("{}", pprint.pformat(made, width=100, sort_dicts=False), 1)


def _yaml(content: Any, notes: Mapping[str, str] | None = None) -> str:
    """A YAML text, with `notes` as comments behind the keys at these dotted paths."""
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    document, lines = YamlDocument(text), text.splitlines()
    places = [place for place, _ in leaves(content)]
    for key, note in (notes or {}).items():
        path = re.sub(r"^sources\.(?!\d)", "sources.0.", key)
        if any(f"{place}.".startswith(f"{path}.") for place in places):
            at = document.position([int(part) if part.isdecimal() else part for part in path.split(".")], key=True)
            lines[at.line - 1] += f" # {note}"
    return "\n".join(lines) + "\n"


def write(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write files into a folder: all of them, or none. Raises ExportError, also for one that is there.

    The last one appears when all others are there: until then, those of a process that was killed are no obstacle.
    """
    targets = {folder / name: text for name, text in files.items()}
    try:
        for path, text in targets.items():
            is_last = path.name in (SETTINGS, SCRIPT)
            if os.path.lexists(path) and (is_last or not path.is_file() or path.read_bytes() != text.encode()):
                raise ExportError(f"write {path}", "it exists", "Nothing was written: name another directory.")
        for path in targets:
            path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".migrate-", dir=folder) as made:
            for number, text in enumerate(files.values()):
                write_atomic(Path(made, str(number)), text.encode())
            for number, path in enumerate(targets):
                Path(made, str(number)).replace(path)
    except OSError as error:
        hint = "Nothing was written: name another directory."
        raise ExportError(f"write to {folder}", error.strerror or str(error), hint) from error
    return [*targets]
