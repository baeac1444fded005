"""A task file that AgentJet wrote where Flywheel's goes: nothing that is in it is judged or written again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.daemon.judging.judging import TaskJudging
from flywheel.judge.prompt import parse_sections
from flywheel.sources.audit import deep_audit
from flywheel.store.views import balance
from tests.factories.config import make_config
from tests.factories.judge_server import JudgeServer
from tests.factories.state import ingest, open_state
from tests.sources.studio.writer import DATA


def agentjets(query: str, answer: str) -> dict[str, Any]:
    """A line as AgentJet's tracing reader writes it."""
    return {
        "main_query": query,
        "init_messages": [],
        "task_id": "no_id",
        "env_type": "no_env",
        "metadata": {"qa_hash": hashlib.sha256(f"{query}\n{answer}".encode()).hexdigest(), "answer": answer},
    }


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def config(folder: Path, judge: JudgeServer) -> Config:
    return make_config(
        folder,
        sources=[{"path": str(DATA / "new_v2.sqlite")}],
        ingest={"output": "tasks.jsonl"},
        judge={"base_url": judge.base_url, "model": "judge"},
    )


async def ingested(settings: Config) -> dict[str, Any]:
    (report,) = await ingest(settings)
    assert report.error is None
    return report.as_json()


async def test_nothing_in_it_is_judged_or_written_again(tmp_path: Path) -> None:
    with JudgeServer(lambda *_: True) as judge:
        (tmp_path / "first").mkdir()
        await ingested(config(tmp_path / "first", judge))
        every = lines_of(tmp_path / "first" / "tasks.jsonl")
        pairs = sorted({(line["main_query"], line["answer"]) for line in every})
        known, new = pairs[::2], set(pairs[1::2])
        expected = [line for line in every if (line["main_query"], line["answer"]) in new]

        home = tmp_path / "second"
        home.mkdir()
        written = "".join(json.dumps(agentjets(*pair), ensure_ascii=False) + "\n" for pair in known)
        (home / "tasks.jsonl").write_text(written + '{"main_query": "torn')
        settings = config(home, judge)
        report = await ingested(settings)
        assert report["tasks"] == len(expected)
        assert report["skipped"]["in_task_file"] == len(every) - len(expected) > 10
        assert (home / "tasks-1.jsonl").read_text() == written + '{"main_query": "torn', "every byte is kept"
        assert [line["task_id"] for line in lines_of(home / "tasks.jsonl")] == [line["task_id"] for line in expected]

        # The next process finds it where it was set aside.
        again = await ingested(settings)
        assert (again["tasks"], again["new"], again["skipped"]) == (report["tasks"], 0, report["skipped"])
        async with open_state(settings.state_dir) as store:
            judged = await TaskJudging(store, settings).run()
            assert judged.judged == len(expected)
            assert 10 < judge.calls <= len(expected)
            shown = [parse_sections(request["messages"][-1]["content"]) for request in judge.requests]
            assert not {(each["QUESTION"], each["ANSWER"]) for each in shown} & set(known)
            assert (await store.read(balance.balance)).balanced
            found = await deep_audit(store, settings)
            assert found.problems == []


@pytest.mark.parametrize(
    "line",
    [
        {"task_id": "x", "main_query": "q", "metadata": {"qa_hash": "zz", "split": "train", "extra_json": "{}"}},
        {"task_id": "x", "main_query": "q", "metadata": {}},
    ],
)
async def test_other_files_are_not_taken_for_one(tmp_path: Path, line: dict[str, Any]) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(line) + "\n")
    with JudgeServer() as judge:
        report = await ingested(config(tmp_path, judge))
    assert "in_task_file" not in report["skipped"]
    assert lines_of(tmp_path / "tasks.jsonl")[0] == line
    assert not (tmp_path / "tasks-1.jsonl").exists()
