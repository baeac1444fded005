"""How much code one reply and one task pass through: `python -m benchmarks.call_path`.

Profiles `flywheel ingest` of a database with one trace, and then `flywheel filter` with the shipped rubric
`qa-quality` and a judge that accepts. Counts the distinct functions of `flywheel/` that were entered, and their
files, including the command line and the configuration. Lambdas, comprehensions, class bodies and module level code
do not count. `--list` prints the functions by file.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import orjson
import yaml

import flywheel
from benchmarks import measurement

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = Path(flywheel.__file__).parent
DATABASE: Final = ROOT / "tests" / "data" / "studio" / "new_v2.sqlite"
RUBRIC: Final = ROOT / "rubrics" / "qa-quality.yaml"
TRACE: Final = "8adc91301867e186f4e697eb664d77fe"
_OPTIMIZED: Final = 1
"""`inspect.CO_OPTIMIZED`: set for functions, and not for the bodies of classes and modules."""
_PROFILED: Final = """
import json, sys, threading
package, found, *arguments = sys.argv[1:]
sys.argv = ["flywheel", *arguments]
entered = set()
def profile(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(package):
        entered.add((code.co_filename, code.co_qualname, code.co_firstlineno, code.co_flags))
threading.setprofile(profile)
sys.setprofile(profile)
from flywheel.cli.app import main
try:
    main()
finally:
    sys.setprofile(None)
    threading.setprofile(None)
    with open(found, "w") as file:
        json.dump(sorted(entered), file)
"""


def main() -> None:
    options = measurement.parser("call_path", __doc__)
    options.add_argument("--list", action="store_true", help="print the functions by file")
    chosen = options.parse_args()
    before = measurement.machine()
    with tempfile.TemporaryDirectory(prefix="flywheel-benchmark-") as folder, _judge() as url:
        paths = _paths(Path(folder), url)
    if chosen.list:
        for command, path in paths.items():
            print(command)
            for file, functions in path.items():
                print(f"  {file}: {', '.join(functions)}")
    figures = {}
    for unit, command in (("reply", "ingest"), ("task", "filter")):
        figures[f"{unit}_functions"] = sum(map(len, paths[command].values()))
        figures[f"{unit}_files"] = len(paths[command])
    measurement.report(figures, before, as_json=chosen.json)


def _paths(folder: Path, judge: str) -> dict[str, dict[str, list[str]]]:
    """For each command the names of the functions that it entered, by file."""
    database = folder / "studio.sqlite"
    _one_trace(database)
    configuration = folder / "flywheel.yaml"
    configuration.write_text(
        yaml.safe_dump(
            {
                "state": {"dir": str(folder / "state")},
                "sources": [{"path": str(database)}],
                "judge": {"base_url": judge, "model": "judge"},
                "filter": {"rubric": str(RUBRIC)},
                "model": {"base": "some/model", "alias": "agent"},
            }
        )
    )
    paths = {}
    for command, outcome in (("ingest", "1 task"), ("filter", "1 accepted")):
        found = folder / f"{command}.json"
        arguments = [sys.executable, "-c", _PROFILED, f"{PACKAGE}/", str(found), command, "-c", str(configuration)]
        ran = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
        if ran.returncode or outcome not in ran.stdout:
            raise SystemExit(f"flywheel {command} ended with {ran.returncode}: {ran.stdout}{ran.stderr}")
        paths[command] = _by_file(json.loads(found.read_bytes()))
    return paths


def _by_file(entered: list[tuple[str, str, int, int]]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for file, name, _line, flags in entered:
        if flags & _OPTIMIZED and not name.rpartition(".")[2].startswith("<"):
            found[str(Path(file).relative_to(PACKAGE))].append(name)
    return dict(found)


def _one_trace(database: Path) -> None:
    """Studio's newest schema with the rows of one trace: a reply by one model call, which becomes a task."""
    shutil.copy(DATABASE, database)
    connection = sqlite3.connect(database)
    with connection:
        connection.execute("DELETE FROM span_table WHERE traceId <> ?", (TRACE,))
    connection.close()


class _Judge(BaseHTTPRequestHandler):
    """Accepts: every criterion of the schema gets its last choice, and the nonce is repeated."""

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        request = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        verdict = _filled(request["response_format"]["json_schema"]["schema"])
        [verdict["check"]] = re.findall(r'"check": "([0-9a-f]{16})"', request["messages"][0]["content"])
        message = {"role": "assistant", "content": orjson.dumps(verdict).decode()}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        body = orjson.dumps(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": "judge",
                "choices": [choice],
                "usage": usage,
            }
        )
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _filled(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][-1]
    if schema.get("type") == "object":
        return {name: _filled(value) for name, value in schema["properties"].items()}
    return "As the answer shows."


@contextmanager
def _judge() -> Iterator[str]:
    """An endpoint on this machine; its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    main()
