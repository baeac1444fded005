"""Processes that are started end, whatever they have started in turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from demo.parts import Part, PartError, tail

ORPHANS = """
import subprocess, sys, time
from pathlib import Path
from demo.parts import Part, adopt_orphans, end_descendants

adopt_orphans()
stubborn = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('on', flush=True); time.sleep(600)"
# A process that starts one that will not go, in a session of its own, and dies: nobody's child but ours.
parent = f'''
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {stubborn!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
'''
part = Part("parent", [sys.executable, "-c", parent], Path(sys.argv[1]), {})
assert part.wait(60)
end_descendants(1.0)
print("ended", flush=True)
"""


@pytest.mark.slow
def test_no_descendant_is_left(tmp_path: Path) -> None:
    log = tmp_path / "parent.log"
    run = subprocess.run(
        [sys.executable, "-c", ORPHANS, str(log)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout.strip() == "ended", run.stderr
    assert not psutil.pid_exists(int(log.read_text()))


@pytest.mark.slow
def test_a_part_that_ends_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print('early'); print(); print('the reason'); raise SystemExit(7)"
    part = Part("flywheel run", [sys.executable, "-c", code], tmp_path / "run.log", {})
    assert part.wait(60)
    with pytest.raises(PartError, match=r"flywheel run ended with code 7") as died:
        part.check()
    assert str(tmp_path / "run.log") in str(died.value)
    assert "the reason" in str(died.value)


@pytest.mark.slow
def test_a_part_that_runs_is_asked_to_stop(tmp_path: Path) -> None:
    part = Part("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log", {"A": "b"})
    part.check()
    part.ask_to_stop()
    assert part.wait(60)
    with pytest.raises(PartError, match="ended by signal 15"):
        part.check()


def test_the_tail_is_short(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\n" + b"x" * 1000 + b"\n\n" + b"".join(b"%d\n" % number for number in range(99)))
    assert tail(log, 2) == "97\n98"
    assert len(tail(log, 200).splitlines()[1]) == 300
