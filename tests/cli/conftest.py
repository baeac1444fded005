"""Running the command line in this process, as a person would see it."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli import app, main
from flywheel.store.kernel.database import Store

for name in app.MODULES:
    # Commands are listed in the order in which their modules are imported, whatever a test module imports first.
    importlib.import_module(f"flywheel.cli.{name}")


@dataclass(frozen=True)
class Ran:
    """Exit code and both outputs."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def round_due(tmp_path: Path) -> None:
    """A state in which a round is due, in `state`."""
    from tests.daemon.rounds.test_rounds import put_tasks

    async def fill() -> None:
        store = await Store.open(tmp_path / "state")
        await store.write(put_tasks, 6, 4)
        await store.close()

    asyncio.run(fill())


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
