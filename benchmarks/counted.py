"""`flywheel` with a look inside: on SIGUSR1 it writes its threads and tasks, as JSON, to the file in `$COUNTED`."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

FILE = "COUNTED"


def count(*_: object) -> None:
    """Called in the main thread while its loop runs. Threads are named by the package of their class and their name,
    tasks by their name."""
    threads = [f"{type(each).__module__.partition('.')[0]} {each.name}" for each in threading.enumerate()]
    tasks = [each.get_name() for each in asyncio.all_tasks(asyncio.get_running_loop())]
    packages = Counter(name.partition(".")[0] for name in sys.modules)
    file = Path(os.environ[FILE])
    written = file.with_suffix(".part")
    written.write_text(json.dumps({"threads": threads, "tasks": tasks, "modules": dict(packages.most_common(20))}))
    written.replace(file)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, count)
    runpy.run_module("flywheel", run_name="__main__", alter_sys=True)
