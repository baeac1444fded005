"""The protocol of child processes: the limit covers a whole answer, and only the child's own answer is one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from flywheel.system.child_process import ChildEndedError, ChildPool, ChildProcess
from tests.cases import for_each

CHILD = """\
import sys; sys.path[:] = {path!r}
import os, signal, socket, time
from flywheel.system import child_process
from flywheel.system.child_process import serve

def raw():
    connection = socket.socket(fileno=int(sys.argv.pop()))
    secret = connection.recv(16, socket.MSG_WAITALL)
    connection.recv(24 + 3, socket.MSG_WAITALL)
    return connection, secret

def answer(request):
    return request * 2

{text}
"""


def started(text: str) -> ChildProcess:
    command = [sys.executable, "-P", "-c", CHILD.format(path=sys.path, text=text)]
    return ChildProcess(command, dict(os.environ))


@pytest.fixture
def start() -> Iterator[Callable[[str], ChildProcess]]:
    made: list[ChildProcess] = []

    def start(text: str) -> ChildProcess:
        made.append(started(text))
        return made[-1]

    yield start
    for child in made:
        child.end()


Start = Callable[[str], ChildProcess]


@for_each("size", [0, 1, 100, 5_000_000])
def test_requests_are_answered_in_order(size: int, start: Start) -> None:
    child = start("serve(answer)")
    assert [child.ask(bytes([each]) * size, 60) for each in range(3)] == [
        bytes([each]) * 2 * size for each in range(3)
    ]
    assert not child.has_ended


@pytest.mark.slow
@for_each(
    "text",
    [
        "c = raw(); time.sleep(1000)",
        "c, secret = raw(); c.send(secret[:1]); time.sleep(1000)",
        "c, secret = raw(); c.send(secret + bytes(7) + b'x'); time.sleep(1000)",
        "c, secret = raw(); c.send(secret + bytes(7) + b'x{'); time.sleep(1000)",
        # Not idle, and never done.
        "c, secret = raw(); c.send(secret + bytes(5) + b'x' + bytes(2))\nwhile True: c.send(b'x'); time.sleep(0.01)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
def test_the_limit_covers_the_whole_answer(text: str, start: Start) -> None:
    child = start(text)
    with pytest.raises(TimeoutError):
        child.ask(b"abc", 1.0)
    assert child.has_ended
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


@pytest.mark.slow
def test_a_request_that_nobody_reads_has_the_same_limit(start: Start) -> None:
    child = start("time.sleep(1000)")
    with pytest.raises(TimeoutError):
        child.ask(b"x" * 50_000_000, 1.0)
    assert child.has_ended


@for_each(
    "text, why",
    [
        ("sys.exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("c, secret = raw(); c.send(secret + bytes(7) + b'x{'); os._exit(4)", "exit code 4"),
        ("c, secret = raw(); c.send(b'{\"a\": 1}' * 10); time.sleep(1000)", "something else was written"),
    ],
)
def test_a_child_that_ends_or_answers_something_else_is_told(text: str, why: str, start: Start) -> None:
    child = start(text)
    with pytest.raises(ChildEndedError, match=why):
        child.ask(b"abc", 60)
    assert child.has_ended


def test_what_watches_a_request_can_end_it(start: Start) -> None:
    child, calls = start("c = raw(); time.sleep(1000)"), []

    def watch() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        child.ask(b"abc", 600, watch)
    assert child.has_ended


def test_prints_and_standard_input_are_no_part_of_an_answer(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    text = "import subprocess\ndef answer(_):\n    print('printed'); subprocess.run(['echo', 'by another'])\n"
    child = start(f"{text}    return sys.stdin.read().encode() + b'own'\nserve(answer)")
    assert child.ask(b"", 60) == b"own"
    assert capfd.readouterr() == ("", "printed\nby another\n")


def test_a_fork_that_returns_answers_nothing(start: Start) -> None:
    child = start("def answer(request):\n    os.fork(); return request\nserve(answer)")
    assert [child.ask(request, 60) for request in (b"1", b"2")] == [b"1", b"2"]


def test_a_pool_starts_as_many_as_are_needed_and_replaces_what_ended(start: Start) -> None:
    pool: ChildPool[ChildProcess] = ChildPool(2)
    both = threading.Barrier(2)

    def work() -> None:
        with pool.child(lambda: start("serve(answer)")) as child:
            both.wait(60)
            pids.append((child.pid, child.ask(b"a", 60)))

    pids: list[tuple[int, bytes]] = []
    for _ in range(2):
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [answer for _, answer in pids] == [b"aa"] * 4
    assert len({pid for pid, _ in pids}) == 2
    with pool.child(lambda: start("serve(answer)")) as child:
        child.end()
    with pool.child(lambda: start("serve(answer)")) as one, pool.child(lambda: start("serve(answer)")) as other:
        assert child not in (one, other)
        assert [one.ask(b"b", 60), other.ask(b"b", 60)] == [b"bb", b"bb"]
    with pool.child(lambda: start("serve(answer)"), lambda each: each is not one) as third:
        assert third is other
        assert one.has_ended
    pool.close()
    assert other.has_ended
