"""Running the command line in this process, as a person would see it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flywheel.cli import main
from tests.factories.config import write_config
from tests.factories.judge_server import JudgeServer
from tests.factories.state import write_state

if TYPE_CHECKING:
    from tests.cli.filter_bench import Bench


@dataclass(frozen=True)
class Ran:
    """Exit code and both outputs."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def fails(self, code: int, *words: str) -> None:
        """It ended with this code, and its stderr has these words."""
        assert self.code == code and all(word in self.err for word in words), self


Run = Callable[..., Ran]


@pytest.fixture
def round_due(tmp_path: Path) -> None:
    """A state in which a round is due, in `state`."""
    from tests.factories.verdict import put_tasks

    write_state(tmp_path / "state", put_tasks, 6, 4)


@pytest.fixture
def due_config(round_due: None, tmp_path: Path) -> Callable[..., Path]:
    """Writes the configuration of a state in which a round is due."""

    def write(**sections: Any) -> Path:
        trigger = {"min_samples": 4, "min_held_out": 2, "cron_min_samples": 1, **sections.pop("trigger", {})}
        return write_config(tmp_path, sources=[], trigger=trigger, gate={"min_tasks": 2, "min_power": 0}, **sections)

    return write


@pytest.fixture
def flywheel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `flywheel ARGUMENTS…` in an empty directory with a state directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLYWHEEL_HOME", str(tmp_path / "home"))
    for name in ("FLYWHEEL_CONFIG", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | Path) -> Ran:
        monkeypatch.setattr("sys.argv", ["flywheel", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Ran(code, out, err)

    return run


@pytest.fixture
def bench(flywheel: Run, tmp_path: Path, judge: JudgeServer) -> Bench:
    """A state to filter, and its judge."""
    from tests.cli.filter_bench import Bench

    return Bench(flywheel, tmp_path, judge)


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    """A judge that accepts what says that it is good; a test may set another `verdict`."""
    from tests.cli.filter_bench import says

    with JudgeServer(says) as judge:
        yield judge
