"""What `flywheel status` says that nobody would look for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flywheel.cli.status import _calls
from flywheel.records.states import Split
from tests.cli.conftest import Run
from tests.cli.filter_bench import Bench
from tests.factories.config import write_config
from tests.factories.state import write_state
from tests.factories.trace import on_both_sides, put_replies, replies_on, reply, write_lines


@pytest.mark.parametrize("side", Split)
def test_a_side_that_stays_empty_is_explained(flywheel: Run, tmp_path: Path, side: Split) -> None:
    first, *_ = replies_on(side, 1, query="Hello?")
    write_state(tmp_path / "home", put_replies, first, *(reply(1000 + n, query="Hello?") for n in range(99)))
    told = flywheel("status", "--json").json["warnings"]
    empty = "held out" if side is Split.TRAIN else "for training"
    why = "all 100 conversations begin alike, and such conversations are in one split"
    assert told == [f"no task is {empty}: {why}"]
    assert told[0] in flywheel("status").out


def test_few_conversations_and_the_ratio_explain_it_too(flywheel: Run, tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_state(home, put_replies, *(reply(n, query=f"Who wrote book {n}?") for n in (1, 2)), train_ratio=1.0)
    (tmp_path / "flywheel.yaml").write_text("ingest: {train_ratio: 1.0}\n")
    (told,) = flywheel("status", "--json").json["warnings"]
    assert "no task is held out: by ingest.train_ratio 1 about 0% of conversations are" in told
    assert "2 conversations begin in 2 ways" in told


def test_nothing_is_said_where_both_sides_have_some_or_there_is_nothing(flywheel: Run, tmp_path: Path) -> None:
    assert flywheel("status", "--json", "--set", "sources=[]").json["warnings"] == []
    write_state(tmp_path / "home", put_replies, *on_both_sides(2, 1))
    assert flywheel("status", "--json").json["warnings"] == []


def test_status_says_how_many_conversations_are_missing(flywheel: Run, tmp_path: Path) -> None:
    write_lines(tmp_path / "lines.jsonl", {"question": "1+1?", "answer": "2"})
    write_config(tmp_path, sources=[{"type": "jsonl", "path": "lines.jsonl"}])
    assert flywheel("ingest").code == 0
    missing = flywheel("status", "--json").json["gate"]["missing"]
    assert missing > 30
    told = flywheel("status").out
    assert f"0 held out for the gate (0 conversations, {missing} more needed)" in told
    assert f"0 of {missing} held-out conversations: with 0, the gate would detect a gain of 10 points" in told


CUT = "tasks.jsonl was cut by another program"


@pytest.mark.slow
@pytest.mark.parametrize("command", [("filter",), ("ingest",), ("run", "--once")])
def test_a_task_file_that_another_program_has_cut_is_told(bench: Bench, command: tuple[str, ...]) -> None:
    bench.lines(*["a good answer"] * 6)
    assert CUT not in bench("filter").err + bench("status").out
    path = bench.folder / "state" / "tasks.jsonl"
    os.truncate(path, path.stat().st_size // 2)
    for _ in range(2):
        assert CUT in bench(*command).err
        assert CUT in " ".join(bench("status").out.split())
        assert any(CUT in each for each in bench("status", "--json").json["warnings"])
        bench.lines("another good answer")


def test_calls_that_were_refused_or_are_to_be_erased_are_shown() -> None:
    calls = {"condition": "ok", "calls": 7, "missed": 0, "dropped": 0, "refused": 1_200, "to_erase": 3}
    assert _calls(calls) == "calls: 7 pulled, 1,200 were not to be recorded, 3 to be erased there"
