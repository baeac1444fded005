"""Studio servers and Flywheel beside each other for a while, in the background: what happened, as JSON.

`python -m tests.sources.studio.beside FOLDER SECONDS` spreads the servers' commits over about so many seconds and
writes FOLDER/result.json at the end. It ends early, without a result, when its standard input does, and takes
everything with it that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flywheel.config.file import load
from tests.sources.studio import server
from tests.sources.studio.reading import MUCH_LATER, by_id, read_all

CYCLES = {"old": 54, "new_v1": 67}
"""How often each fixture is in its database at the beginning: 50,000 spans together."""
SEED = 7
COMMITS = 600
"""Of each server, however long they take."""
CATCH_UP_SECONDS = 400.0
NICENESS = 10


class StoppedError(Exception):
    """Whoever started this does not want it any more."""


@dataclass
class Server:
    """One Studio server and its database."""

    name: str
    path: Path
    process: subprocess.Popen[bytes]
    names: set[str]

    def sample(self) -> None:
        self.names |= {path.name for path in self.path.parent.iterdir()}

    def end(self) -> dict[str, Any]:
        output, _ = self.process.communicate(timeout=CATCH_UP_SECONDS)
        report: dict[str, Any] = json.loads(output)
        return report


def configured(folder: Path, paths: list[Path], seconds: float) -> Path:
    sweep = min(45.0, seconds / 4)
    file = folder / "flywheel.yaml"
    file.write_text(
        json.dumps(
            {
                "state": {"dir": "state"},
                "sources": [{"path": str(path)} for path in paths],
                "ingest": {"settle_seconds": 0.5, "poll_seconds": 0.5, "sweep_seconds": sweep, "abandon_seconds": 30},
                # Nobody answers there: what is told of stays open for changes.
                "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "none"},
                "serving": {"urls": ["http://127.0.0.1:9"]},
            }
        )
    )
    return file


def begun(command: list[str], log: IO[bytes], **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", *command], stderr=log, **more)


def waited(seconds: float) -> None:
    if select.select([sys.stdin], [], [], seconds)[0]:
        raise StoppedError


def asked(state: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(f"file:{state}?mode=ro", uri=True, timeout=30)) as database:
        return database.execute(query).fetchall()


def differences(state: Path, path: Path) -> list[str]:
    """How what the ledger holds of a database differs from what is in it.

    What changed after a verdict was looked for stays as it was, which is an event.
    """
    kept = {
        span
        for (span,) in asked(
            state,
            "SELECT span_id FROM replies JOIN events ON subject = CAST(replies.id AS TEXT) "
            "WHERE kind = 'replies' AND new = 'changed'",
        )
    }
    held = {
        span: (skip, answer)
        for span, skip, answer in asked(
            state,
            "SELECT span_id, skip_reason, json_extract(payload, '$.metadata.answer') FROM replies "
            "JOIN sources ON sources.id = source_id LEFT JOIN tasks ON tasks.id = task_id "
            f"WHERE path = '{path}'",
        )
    }
    there = {
        span: (reply.skip and reply.skip.value, None if reply.skip else reply.answer)
        for span, reply in by_id(read_all(path, now=MUCH_LATER)[0]).items()
    }
    return [
        f"{span}: {held.get(span)} in the ledger, {there.get(span)} in the database"
        for span in sorted(held.keys() | there.keys())
        if held.get(span) != there.get(span) and not (span in kept and span in held and span in there)
    ]


def same_as_its_twin(path: Path, name: str, done: int) -> bool:
    """Whether a database holds what one holds that was written likewise with no reader near."""
    twin = server.filled(path.parent.with_name(f"twin-{name}"), name, CYCLES[name])
    try:
        with contextlib.closing(sqlite3.connect(twin)) as database:
            commits = (commit for commit in server.commits(name, SEED, CYCLES[name]) if commit)
            for commit, _ in zip(commits, range(done), strict=False):
                server.store(database, name, commit)
            database.commit()
            mine = sqlite3.connect(path)
            with contextlib.closing(mine):
                every = "SELECT rowid, * FROM span_table ORDER BY rowid"
                pairs = zip(mine.execute(every), database.execute(every), strict=True)
                return all(one == other for one, other in pairs)
    except ValueError:
        return False
    finally:
        twin.unlink()


def turn(folder: Path, seconds: float, log: IO[bytes], children: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    servers: list[Server] = []
    for name, cycles in CYCLES.items():
        (folder / name).mkdir()
        path = server.filled(folder / name / "database.sqlite", name, cycles)
        pause = str(seconds / COMMITS)
        command = ["tests.sources.studio.server", str(path), name, str(SEED), str(cycles), str(COMMITS), pause]
        process = begun(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        children.append(process)
        servers.append(Server(name, path, process, set()))
    config_file = configured(folder, [each.path for each in servers], seconds)
    config = load(config_file)
    state = config.state_dir / "state.db"
    daemon = begun(["flywheel", "run", "-c", str(config_file)], log)
    children.append(daemon)
    while any(each.process.poll() is None for each in servers):
        waited(0.25)
        for each in servers:
            each.sample()
    found: dict[str, Any] = {each.name: each.end() for each in servers}

    end = time.monotonic() + CATCH_UP_SECONDS
    while (left := {each.name: differences(state, each.path) for each in servers}) and time.monotonic() < end:
        if not any(left.values()):
            break
        waited(5)
    shown = subprocess.run(
        [sys.executable, "-m", "flywheel", "status", "--json", "-c", str(config_file)],
        capture_output=True, check=True, timeout=CATCH_UP_SECONDS,
    )  # fmt: skip
    daemon.send_signal(signal.SIGTERM)
    found["daemon"] = daemon.wait(timeout=CATCH_UP_SECONDS)
    status = json.loads(shown.stdout)
    longest = {source["path"]: source["longest_read_ms"] for source in status["sources"]}
    conditions = {source["path"]: source["condition"] for source in status["sources"]}
    exported = Counter(json.loads(line)["task_id"] for line in config.task_file.read_text().splitlines())
    tasks = {task for (task,) in asked(state, "SELECT json_extract(payload, '$.task_id') FROM tasks")}
    for each in servers:
        each.sample()
        found[each.name] |= {
            "differences": left[each.name][:10],
            "names": sorted(each.names),
            "left": sorted(path.name for path in each.path.parent.iterdir()),
            "longest_read_ms": longest[str(each.path)],
            "condition": conditions[str(each.path)],
            "integrity": asked(each.path, "PRAGMA integrity_check"),
            "spans": asked(each.path, "SELECT count(*) FROM span_table")[0][0],
            "same_as_its_twin": same_as_its_twin(each.path, each.name, found[each.name]["commits"]),
        }
    found["balanced"] = status["balanced"]
    found["exported_twice"] = [task for task, times in exported.items() if times > 1]
    found["exported_are_tasks"] = exported.keys() == tasks
    found["retold"] = asked(state, "SELECT count(*) FROM events WHERE detail = 'its trace changed'")[0][0]
    return found


def main() -> None:
    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    children: list[subprocess.Popen[bytes]] = []
    with (folder / "log").open("wb") as log:
        try:
            result = turn(folder, seconds, log, children)
            (folder / "result.json").write_text(json.dumps(result, indent=1))
        except StoppedError:
            pass
        finally:
            for child in children:
                child.kill()
                child.wait()


if __name__ == "__main__":
    main()
