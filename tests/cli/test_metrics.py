"""The metrics of sources by `flywheel status --metrics`, in a form that Prometheus reads, and the conditions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from flywheel.sources.otlp.inbox import inbox_path
from tests.cli.conftest import Run
from tests.factories.metrics import by, needs_promtool, parsed, promtool
from tests.sources.studio.writer import DATA

ROOT = Path(__file__).parents[2]


def test_a_source_that_is_read_no_more_has_no_condition_that_could_raise_an_alert(
    flywheel: Run, tmp_path: Path
) -> None:
    kept, left = (Path(shutil.copy(DATA / f"{name}.sqlite", tmp_path)) for name in ("new_v2", "old"))
    config = tmp_path / "flywheel.yaml"
    config.write_text(json.dumps({"state": {"dir": "home"}, "sources": [{"path": str(kept)}, {"path": str(left)}]}))
    assert flywheel("ingest").code == 0
    mistyped = tmp_path / "databse.sqlite"
    assert flywheel("ingest", "--source", mistyped).code == 1
    config.write_text(json.dumps({"state": {"dir": "home"}, "sources": [{"path": str(kept)}]}))
    left.unlink()

    metrics = parsed(flywheel("status", "--metrics").out)
    assert by(metrics["flywheel_source_condition"], "source", "condition") == {f"{kept} ok": 1}
    assert set(by(metrics["flywheel_source_tasks"], "source")) == {str(kept), str(left)}
    shown = " ".join(flywheel("status").out.split())
    assert f"{left} ok, not in the configuration, generation 1" in shown
    assert str(mistyped) not in shown
    assert {each["path"]: each["configured"] for each in flywheel("status", "--json").json["sources"]} == {
        str(kept): True,
        str(left): False,
    }


def test_files_of_a_directory_and_inboxes_are_in_the_configuration(flywheel: Run, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    inbox = Path(shutil.copy(DATA / "new_v2.sqlite", tmp_path / "inbox.sqlite"))
    at = inbox_path(tmp_path / "home", "127.0.0.1:4318")
    at.parent.mkdir(parents=True)
    inbox.rename(at)
    sources = [{"type": "jsonl", "path": str(lines)}, {"type": "otlp"}]
    (tmp_path / "flywheel.yaml").write_text(json.dumps({"state": {"dir": "home"}, "sources": sources}))
    assert flywheel("ingest").code == 0
    found = flywheel("status", "--json").json["sources"]
    assert {each["path"]: each["configured"] for each in found} == {str(lines / "a.jsonl"): True, str(at): True}


@needs_promtool
def test_prometheus_finds_nothing_wrong_with_the_metrics(flywheel: Run, tmp_path: Path) -> None:
    database = str(shutil.copy(DATA / "new_v2.sqlite", tmp_path))
    (tmp_path / "flywheel.yaml").write_text(json.dumps({"state": {"dir": "home"}, "sources": [{"path": database}]}))
    assert flywheel("ingest").code == 0
    promtool("check", "metrics", text=flywheel("status", "--metrics").out)


def test_every_condition_is_on_the_page(flywheel: Run) -> None:
    page = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text()
    named = set(re.findall(r"^\| `([\w' ]+)` \|", page.split("## Conditions of sources")[1].split("\n## ")[0], re.M))
    code = "\n".join(
        (ROOT / "flywheel" / "sources" / "studio" / name).read_text() for name in ("database.py", "schema.py")
    )
    raised = set(re.findall(r'^        "([\w\' ]{4,16})",$', code, re.M)) | set(
        re.findall(r'fault\(.*, "([\w\' ]+)"(?:, retry=\w+)?\)$', code, re.M)
    )
    assert {"missing", "denied", "locked", "damaged", "unknown schema"} < raised
    assert raised - named == set()
