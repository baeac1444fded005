"""What `flywheel ingest` and `flywheel status` look like, on terminals of several widths and in a pipe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.terminal import in_terminal
from tests.sources.studio.writer import DATA

FOLDER = Path("a-rather-long-name-of-a-folder") / "for-the-database-of-an-agentscope-studio" / "of-some-team"
FACTS = ("ok, generation 1", "105 replies = 96 tasks", "skipped: 3 error", "open traces, longest read")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / FOLDER).mkdir(parents=True)
    path = Path(shutil.copy(DATA / "old.sqlite", tmp_path / FOLDER / "database.sqlite"))
    settings = {"state": {"dir": "home"}, "sources": [{"path": str(path)}, {"path": "not-there.sqlite"}]}
    (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
    return path


@pytest.mark.slow
def test_nothing_is_cut_on_any_width(source: Path, tmp_path: Path) -> None:
    for command in ("ingest", "status"):
        for columns in (80, 120):
            seen = in_terminal(tmp_path, [command], columns=columns, home=tmp_path)
            # One source is missing, which fails the ingestion and not the look.
            assert seen.code == (1 if command == "ingest" else 0)
            facts = [line for line in seen.lines if not line.startswith("flywheel: ")]
            assert "…" not in "".join(facts)
            assert all(len(line) <= columns for line in facts)
            together = "".join(line.strip() for line in facts)
            assert f"~/{FOLDER}/database.sqlite" in together
            for fact in FACTS:
                assert any(fact in line for line in facts), (fact, seen.screen)
            assert any(line.strip().startswith("missing, ") for line in facts)
            assert len([line for line in facts if "pipeline_stage" in line]) == (1 if command == "ingest" else 2)


def test_a_pipe_gets_unbroken_lines(flywheel: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(source.parent.parent))
    for ran in (flywheel("ingest"), flywheel("status")):
        assert "  ~/of-some-team/database.sqlite" in ran.out.splitlines()[0 if "tasks   96" in ran.out else 2]
        for fact in FACTS:
            assert any(fact in line for line in ran.out.splitlines())
        assert not any(line != line.rstrip() for line in ran.out.splitlines())


def test_json_tells_condition_and_reading_of_every_source(flywheel: Run, source: Path) -> None:
    for ran in (flywheel("ingest", "--json"), flywheel("status", "--json")):
        there, missing = ran.json["sources"]
        assert (there["path"], there["condition"], there["open_traces"]) == (str(source), "ok", 0)
        assert there["longest_read_ms"] > 0
        assert (there["replies"], there["tasks"], sum(there["skipped"].values()), there["dead"]) == (105, 96, 9, 0)
        assert (missing["condition"], missing["replies"]) == ("missing", 0)
