"""A signal is heard although nothing more fits into the pipe that wakes the event loop."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, signal
from flywheel.system.signals import on_signal

async def main():
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    on_signal(loop, signal.SIGTERM, heard.set)
    try:
        while True:
            loop._csock.send(b"\\0")
    except BlockingIOError:
        os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(heard.wait(), 60)

asyncio.run(main())
print("heard", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_a_signal_is_heard_while_the_pipe_is_full_and_ends_the_process_after_the_loop() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=120, check=False)
    assert ran.stdout == b"heard\n", ran.stderr
    assert ran.returncode == -signal.SIGTERM
