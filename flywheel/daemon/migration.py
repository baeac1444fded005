"""What `flywheel migrate` makes of another program's file: its rows, and files for Flywheel with the same meaning.

Paths are written so that they mean the same from the folder of these files. Python files are parsed, and never run.
"""

from __future__ import annotations

import ast
import os
import pprint
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from flywheel.config import agentjet
from flywheel.config.file import Config, numbered, parse
from flywheel.config.foreign import Row, variable_of
from flywheel.config.interpolation import values_of
from flywheel.config.sage import ROOTS, SAGE
from flywheel.config.section import GivenSetting, has, leaves, merged, put, value_at
from flywheel.config.translation import Translation, translate
from flywheel.config.trinity import EPOCHS, TRINITY
from flywheel.errors import ConfigError, ExportError
from flywheel.judge.filters.chain import ONCE, entries_of
from flywheel.judge.filters.llm_evaluate import AGENTJET_CRITERIA, AGENTJET_TEMPERATURE, LlmEvaluate
from flywheel.judge.filters.python_filter import PythonFile
from flywheel.secrets import REDACTED, masked, without_secrets
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
WEBHOOK: Final = re.compile(r"notify\.\d+\.url")
"""A setting that may be a secret: whoever knows the address can send to it."""
VARIABLE: Final = re.compile(r"\$\{oc\.env:\s*(\w+)")
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
            model, or the tasks of a program, that is missing, whose line is to be filled in.
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
    replaced = [place for root in ROOTS if has(raw, place := f"{root}.backbone")] if backbone else []
    over = [Row(place, value_at(raw, place), "without effect", why=BACKBONE_COUNTS) for place in replaced]
    for place in replaced:
        raw = GivenSetting(place, None).put_into(raw)
    if not isinstance(raw, Mapping) or not (found := translate(raw, file, fits=False)).program:
        why = "it has no key of AgentJet, ASTuner, Trinity-RFT or SAGE"
        raise ConfigError(attempted, why, "Flywheel's own files are used with `-c FILE`.")
    written = None if document is None else document.value
    places = {numbered(row.use): row.place for row in found.rows if row.sets and row.place}
    secret = {row.place: row for row in _secrets(found.settings, written, places)}
    rows = [_as_written(_known(row), written) for row in found.rows if row.place not in secret]
    rows += [*secret.values(), *over]
    refused = [row for row in rows if row.outcome == "refused"]
    if found.page == TRINITY.page:
        missing = [row.use for row in refused if row.value is None]
        files = {SCRIPT: _script(found, missing)} if len(missing) == len(refused) else {}
        return Migration(found.program, rows, None, files)
    if is_unfinished := [(row.use, row.value) for row in refused] == [("model.base", None)]:
        raw = merged(raw, {"model": {"base": TO_FILL_IN}})
        found = translate(raw, file, fits=False)
    if refused and not is_unfinished:
        return Migration(found.program, rows, None, {})
    try:
        config = parse(raw, str(file), file.parent, file=file, document=document, found=found)
    except ConfigError as error:
        if (wrong := [_with_error(row, error) for row in rows]) == rows:
            raise
        return Migration(found.program, wrong, None, {})
    parts, more = _filters(raw, written, config, folder)
    if any(row.outcome == "refused" for row in more):
        return Migration(found.program, [*rows, *more], None, {})
    files = dict(_files(found, {**found.rubrics, **parts}, config, folder))
    rows = [
        row._replace(outcome="replaced by", made=CHAIN) if row.use == "filter.chain" and parts else row
        for row in rows
    ]
    return Migration(found.program, [*rows, *more], None if is_unfinished else config, files)


def _of_python(file: Path, attempted: str) -> dict[str, Any]:
    """The options in the calls of SAGE's classes in a Python file, as a YAML file has them. Raises ConfigError."""
    try:
        nodes = [*ast.walk(ast.parse(read_given(file)))]
        calls = [
            (name, node) for node in nodes if isinstance(node, ast.Call) and (name := _class_of(node)) in CLASSES
        ]
        found = [
            (f"{CLASSES[name]}{option.arg or '**'}", _value_of(option.value))
            for name, call in calls
            for option in call.keywords
            if not (isinstance(option.value, ast.Call) and _class_of(option.value) in CLASSES)
        ]
        changes = [each for each in nodes if isinstance(each, ast.Assign | ast.AugAssign | ast.AnnAssign)]
        changed = next((each for each in changes if _changes_option(each, {name for name, _ in calls})), None)
        text = ast.unparse(changed) if changed else ""
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = f"it cannot be read: {str(error) or 'it is nested too deep'}"
        raise ConfigError(attempted, why, "Name a file in Python or YAML.") from None
    if len({name for name, _ in calls}) != len(calls) or any(each.args for _, each in calls) or not calls:
        why = f"it has no calls of {', '.join(CLASSES)}, two of one, or options without their names"
        raise ConfigError(attempted, why, "Leave one call of each, with KEY=VALUE for each option.")
    if changed is not None:
        why = f"line {changed.lineno}: `{text}` changes an option after its call, and Python files are not run"
        raise ConfigError(attempted, why, "Write the value into the call, and remove the line.")
    made = dict[str, Any]()
    # A class is there without options, too; the one of the pipeline runs SFT unless it says otherwise.
    made |= {CLASSES[name].removesuffix(".") or "run_sft": {} if CLASSES[name] else True for name, _ in calls}
    for key, value in found:
        put(made, key, value)
    return made


def _value_of(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return Expression(ast.unparse(node))


def _changes_option(node: ast.Assign | ast.AugAssign | ast.AnnAssign, classes: Set[str]) -> bool:
    """Whether an assignment is to an attribute, or an item of one, that has the name of an option of these classes.
    Attributes of `self` are those of a class of the file."""
    options = {
        key.removeprefix(above).partition(".")[0]
        for above in (CLASSES[name] for name in classes)
        for key in SAGE.names
        if key.startswith(above) and (above or "." not in key)
    }
    for each in ast.walk(node):
        target = each.value if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store) else each
        is_set = target is not each or isinstance(getattr(each, "ctx", None), ast.Store)
        if is_set and isinstance(target, ast.Attribute) and target.attr in options:
            return ast.unparse(target.value) != "self"
    return False


def _class_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _known(row: Row) -> Row:
    """The row; refused where Flywheel would need a value that it does not know. What is written is not fitted to the
    machine where it is written, and the row says so."""
    if row.sets and row.use in ("rollout.engines", "rollout.tensor_parallel") and row.made != 1:
        return row._replace(why="it is written as it is, also if this machine has fewer GPUs")
    if not row.sets or not isinstance(row.value, Expression):
        return row
    why = f"`{row.place}` is {row.value}, and Python files are not run"
    return row._replace(outcome="refused", made=None, why=why, hint="Write its value.")


def _with_error(row: Row, error: ConfigError) -> Row:
    """The row; refused where the settings are wrong by its value."""
    problem = next((each for each in error.why.split("; ") if f"`{row.place}`" in each), "")
    if not (row.place and row.sets and problem):
        return row
    return row._replace(outcome="refused", made=None, why=problem, hint="Correct it.")


def _at(written: Any, place: str) -> Any:
    """What a file has at a path or, where that is an interpolation, above it; None if it has nothing."""
    for part in place.split("."):
        if isinstance(written, str):
            break
        if isinstance(written, list):
            written = written[int(part)] if part.isdecimal() and int(part) < len(written) else None
        else:
            written = written.get(part) if isinstance(written, Mapping) else None
    return written


def _as_written(row: Row, written: Any) -> Row:
    """The row; that of a key that sets nothing has no value that a variable fills in, but its name."""
    value = without_secrets(_at(written, row.place), row.place.rpartition(".")[2])
    return row if row.sets or value is None or "${" not in str(value) else row._replace(value=value)


def _secrets(settings: Any, written: Any, places: Mapping[str, str], above: str = "") -> Iterator[Row]:
    """Refused rows for settings that are or have a key or a password, whose `places` in the file are not the same. A
    variable of such a value is named in the row."""
    for key, value in settings.items() if isinstance(settings, Mapping) else enumerate(settings):
        if (path := f"{above}{key}") == "rollout.agent.config":
            # A workflow gets None for them in any case.
            continue
        is_list = isinstance(value, list) and not all(isinstance(each, str) for each in value)
        if isinstance(value, Mapping) or is_list:
            yield from _secrets(value, written, places, f"{path}.")
            continue
        place = places.get(path, path)
        raw = str(_at(written, place))
        is_webhook = WEBHOOK.fullmatch(path) is not None
        is_secret = without_secrets(value, str(key)) != value or masked(value) != value
        if isinstance(value, str | list) and (is_secret or (is_webhook and "${" in raw)):
            names = ", ".join(f"${name}" for name in VARIABLE.findall(raw))
            why = f"`{place}` has a key or a password, and such are not written"
            key_of_name = "`url_env`" if is_webhook else "a key that ends in `_env`"
            hint = f"Name its variable in {key_of_name}, or remove it here and add it to what is written."
            yield Row(place, names or REDACTED, "refused", why=why, hint=hint)


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
    if isinstance(notices := settings.get("notify"), list):
        # YAML 1.1 takes the key for true.
        settings["notify"] = [{"on" if key is True else key: each[key] for key in each} for each in notices]
    for name, content in parts.items():
        put(settings, "filter.chain" if name == CHAIN else "filter.rubric", name)
        yield name, _yaml(content)
    notes = {row.use: row.place or f"{found.program}'s default" for row in found.rows if row.sets}
    if config.model.base == TO_FILL_IN:
        put(settings, "model.base", None)
        notes["model.base"] = "FILL IN the model that is trained"
    yield SETTINGS, _yaml(settings, notes)


def _filters(raw: Mapping[str, Any], written: Any, config: Config, folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """The chain of AgentJet's file and the rubric that is in it, by the names of their files, and the rows of what
    is in the filters. The file has `written`, before it was resolved."""
    if config.project is None or config.filter.chain != config.file:
        return {}, []
    parts, rows, chain = dict[str, Any](), list[Row](), agentjet.filters_in(raw)
    section = agentjet.section_in(raw)[0]
    for at, (given, (_, read)) in enumerate(zip(chain["filters"], entries_of(config), strict=True)):
        place, params = f"{section}.filters.{at}.params", given.get("params", {})
        key, kind = params.get("api_key"), given["type"]
        before = [each["type"] for each in chain["filters"][:at] if each.get("enabled", True)]
        if read is not None and kind in ONCE and kind in before:
            of = f"{section}.filters.{at}.type"
            rows.append(Row(of, kind, "refused", why=f"`{of}`: {kind} is there already", hint="Remove one of them."))
        params = {name: value for name, value in params.items() if name != "api_key" and value is not None}
        rows += _secrets(params, written, {}, f"{place}.")
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
            named = VARIABLE.findall(str(_at(written, f"{place}.api_key")))
            same = [name for name in named if os.environ.get(name) == key]
            name = same[0] if same else variable_of(key) or params.get("api_key_env", "OPENAI_API_KEY")
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


def _script(found: Translation, missing: Sequence[str]) -> str:
    """The program of a file of Trinity-RFT, with a line for each setting that is `missing`. Its relative paths start
    at the working directory, and are absolute here."""
    made = merged({"train_dataset": {"total_epochs": EPOCHS}}, found.settings)
    for place, value in leaves(made):
        if place.endswith((".path", ".base")) and os.path.exists(str(value)):  # noqa: PTH110 - False for other names
            made = GivenSetting(place, str(Path(value).absolute())).put_into(made)
    lines = list[str]()
    for section, _, key in (each.partition(".") for each in missing):
        made.setdefault(section, {})
        lines.append(f'\nSETTINGS["{section}"]["{key}"] = None  # FILL IN')
    return PROGRAM.replace("{}", pprint.pformat(made, width=100, sort_dicts=False) + "".join(lines), 1)


def _yaml(content: Any, notes: Mapping[str, str] | None = None) -> str:
    """A YAML text, with `notes` as comments behind the keys at these dotted paths."""
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    document, lines = YamlDocument(text), text.splitlines()
    places = [place for place, _ in leaves(content)]
    for key, note in (notes or {}).items():
        path = numbered(key)
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
