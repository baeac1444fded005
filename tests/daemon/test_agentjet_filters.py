"""The filters of an AgentJet file: their order, what they decide without a judge, and what is dropped before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from sqlalchemy import Connection, select

from flywheel.config.file import Config, load
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.judging.judging import TaskJudging
from flywheel.daemon.judging.quality_bar import Case
from flywheel.daemon.rounds.suites import require_grader
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import chain_of
from flywheel.records.states import TaskState
from flywheel.store import claims
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from tests.daemon.filter_bench import DEDUPLICATION, WORDY, questions, run, states, tell
from tests.factories.judge_server import JudgeServer
from tests.factories.trace import reply

JUDGE = {
    "type": "llm_evaluate",
    "enabled": True,
    "params": {"custom_rubrics": "Drop what is wrong.", "max_thread": 1},
}
NO_JUDGE = JUDGE | {"enabled": False}
SHORT = {"type": "rules", "params": {"min_answer_length": 3}}
Paste = Callable[..., Config]


@pytest.fixture
def paste(tmp_path: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> Paste:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def pasted(*filters: dict[str, Any], root: str = "ajet", below: Any = None, **own: Any) -> Config:
        tracing = {"base_url": "traces.sqlite", "filters": list(filters)}
        reader = {"type": "tracing", "feedback_tracing": tracing}
        raw = {
            root: {"model": {"path": "a/model"}, "task_reader": reader, **(below or {})},
            "state": {"dir": "state"},
            "judge": {"base_url": judge.base_url, "model": "j", "max_attempts": 1, "retry_undecided_seconds": 0},
            **own,
        }
        (tmp_path / "file.yaml").write_text(yaml.safe_dump(raw))
        return load(tmp_path / "file.yaml")

    return pasted


def decided_by(conn: Connection) -> list[tuple[int, str, str]]:
    columns = schema.verdicts.c.task_id, schema.verdicts.c.outcome, schema.verdicts.c.rubric_hash
    rows = conn.execute(select(*columns).order_by(schema.verdicts.c.id))
    return [(task, outcome, rubric.partition(":")[0] if ":" in rubric else "judge") for task, outcome, rubric in rows]


@pytest.mark.parametrize("root", ["ajet", "astuner"])
async def test_without_its_judge_the_chain_decides_and_no_judge_is_asked(
    root: str, store: Store, paste: Paste, judge: JudgeServer
) -> None:
    config = paste(NO_JUDGE, SHORT, DEDUPLICATION, root=root)
    first, again = questions(WORDY.format(3), WORDY.format(3))
    await tell(store, first, again, *questions(*["x"] * 3 + ["something else"], answer="WRONG")[3:])
    await tell(store, reply(999, query="short?", answer="no"))
    judging = TaskJudging(store, config)
    judging.require_judge()
    estimate = await judging.preview()
    assert (estimate.tasks, estimate.free, estimate.calls) == (4, 4, 0)
    report, seen = await run(store, config)
    assert await states(store) == ["accepted", "rejected", "accepted", "rejected"]
    assert (judge.calls, report.calls, report.accepted, report.rejected, report.error) == (0, 0, 2, 2, None)
    assert {outcome: by for _, outcome, by in await store.read(decided_by)} == {
        "accepted": "chain",
        "rejected": "chain",
    }
    cases = {Case.of_result("r", each).outcome.value for each in seen.values()}
    assert cases == {"accepted", "filtered"}
    verdict = seen[first.span_id].verdict
    assert verdict is not None
    assert (verdict.score, verdict.reason, verdict.results) == (1.0, "accepted by the chain", ())


async def test_the_judge_decides_again_when_it_is_enabled_and_the_chain_when_it_is_not(
    store: Store, paste: Paste, judge: JudgeServer
) -> None:
    await tell(store, *questions("one", "two"))
    await run(store, paste(NO_JUDGE))
    again = TaskJudging(store, paste(NO_JUDGE))
    assert await again.count(rejudge=True) == 0

    judging = TaskJudging(store, paste(JUDGE))
    assert await judging.count(rejudge=True) == 2
    report = await judging.run(rejudge=True)
    assert (judge.calls, report.accepted) == (2, 2)
    assert await judging.count(rejudge=True) == 0


async def test_what_a_chain_without_judge_rejected_is_filtered_again_when_what_it_repeats_is_gone(
    store: Store, paste: Paste, judge: JudgeServer
) -> None:
    await tell(store, *questions(*[WORDY.format(3)] * 3))
    config = paste(DEDUPLICATION, NO_JUDGE)
    await run(store, config)
    assert await states(store) == ["accepted", "rejected", "rejected"]

    def put_back(conn: Connection) -> None:
        move(conn, 1, TaskState.ACCEPTED, TaskState.HELD)
        claims.reject_held(conn, [1])
        for number in (2, 3):
            move(conn, number, TaskState.REJECTED, TaskState.PENDING)

    await store.write(put_back)
    await run(store, config)
    assert await states(store) == ["rejected", "accepted", "rejected"]
    assert judge.calls == 0


async def test_a_chain_of_flywheels_own_runs_before_the_judge(
    store: Store, make: Callable[..., Config], judge: JudgeServer
) -> None:
    await tell(store, *questions("one"))
    config = make(NO_JUDGE, SHORT)
    chain = chain_of(config)
    assert chain is not None
    assert not chain.decides
    await run(store, config)
    assert judge.calls == 1


def test_a_round_needs_the_files_judge_or_is_refused_by_name(paste: Paste, tmp_path: Path) -> None:
    config = paste(NO_JUDGE)
    with pytest.raises(ConfigError, match=r"no enabled `llm_evaluate`.*task_judge\.judge_protocol.*filter\.rubric"):
        require_grader(config, rubric_of(config))
    workflow = {
        "rollout": {"user_workflow": "mine.flow->Flow"},
        "task_judge": {"judge_protocol": "mine.judge->Judge"},
    }
    config = paste(NO_JUDGE, below=workflow)
    require_grader(config, rubric_of(config))

    (tmp_path / "rubric.yaml").write_text("id: r\ncriteria: [{id: a, value: x}]\n")
    config = paste(NO_JUDGE, filter={"rubric": "rubric.yaml"})
    require_grader(config, rubric_of(config))
    enabled = paste(JUDGE)
    require_grader(enabled, rubric_of(enabled))


async def test_the_order_of_the_file_holds_and_only_exact_repetitions_of_accepted_tasks_are_dropped_before_the_judge(
    store: Store, paste: Paste, judge: JudgeServer
) -> None:
    config = paste(JUDGE, DEDUPLICATION, SHORT)
    chain = chain_of(config)
    assert chain is not None
    assert chain.before == ()
    assert len(chain.after) == 2
    assert not any("keep_order" in notice for notice in chain.notices)

    wrong, *others = questions("is it?", *[WORDY.format(3)] * 3, answer="It is four.")
    right, same, other = others
    wrong = replace(wrong, answer="WRONG")
    await tell(store, wrong, right)
    await run(store, config)
    assert judge.calls == 2
    assert await states(store) == ["rejected", "accepted"]

    # The same question and answer; another answer, which the judge sees; and what repeats a rejected task.
    rejected_again = questions(*["x"] * 4, "is it?", answer="WRONG")[-1]
    await tell(store, same, replace(other, answer="quite another one"), rejected_again)
    report, seen = await run(store, config)
    assert judge.calls == 4
    assert report.calls == 2
    dropped = seen[same.span_id]
    assert dropped.repeats is not None
    assert (dropped.repeats.method, dropped.repeats.similarity, dropped.paid) == ("exact", 1.0, None)
    assert seen[other.span_id].paid is not None
    assert await states(store) == ["rejected", "accepted", "rejected", "rejected", "rejected"]


async def test_without_deduplication_in_the_file_nothing_is_dropped(
    store: Store, paste: Paste, judge: JudgeServer
) -> None:
    config = paste(JUDGE, SHORT)
    first, again = questions(WORDY.format(3), WORDY.format(3))
    await tell(store, first)
    await run(store, config)
    await tell(store, again)
    await run(store, config)
    assert judge.calls == 2
    assert await states(store) == ["accepted", "accepted"]
