"""A user's file, and the process that runs its functions."""

from __future__ import annotations

from pathlib import Path

from flywheel.system.user_code import PythonProcess

FILE = """
import os, signal, subprocess, sys, time
from pathlib import Path

calls = 0

def keep(task):
    global calls
    calls += 1
    do = task["do"]
    if "grandchild" in task:
        started = subprocess.Popen(["sleep", "100"])
        Path(task["grandchild"]).write_text(str(started.pid))
    if do == "hang":
        Path(task["pid"]).write_text(str(os.getpid()))
        while True:
            pass
    if do == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if do == "leave":
        os._exit(3)
    if do == "exit":
        sys.exit("enough")
    if do == "talk":
        print("printed")
        os.write(1, b"written\\n")
        subprocess.run(["echo", "by another program"])
        return len(sys.stdin.read()) == 0, "read to the end"
    if do == "meet":
        Path(task["mine"]).touch()
        while not Path(task["other"]).exists():
            time.sleep(0.01)
    if do == "pid":
        return os.getpid()
    if do == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    return task.get("say", calls)
"""


def keep_process(seconds: float = 60, most: int = 1, source: str = FILE, name: str = "keep") -> PythonProcess:
    return PythonProcess(source, Path("mine.py"), name, attempted="load mine.py", seconds=seconds, most=most)
