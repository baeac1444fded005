"""Nothing that a run starts outlives it, nothing of a pool outlives its process, and memory has a limit."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from flywheel.records.program_run import RunResult
from flywheel.system.child_process import SECRET_BYTES, python_command
from flywheel.training.program import program_pool, watcher
from tests.factories.time_limit import runs_out_when
from tests.training.program.conftest import MODELS, WITHOUT_AGENTSCOPE, NewPool
from tests.waiting import until, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only there a process can adopt orphans"),
]

MB = 1_000_000

AGENT = """
import asyncio, json, os, pathlib, subprocess, sys, time

def note(pid):
    with open("pids", "a") as file:
        file.write(f"{pid}\\n")

def double_fork(seconds):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            os.execvp("sleep", ["sleep", str(seconds)])
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.wait()
    note(os.read(reading, 100).decode())

def spin():
    while True:
        pass

async def run(task, model):
    case = task["case"]
    note(os.getpid())
    if case == "child":
        note(subprocess.Popen(["sleep", "1000"]).pid)
    elif case == "session":
        note(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    elif case == "daemon":
        double_fork(1000)
    elif case == "many":
        for _ in range(5):
            double_fork(1000)
    elif case == "stays":
        # It starts others as it is ended, and ignores what can be ignored.
        script = "trap '' TERM HUP INT; while true; do setsid sleep 1000 & sleep 0.01; done"
        note(subprocess.Popen(["sh", "-c", script], start_new_session=True).pid)
    elif case == "ends soon":
        note(subprocess.Popen(["sleep", "0.2"], start_new_session=True).pid)
    elif case == "ends":
        double_fork(1000)
        os._exit(3)
    elif case == "kills its group":
        os.killpg(0, 9)
    elif case == "hangs":
        double_fork(1000)
        pathlib.Path("hanging").touch()
        await asyncio.sleep(1000)
    elif case == "blocks":
        double_fork(1000)
        pathlib.Path("hanging").touch()
        spin()
    return {"reward": 1, "response": str(os.getpid())}
"""


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def noted(folder: Path) -> list[int]:
    """The processes of runs so far."""
    return [int(line) for line in (folder / "pids").read_text().split()]


async def test_what_a_run_leaves_is_ended_and_fails_the_run(new_pool: NewPool, tmp_path: Path) -> None:
    pool = new_pool(AGENT)
    child = (await pool.run({"case": "nothing"}, MODELS, "policy")).response
    for case, left in (
        ("child", "a process running: sleep 1000"),
        ("session", "a process running: sleep 1000"),
        ("daemon", "a process running: sleep 1000"),
        ("many", "5 processes running: sleep 1000, sleep 1000, sleep 1000, …"),
        ("stays", "processes running: sh -c trap"),
    ):
        (tmp_path / "pids").unlink()
        result = await pool.run({"case": case}, MODELS, "policy")
        assert (case, result.cause) == (case, "left_processes")
        assert "it left " in result.error
        assert left in result.error
        assert result.reward is None
        own, *started = noted(tmp_path)
        assert str(own) == child, "the child itself goes on"
        assert started
        assert not [pid for pid in started if alive(pid)]
        result = await pool.run({"case": "nothing"}, MODELS, "policy")
        assert (result.cause, result.response) == (None, child)


async def test_a_process_that_ends_by_itself_is_not_left(new_pool: NewPool) -> None:
    assert (await new_pool(AGENT).run({"case": "ends soon"}, MODELS, "policy")).cause is None


async def test_processes_of_a_run_that_is_ended_or_ends_its_process_are_ended(
    new_pool: NewPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_out_when(monkeypatch, (tmp_path / "hanging").exists)
    pool = new_pool(AGENT)
    pool.start()
    for case, cause in (("ends", "ended"), ("hangs", "timeout"), ("blocks", "timeout")):
        for name in ("pids", "hanging"):
            (tmp_path / name).unlink(missing_ok=True)
        result = await pool.run({"case": case}, MODELS, "policy", seconds=2.0)
        assert (case, result.cause) == (case, cause)
        assert len(noted(tmp_path)) == 2
        assert not [pid for pid in noted(tmp_path) if alive(pid)]


async def test_processes_of_the_setup_stay_until_the_pool_is_closed(new_pool: NewPool, tmp_path: Path) -> None:
    pool = new_pool(
        """
        import os, pathlib, subprocess, time
        def setup():
            global server
            # Starts a process of its own for each line that it reads.
            script = "while read line; do sleep 1000 & echo $!; done"
            server = subprocess.Popen(
                ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        async def run(task, model):
            server.stdin.write(b"one\\n")
            server.stdin.flush()
            with open("pids", "a") as file:
                file.write(f"{server.pid}\\n{server.stdout.readline().decode()}")
            return 1
        """,
        setup=f"{tmp_path}/agent.py:setup",
    )
    for _ in range(3):
        assert (await pool.run({}, MODELS, "policy")).cause is None
    pids = noted(tmp_path)
    assert len(set(pids)) == 4
    assert all(alive(pid) for pid in pids)
    pool.close()
    assert not any(alive(pid) for pid in pids)


async def test_the_helpers_of_multiprocessing_are_not_left_processes(new_pool: NewPool) -> None:
    pool = new_pool(
        """
        import multiprocessing, os
        def square(number): return number * number
        async def run(task, model):
            with multiprocessing.get_context(task["method"]).Pool(1) as pool:
                return sum(pool.map(square, [1, 2, 3]))
        """
    )
    for method in ("spawn", "forkserver", "fork", "spawn"):
        result = await pool.run({"method": method}, MODELS, "policy")
        assert (method, result.cause, result.reward) == (method, None, 14.0), result.error


MEMORY = """
import asyncio, os, subprocess, sys
kept = []

async def run(task, model):
    size, where = task["size"], task["where"]
    if where == "here":
        kept.append(b"x" * size)
    elif where == "elsewhere":
        code = f"text = b'x' * {size}; import time; time.sleep(1000)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    elif where == "shared":
        kept.append(b"x" * size)
        forked = []
        for _ in range(6):
            if (pid := os.fork()) == 0:
                import time
                time.sleep(1000)
            forked.append(pid)
        open("forked", "w").close()
        while not os.path.exists("looked"):
            await asyncio.sleep(0.01)
        for pid in forked:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        return os.getpid()
    if task.get("return"):
        return os.getpid()
    await asyncio.sleep(1000)
"""


async def test_a_run_that_uses_too_much_memory_is_ended(new_pool: NewPool) -> None:
    pool = new_pool(MEMORY, memory_bytes=120 * MB)
    for where in ("here", "elsewhere"):
        result = await pool.run({"where": where, "size": 200 * MB}, MODELS, "policy")
        assert (where, result.cause) == (where, "memory")
        assert re.fullmatch(r"it used 0\.\d\d GB; the limit is 0\.12 GB", result.error)
        assert result.peak_bytes > 120 * MB
        result = await pool.run({"where": "here", "size": 1 * MB, "return": True}, MODELS, "policy")
        assert result.cause is None
        assert 5 * MB < result.peak_bytes < 120 * MB


async def test_memory_that_processes_share_counts_once(
    new_pool: NewPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    look = program_pool.resident_bytes

    def noted(processes: Sequence[psutil.Process], limit: int) -> int:
        size = look(processes, limit)
        if len(processes) > 6 and not found and (tmp_path / "forked").exists():
            found.append(size)
            (tmp_path / "looked").touch()
        return size

    monkeypatch.setattr(program_pool, "resident_bytes", noted)
    pool = new_pool(MEMORY, memory_bytes=200 * MB)
    result = await pool.run({"where": "shared", "size": 80 * MB}, MODELS, "policy")
    assert (result.cause, result.error) == (None, "")
    assert 80 * MB < found[0] <= result.peak_bytes < 200 * MB


async def test_a_child_that_runs_have_filled_is_replaced(new_pool: NewPool) -> None:
    pool = new_pool(MEMORY, memory_bytes=200 * MB)
    small = {"where": "here", "size": 50 * MB, "return": True}
    results = [await pool.run(small, MODELS, "policy") for _ in range(5)]
    assert [result.cause for result in results] == [None] * 5
    assert len({result.reward for result in results}) == 3


PARENT = """
import asyncio, sys
from tests.training.program.conftest import MODELS
from flywheel.training.program.agent_program import AgentProgram
from flywheel.training.program.program_pool import ProgramPool

folder, case = sys.argv[1:]
program = AgentProgram(workflow=f"{folder}/agent.py:run", folder=folder, needs_response=False)
pool = ProgramPool(program, workers=2)

async def main():
    await pool.run({"case": "nothing"}, MODELS, "policy")
    running = asyncio.create_task(pool.run({"case": case}, MODELS, "policy"))
    await asyncio.sleep(1000 if case != "nothing" else 0)

asyncio.run(main())
"""


def parent(folder: Path, case: str) -> subprocess.Popen[bytes]:
    (folder / "agent.py").write_text(AGENT + WITHOUT_AGENTSCOPE)
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT), str(folder), case])


@pytest.mark.parametrize(("case", "after_its_children"), [("hangs", False), ("blocks", False), ("hangs", True)])
def test_a_killed_parent_leaves_nothing(case: str, after_its_children: bool, tmp_path: Path) -> None:
    """Ray kills the children of an actor that it ends, and not theirs."""
    with parent(tmp_path, case) as process:
        wait_for((tmp_path / "hanging").exists, "the run", seconds=120)
        children = psutil.Process(process.pid).children() if after_its_children else []
        below = {found.pid for found in psutil.Process(process.pid).children(recursive=True)}
        assert set(noted(tmp_path)) < below - {found.pid for found in children}
        for each in (*children, process):
            each.kill()
    wait_for(lambda: not any(map(alive, below)), "the end of all processes", seconds=60)


async def hanging(pool: program_pool.ProgramPool, folder: Path) -> asyncio.Task[RunResult]:
    """A run that has begun, and does not end."""
    running = asyncio.create_task(pool.run({"case": "hangs"}, MODELS, "policy"))
    await until((folder / "hanging").exists, "the run")
    return running


async def test_a_killed_fork_server_leaves_nothing_and_is_replaced(new_pool: NewPool, tmp_path: Path) -> None:
    before = psutil.Process().children()
    pool = new_pool(AGENT)
    running = await hanging(pool, tmp_path)
    [server] = {*psutil.Process().children()} - {*before}
    below = [server.pid, *(found.pid for found in server.children(recursive=True))]
    server.kill()
    assert (await running).cause == "ended"
    await until(lambda: not any(map(alive, below)), "the end of all processes")
    assert (await pool.run({"case": "nothing"}, MODELS, "policy")).cause is None


def test_a_process_of_an_agent_without_a_watcher_ends() -> None:
    """Which would not end with anything."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(bytes(SECRET_BYTES))
        command = [*python_command("flywheel.training.program.program_child"), str(ended.pid), str(theirs.fileno())]
        found = subprocess.run(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, timeout=120, check=False)
    assert found.returncode == 1
    assert f"its watcher, the process {ended.pid}, has ended" in found.stderr.decode()


def fork_server_with(monkeypatch: pytest.MonkeyPatch, statements: str) -> None:
    """Let fork servers run these statements first."""

    def command(module: str) -> list[str]:
        *interpreter, code = python_command(module)
        return [*interpreter, textwrap.dedent(statements) + code]

    monkeypatch.setattr(watcher, "python_command", command)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("os.fork", "BlockingIOError(11, 'Resource temporarily unavailable')"),
        ("subprocess.Popen", "BlockingIOError(11, 'Resource temporarily unavailable')"),
        ("threading.Thread.start", "RuntimeError('Resource temporarily unavailable')"),
    ],
)
async def test_a_limit_of_processes_costs_only_the_run_that_needs_one_more(
    new_pool: NewPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: str
) -> None:
    statements = f"""
        import os, subprocess, threading
        def limited(*arguments, start={function}, **named):
            if os.path.exists({str(tmp_path / "full")!r}):
                raise {error}
            return start(*arguments, **named)
        {function} = limited
    """
    fork_server_with(monkeypatch, statements)
    pool = new_pool(AGENT, workers=2)
    running = await hanging(pool, tmp_path)
    (tmp_path / "full").touch()
    result = await pool.run({"case": "nothing"}, MODELS, "policy")
    assert result.cause == "raised"
    assert result.error.startswith("its process does not start: ")
    assert result.error.endswith("Resource temporarily unavailable")
    assert all(map(alive, noted(tmp_path))), "the other run goes on"
    (tmp_path / "full").unlink()
    assert (await pool.run({"case": "nothing"}, MODELS, "policy")).cause is None
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_error_of_a_watcher_is_in_the_log(
    new_pool: NewPool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fork_server_with(monkeypatch, "import psutil\npsutil.Process = None\n")
    result = await new_pool(AGENT).run({"case": "nothing"}, MODELS, "policy")
    assert (result.cause, result.error) == ("raised", "its process does not start: it ended")
    log = ""

    def is_logged() -> bool:
        nonlocal log
        log += capfd.readouterr().err
        return "TypeError: 'NoneType' object is not callable" in log

    await until(is_logged, "the traceback")


async def test_an_agent_that_kills_its_process_group_costs_no_other_run(new_pool: NewPool, tmp_path: Path) -> None:
    before = psutil.Process().children()
    pool = new_pool(AGENT, workers=2)
    running = await hanging(pool, tmp_path)
    other, servers = noted(tmp_path), {*psutil.Process().children()} - {*before}
    result = await pool.run({"case": "kills its group"}, MODELS, "policy")
    assert (result.cause, result.error) == ("ended", "its process ended (SIGKILL)")
    assert (await pool.run({"case": "nothing"}, MODELS, "policy")).cause is None
    assert {*psutil.Process().children()} - {*before} == servers
    assert all(map(alive, other))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_watcher_that_does_not_answer_is_ended_with_all_below_it(
    new_pool: NewPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_pool, "END_SECONDS", 0.1)
    pool = new_pool(AGENT)
    running = await hanging(pool, tmp_path)
    its_watcher = psutil.Process(noted(tmp_path)[0]).parent()
    assert its_watcher is not None
    its_watcher.suspend()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not any(map(alive, [its_watcher.pid, *noted(tmp_path)])), "the end of all processes")
    assert (await pool.run({"case": "nothing"}, MODELS, "policy")).cause is None


async def test_children_that_are_replaced_leave_no_zombies(new_pool: NewPool, tmp_path: Path) -> None:
    pool = new_pool(AGENT)
    for _ in range(3):
        assert (await pool.run({"case": "ends"}, MODELS, "policy")).cause == "ended"
    assert (await pool.run({"case": "nothing"}, MODELS, "policy")).cause is None
    assert len(psutil.Process(psutil.Process(noted(tmp_path)[-1]).ppid()).parent().children()) == 1


def test_a_parent_that_ends_without_closing_its_pool_leaves_nothing(tmp_path: Path) -> None:
    with parent(tmp_path, "nothing") as process:
        assert process.wait(120) == 0
    assert not any(alive(pid) for pid in noted(tmp_path))


def test_a_file_descriptor_that_a_fork_keeps_does_not_keep_the_children(tmp_path: Path) -> None:
    """As a process that vLLM forks from the engine keeps everything that the engine had open."""
    (tmp_path / "agent.py").write_text(AGENT + WITHOUT_AGENTSCOPE)
    code = textwrap.dedent(PARENT).replace(
        "    running =", "    import os, time\n    if os.fork() == 0: time.sleep(1000)\n    running ="
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), "hangs"], process_group=0
    ) as process:
        try:
            wait_for((tmp_path / "hanging").exists, "the run", seconds=120)
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)
            wait_for(lambda: not any(alive(pid) for pid in noted(tmp_path)), "the end of the runs", seconds=60)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


async def test_a_pool_is_closed_though_a_fork_keeps_its_file_descriptors(
    new_pool: NewPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_pool, "END_SECONDS", 10_000.0)
    pool = new_pool(AGENT)
    assert (await pool.run({"case": "nothing"}, MODELS, "policy")).cause is None
    # As a fork, it has every file descriptor of this process.
    with subprocess.Popen(["sleep", "1000"], pass_fds=_inheritable()) as holder:
        try:
            pool.close()
            assert not any(alive(pid) for pid in noted(tmp_path))
        finally:
            holder.kill()


def _inheritable() -> tuple[int, ...]:
    return tuple(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists())
