"""Reads a data set with `datasets` and writes it as JSON lines: a process of the interpreter that has `datasets`.

`python -P -m flywheel.sources.jsonl.data_set_process`, with JSON on standard input. It writes `{"error": …}` to
standard output if the data set cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any, Final

FILES: Final = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""The builders of `datasets` for single files."""


def main() -> None:
    wanted = json.load(sys.stdin)
    # Whatever else is printed must not be taken for the answer.
    with contextlib.redirect_stdout(sys.stderr):
        error = _write(wanted["path"], wanted["name"], wanted["split"], Path(wanted["output"]))
    print(json.dumps({"error": error}))


def _write(path: str, name: str | None, split: str, output: Path) -> dict[str, Any] | None:
    try:
        from datasets import disable_progress_bars, load_dataset
    except ImportError as error:
        return {"why": f"{error}. It ran with {sys.executable}", "is_missing": False}
    disable_progress_bars()
    file = Path(path)
    # Of files here, no copy stays; of the Hub's, its own cache has one.
    cache = {"cache_dir": str(output.with_name("cache"))} if file.exists() else {}
    try:
        if file.is_file():
            rows = load_dataset(FILES[file.suffix], data_files=path, split=split, **cache)
        else:
            rows = load_dataset(path, name, split=split, **cache)
        with output.open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    except Exception as error:
        # The first line: some messages quote the whole file.
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        return {"why": why, "is_missing": isinstance(error, ConnectionError | FileNotFoundError)}
    return None


if __name__ == "__main__":
    main()
