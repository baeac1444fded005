"""Data sets of tasks: files, folders, data sets of the Hub, and rows in memory, as JSON lines.

Files of JSON lines are read here. `datasets` reads all others, in the interpreter that trains: it is no part of the
base install.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from flywheel.errors import ConfigError, SourceError, TrainError
from flywheel.sources.jsonl.data_set_process import FILES
from flywheel.system.process_folder import ProcessFolder

_HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FIELDS: Final = ("path", "name", "split", "prompt_key", "response_key")


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set.

    Attributes:
        path: A file, a folder, or a name of the Hub; what rows are called.
        name: The subset of a folder or of the Hub.
        split: The split, perhaps with a range (`train[:100]`).
        prompt_key: The key of the question; empty for the usual ones.
        response_key: The key of the right answer; empty for the usual ones.
        rows: The lines of a data set in memory.
    """

    path: str
    name: str | None = None
    split: str = "train"
    prompt_key: str = ""
    response_key: str = ""
    rows: tuple[bytes, ...] | None = None

    @classmethod
    def of(cls, given: Any) -> Self:
        """Of a path, a mapping, an object with such fields, or the rows themselves. Raises ConfigError for anything
        else, and for a row that is no JSON."""
        if isinstance(given, str | Path):
            return cls(str(given))
        if isinstance(given, Iterable) and not isinstance(given, Mapping) and not hasattr(given, "path"):
            return cls("rows", rows=tuple(itertools.starmap(_line, enumerate(given, 1))))
        fields = given if isinstance(given, Mapping) else {key: getattr(given, key, None) for key in _FIELDS}
        found: dict[str, Any] = {key: str(fields[key]) for key in _FIELDS if fields.get(key) is not None}
        if "path" not in found:
            why = f"a value of the type {type(given).__name__} is none"
            raise ConfigError("read a data set", why, "Name a file, or give a list of rows, each a mapping.")
        return cls(**found)

    @property
    def is_lines(self) -> bool:
        """Whether it is read here: it is a file, or what is meant to be one."""
        path = Path(self.path).expanduser()
        if path.is_dir() or path.suffix in FILES.keys() - {".jsonl"}:
            return False
        is_file = path.is_file() or path.suffix == ".jsonl" or _HUB_NAME.fullmatch(self.path) is None
        return is_file and "[" not in self.split


def trainer_python(given: str | Path | None) -> Path:
    """The interpreter that trains: the given one, that of the environment, or this one."""
    named = given or os.environ.get("FLYWHEEL_TRAINER_PYTHON")
    return Path(named).expanduser().absolute() if named else Path(sys.executable)


@contextlib.contextmanager
def lines_of(dataset: DataSet, python: Path, attempted: str, parent: Path | None = None) -> Iterator[Iterable[bytes]]:
    """The lines of a data set, of which there may be a copy in a folder of `parent` meanwhile. Raises ConfigError if
    it cannot be read."""
    if dataset.rows is not None:
        yield dataset.rows
        return
    path = Path(dataset.path).expanduser()
    with contextlib.ExitStack() as stack:
        if not dataset.is_lines:
            folder = stack.enter_context(ProcessFolder(parent))
            _load(dataset, python, path := folder / "lines.jsonl", attempted)
        try:
            lines: Iterable[bytes] = stack.enter_context(path.open("rb"))
        except OSError as error:
            hint = "Name a file of JSON lines, a folder, or a data set of the Hub."
            raise ConfigError(attempted, error.strerror or str(error), hint) from None
        yield _named(lines, dataset) if dataset.prompt_key or dataset.response_key else lines


def write_lines(dataset: DataSet, path: Path, python: Path) -> None:
    """Write a data set to a file of JSON lines, which appears whole. Raises SourceError."""
    attempted = f"write the data set {dataset.path} to {path}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lines_of(dataset, python, attempted, path.parent) as lines, ProcessFolder(path.parent) as folder:
            made = folder / "lines"
            with made.open("wb") as file:
                file.writelines(line.rstrip(b"\n") + b"\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            made.rename(path)
    except OSError as error:
        raise SourceError(attempted, error.strerror or str(error), "Check the folder.") from None
    except (ConfigError, TrainError) as error:
        raise SourceError(attempted, error.why, error.hint) from error


def answer_of(python: Path, module: str, request: Mapping[str, Any], attempted: str) -> Any:
    """What a module of ours prints in another interpreter. Raises TrainError if that one cannot run it."""
    command = [str(python), "-P", "-m", module]
    try:
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
        return json.loads(done.stdout)
    except OSError as error:
        why = f"{python} does not start: {error.strerror or error}"
    except ValueError:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it printed nothing")
        why = f"{python} cannot run Flywheel: {last.strip()}"
    hint = "Name an interpreter with agentscope-flywheel[gpu] or [cpu] in $FLYWHEEL_TRAINER_PYTHON."
    raise TrainError(attempted, why, hint)


def _line(number: int, row: Any) -> bytes:
    try:
        return json.dumps(row).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError("read rows", f"line {number}: {error}", "Each is one task, a JSON object.") from None


def _load(dataset: DataSet, python: Path, output: Path, attempted: str) -> None:
    local = Path(dataset.path).expanduser()
    path = str(local) if local.exists() else dataset.path
    request = {"path": path, "name": dataset.name, "split": dataset.split, "output": str(output)}
    error = answer_of(python, "flywheel.sources.jsonl.data_set_process", request, attempted)["error"]
    if error is None:
        return
    if error["is_missing"] and not local.exists():
        arguments = ", ".join(map(repr, filter(None, (dataset.path, dataset.name))))
        raise ConfigError(
            attempted,
            f"there is no such file or folder, nor a data set of the Hub that can be reached or is in the cache"
            f" ({error['why']})",
            f'To fill the cache, run where the Hub can be reached: {python} -c "import datasets;'
            f' datasets.load_dataset({arguments})"',
        )
    raise ConfigError(attempted, error["why"], "Name a file of JSON lines, a folder, or a data set of the Hub.")


def _named(lines: Iterable[bytes], dataset: DataSet) -> Iterator[bytes]:
    """The lines with question and right answer where tasks have them; their own keys stay."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            yield line  # whoever reads the lines says what is wrong
            continue
        more: dict[str, Any] = {}
        if dataset.prompt_key in row:
            more["main_query"] = row[dataset.prompt_key]
        if dataset.response_key in row:
            right = row[dataset.response_key]
            own = row.get("metadata")
            more["metadata"] = {**(own if isinstance(own, dict) else {}), "reference": right}
            more["answer"] = row.get("answer", right)
        yield json.dumps({**row, **more}, ensure_ascii=False).encode()
