"""The line that the tutorial of a first verdict gives to copy is the same reply as its trace."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from flywheel.cli.demo import judge
from tests.cli.conftest import Run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start" / "first-verdict.md"


def test_the_line_with_a_tool_call_is_judged_as_the_trace_is(flywheel: Run, tmp_path: Path) -> None:
    [line] = re.findall(r"^```json\n(.*)\n```", PAGE.read_text(), re.MULTILINE)
    [shown] = re.findall(r"^```\n(Question\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "replies.jsonl").write_text(line + "\n")
    shutil.copy(ROOT / "examples" / "first_verdict" / "rubric.yaml", tmp_path)
    with judge.running() as address:
        settings = {
            "state": {"dir": "state"},
            "sources": [{"type": "jsonl", "path": "replies.jsonl"}],
            "judge": {"base_url": address, "model": "demo-judge"},
            "filter": {"rubric": "rubric.yaml"},
        }
        (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
        assert flywheel("filter").code == 0
    [task] = flywheel("tasks", "--json").json["tasks"]
    told = flywheel("show", task["task_id"]).out
    when = re.compile(r" \(\S+ \S+ UTC\)")
    assert when.sub("", shown) in when.sub("", told)
