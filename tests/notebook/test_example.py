"""The example notebook runs from its first cell to its last."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flywheel.cli.demo import judge as scripted_judge
from tests.factories.judge_server import JudgeServer

ROOT = Path(__file__).parents[2]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    cells = json.loads((ROOT / "examples" / "notebook" / "replies.ipynb").read_text())["cells"]
    (tmp_path / "notebook").mkdir()
    (tmp_path / "judge_100").symlink_to(ROOT / "examples" / "judge_100")
    monkeypatch.chdir(tmp_path / "notebook")
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    names: dict[str, Any] = {}
    with JudgeServer(lambda question, answer: len(answer) > len(question)) as judge:
        monkeypatch.setenv("JUDGE_URL", judge.base_url)
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
        calls = judge.calls
    assert calls > 0
    assert len(names["verdicts"]) == len(names["replies"]) == 100
    assert {verdict.outcome.value for verdict in names["verdicts"]} == {"accepted", "rejected"}
    assert len(names["table"]) == 100
    assert 0 < names["results"].mean().min() < 1


def test_the_cookbook_judges_as_it_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "cookbook.md").read_text()
    [(code, shown)] = re.findall(r"```\n(import json\n.*?)```\n\nIt prints `([^`]*)`", page, re.DOTALL)
    monkeypatch.chdir(ROOT / "examples" / "judge_100")
    with scripted_judge.running() as address:
        exec(code.replace("http://127.0.0.1:4401/v1", address), {})
    assert capsys.readouterr().out == f"{shown}\n"
