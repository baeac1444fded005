"""What `flywheel migrate` makes of another program's file or command line: its rows, and files for Flywheel with the
same meaning.

Paths are written so that they mean the same from the folder of these files.
"""

from __future__ import annotations

import os
import pprint
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from flywheel.config import agentjet
from flywheel.config.command_lines import Translated, translated
from flywheel.config.file import Config, numbered, parse
from flywheel.config.foreign import Row, variable_of
from flywheel.config.interpolation import mapped, values_of
from flywheel.config.python_file import Expression, options_in
from flywheel.config.sage import ROOTS
from flywheel.config.section import GivenSetting, leaves, merged, put, value_at
from flywheel.config.translation import TUNER, Translation, translate
from flywheel.config.trinity import EPOCHS
from flywheel.daemon.forecast import Forecast, forecast_of_sources
from flywheel.errors import ConfigError, ExportError
from flywheel.judge.filters.chain import entries_of
from flywheel.judge.filters.llm_evaluate import AGENTJET_CRITERIA, AGENTJET_TEMPERATURE, LlmEvaluate
from flywheel.judge.filters.python_filter import PythonFile
from flywheel.secrets import REDACTED, masked, without_secrets
from flywheel.system.files import expanded, tidied, write_atomic
from flywheel.system.yaml_file import YamlDocument, read_yaml

SETTINGS: Final = "flywheel.yaml"
SCRIPT: Final = "tune.py"
CHAIN: Final = "filters/agentjet.yaml"
RUBRIC: Final = "rubrics/agentjet.yaml"
"""The files of AgentJet's filters, and of the rubric that is in them."""
WEBHOOK: Final = re.compile(r"notify\.\d+\.url")
"""A setting that may be a secret: whoever knows the address can send to it."""
VARIABLE: Final = re.compile(r"\$\{oc\.env:\s*(\w+)")
WHOLE: Final = re.compile(r"\$\{[^{}]*\}")
"""A text that is nothing but a variable."""
ENGINES: Final = ("rollout.engines", "rollout.tensor_parallel")
BACKBONES: Final = tuple(f"{root}.backbone" for root in ROOTS)
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


@dataclass(frozen=True, slots=True)
class Migration:
    """What becomes of a file or a command line.

    Attributes:
        program: The program that it is of.
        rows: What becomes of each option and key, and what the program assumes.
        config: The settings in effect, as `-c FILE` has them; None where a row is refused, and for Trinity-RFT.
        files: Texts for `write`, by names in the folder. There are none where a row is refused, unless that is a
            model, or the tasks of a program, that is missing, whose line is to be filled in.
        commands: What to run in place of a command line.
    """

    program: str
    rows: Sequence[Row]
    config: Config | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[str] = ()

    @property
    def refused(self) -> list[Row]:
        return [row for row in self.rows if row.outcome == "refused"]

    async def forecast(self) -> tuple[Forecast | None, list[str]]:
        """What rounds could train on, and what could not be read for that; nothing where a row is refused."""
        if self.config is not None:
            return await forecast_of_sources(self.config)
        # A file of Trinity-RFT names data sets, and no traces.
        return None, ["the file names no database"] if SCRIPT in self.files and not self.refused else []


def migrated(given: str | Path, output: Path | None = None) -> Migration:
    """Translate a file or a command line, for a folder that is to get Flywheel's files. Nothing is written. Raises
    ConfigError."""
    line = None
    if " " in str(given).strip() and not os.path.exists(given):  # noqa: PTH110 - False for what no file's name can be
        line = translated(str(given), None if output is None else output / SETTINGS)
        if line.file is None:
            return Migration(line.program, line.rows, commands=line.lines)
    named = line.file if line and line.file else Path(given)
    try:
        file, folder = (tidied(expanded(each).absolute()) for each in (named, output or Path()))
    except (OSError, ValueError) as error:
        why = f"the current directory is not there: {error}" if isinstance(error, OSError) else str(error)
        raise ConfigError(f"migrate {named}", why, "Name the whole path.") from None
    made = _of_file(file, folder, has_backbone=any(row.place == "--backbone" for row in line.rows) if line else False)
    return made if line is None else _of_line(line, made, output)


def _of_line(line: Translated, made: Migration, output: Path | None) -> Migration:
    """What becomes of a command line, and `made` of its file."""
    commands = line.lines
    if commands and made.program == TUNER:
        commands = [] if output else [f"flywheel migrate {shlex.quote(str(line.file))} --output DIR"]
        commands.append(f"python {shlex.quote(str((output or Path('DIR')) / SCRIPT))} WORKFLOW.py:FUNCTION")
    elif output is None:
        over = [f" --set {row.place}=null" for row in made.rows if row.why == BACKBONE_COUNTS]
        commands = ["".join([each, *over]) for each in commands]
    files = {} if line.refused else made.files
    config = None if line.refused else made.config
    return Migration(line.program, [*line.rows, *made.rows], config, files, commands)


def _of_file(file: Path, folder: Path, *, has_backbone: bool) -> Migration:
    """What becomes of a file, whose `backbone` does not count with that of a command line."""
    attempted, document = f"migrate {file}", None
    if file.suffix == ".py":
        raw: Any = options_in(file, attempted)
    else:
        document = read_yaml(file, attempted, "Name a configuration of another program.", keys_once=True)
        raw = values_of(document, attempted)
    if not isinstance(raw, Mapping) or not (found := translate(raw, file, fits=False)).program:
        why = "none of its keys is one of AgentJet, ASTuner, Trinity-RFT or SAGE"
        raise ConfigError(attempted, why, "Flywheel's own files are used with `-c FILE`.")
    written = None if document is None else document.value
    places = {numbered(row.use): row.place for row in found.rows if row.sets and row.place}
    secret = {row.place: row for row in _secrets(found.settings, written, places)}
    rows = [_shown(row, written, has_backbone=has_backbone) for row in found.rows if row.place not in secret]
    rows = [*_as_written(rows, raw, written)]
    made = Migration(found.program, [*rows, *secret.values()])
    missing = [row.use for row in made.refused if row.value is None and row.use]
    if len(missing) < len(made.refused) or (missing not in ([], ["model.base"]) and found.program != TUNER):
        return made
    if found.program == TUNER:
        return replace(made, files={SCRIPT: _script(found, missing)})
    if missing:
        found = replace(found, settings=merged(found.settings, {"model": {"base": TO_FILL_IN}}))
    try:
        config = parse(raw, str(file), file.parent, file=file, document=document, found=found)
    except ConfigError as error:
        if (wrong := [_with_error(row, error) for row in made.rows]) == made.rows:
            raise
        return replace(made, rows=wrong)
    parts, more = _filters(raw, written, config, folder)
    rows = [
        row._replace(outcome="replaced by", made=CHAIN) if row.use == "filter.chain" and parts else row
        for row in made.rows
    ]
    made = replace(made, rows=[*rows, *more])
    if any(row.outcome == "refused" for row in more):
        return made
    files = dict(_files(found, {**found.rubrics, **parts}, config, folder))
    return replace(made, config=None if missing else config, files=files)


def _shown(row: Row, written: Any, *, has_backbone: bool) -> Row:
    """The row as it is for what is written. It is refused where Flywheel would need a value that it does not know;
    that of a key that sets nothing has no value that a variable fills in, but its name."""
    if has_backbone and row.place in BACKBONES:
        return Row(row.place, row.value, "without effect", why=BACKBONE_COUNTS)
    if not row.sets:
        value = without_secrets(_at(written, row.place), row.place.rpartition(".")[2])
        return row._replace(value=value) if "${" in str(value) else row
    if isinstance(row.value, Expression):
        why = f"`{row.place}` is {row.value}, and Python files are not run"
        return row._replace(outcome="refused", made=None, why=why, hint="Write its value.")
    if row.use in ENGINES and row.made != 1:
        return row._replace(why="it is written as it is, also if this machine has fewer GPUs")
    return row


def _as_written(rows: Sequence[Row], raw: Any, written: Any) -> Iterator[Row]:
    """The rows with texts as they are `written` where a variable fills in a part: it may be secret."""
    filled = dict(leaves(raw))
    texts = {
        filled.get(place): text
        for place, text in leaves(written)
        if isinstance(text, str) and VARIABLE.search(text) and not WHOLE.fullmatch(text)
    }

    def change(value: Any) -> Any:
        return texts.get(value, value) if isinstance(value, str) else value

    for row in rows:
        yield row._replace(value=mapped(row.value, change), made=mapped(row.made, change)) if texts else row


def _with_error(row: Row, error: ConfigError) -> Row:
    """The row; refused where the settings are wrong by its value."""
    problems = re.split(r"; (?=`|unknown key |and \d)", error.why)
    problem = next((each for each in problems if f"`{row.place}`" in each), "")
    if not (row.place and row.sets and problem):
        return row
    return row._replace(outcome="refused", made=None, why=problem, hint="Correct it.")


def _at(written: Any, place: str) -> Any:
    """What a file has at a path or, where that is an interpolation, above it; None if it has nothing."""
    for part in place.split("."):
        written = written if isinstance(written, str) else value_at(written, part)
    return written


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
            why = f"`{place}` contains a key or a password, which are never written to files"
            key_of_name = "`url_env`" if is_webhook else "a key that ends in `_env`"
            hint = f"Name its variable in {key_of_name}, or remove it here and add it to the written file."
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
    section = f"{agentjet.section_in(raw)[0]}.filters"
    try:
        entries = entries_of(config)
    except ConfigError as error:
        return {}, [Row(section, None, "refused", why=error.why, hint=error.hint)]
    for at, (given, (_, read)) in enumerate(zip(chain["filters"], entries, strict=True)):
        place, params = f"{section}.{at}.params", given.get("params", {})
        key = params.get("api_key")
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
            name = variable_of(key, named) or params.get("api_key_env", "OPENAI_API_KEY")
            params["api_key_env"], why = name, f"keys are not written to files: put it into ${name}"
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
