"""A soak beside Studio servers that write as they do: no write fails, no reply is missed, the file stays theirs.

It runs in the background of the tests of its group (`tests.sources.studio.beside`). This test waits for its end.
`make test-soak` stretches the same commits over ten minutes.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.sources.studio.beside import COMMITS


@pytest.mark.slow
@pytest.mark.last
@pytest.mark.timeout(3000)
def test_a_soak_beside_studio(beside_studio: subprocess.Popen[bytes]) -> None:
    folder = Path(str(beside_studio.args[-2]))  # type: ignore[index]
    code = beside_studio.wait()
    log = (folder / "log").read_text(errors="replace")
    assert code == 0, log[-3000:]
    found = json.loads((folder / "result.json").read_text())
    for name in ("old", "new_v1"):
        of = found[name]
        assert of["failures"] == [], "a span of Studio's was lost"
        assert of["commits"] >= COMMITS
        assert of["spans"] > 25_000
        assert of["differences"] == []
        # The journal is the writer's own.
        assert set(of["names"]) <= {"database.sqlite", "database.sqlite-journal"}
        assert of["left"] == ["database.sqlite"]
        assert of["integrity"] == [["ok"]]
        assert of["same_as_its_twin"]
        assert of["condition"] == "ok"
        assert of["longest_read_ms"] > 0
    assert found["retold"] > 0, "no look back found what was changed in place"
    assert found["balanced"]
    assert found["exported_twice"] == []
    assert found["exported_are_tasks"]
    assert found["daemon"] == 0
    assert "Traceback" not in log
