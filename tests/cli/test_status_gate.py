"""`flywheel status` tells people how many held-out conversations are missing for a round."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_status_says_how_many_conversations_are_missing(flywheel: Run, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"question": "1+1?", "answer": "2"}\n')
    settings = {"state": {"dir": "home"}, "sources": [{"type": "jsonl", "path": str(lines)}]}
    (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
    assert flywheel("ingest").code == 0
    missing = flywheel("status", "--json").json["gate"]["missing"]
    assert missing > 30
    told = flywheel("status").out
    assert f"0 held out ({missing} more needed)" in told
    assert f"0 of {missing} held-out conversations: with 0, the gate would detect a gain of 10 points" in told
