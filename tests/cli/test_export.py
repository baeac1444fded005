"""`flywheel export` as a person runs it: what it writes, what it says, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from flywheel.records.states import Split, TaskState
from flywheel.records.verdict import Outcome
from flywheel.store.kernel.schema import tasks
from flywheel.store.views import task_list
from flywheel.system import own_package
from tests import warm
from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.factories.documented_json import compare, documented
from tests.factories.round import put_round
from tests.factories.state import open_state, write_state
from tests.training.data.formats.filling import (
    Judged,
    add_verdict,
    bad,
    every_kind,
    fill,
    good,
    later_turn,
    lines,
    reply,
)

VERL = pytest.param("verl", marks=pytest.mark.training)
FORMATS = ["agentjet", "trinity", "trl-grpo", "trl-sft", "trl-dpo"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Every kind of task accepted, one of each other state, one held out, and a pair of replies to one prompt."""
    entries = [good(told) for told in every_kind()]
    for number, state in enumerate(state for state in TaskState if state is not TaskState.ACCEPTED):
        decided = state in (TaskState.RESERVED, TaskState.CONSUMED, TaskState.REJECTED)
        entries.append(Judged(reply(20 + number), state, 0.25 if decided else None))
    entries.append(Judged(reply(40), split=Split.HELD_OUT))
    entries += [good(reply(50, query="Two and two?")), bad(reply(51, query="Two and two?"))]
    home = tmp_path / "home"
    asyncio.run(fill(home, entries))
    return home


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", [*FORMATS, VERL])
def test_each_format_makes_a_file_and_leaves_the_state_alone(flywheel: Run, home: Path, name: str) -> None:
    before = snapshot(home)
    ran = flywheel("export", "--format", name, "--json")
    assert ran.code == 0, ran.err
    compare(ran.json, documented("export"), "export")
    suffix = "parquet" if name == "verl" else "jsonl"
    assert ran.json["out"] == f"{name}.{suffix}"
    assert ran.json["lines"] > 0
    out = home.parent / ran.json["out"]
    if suffix == "jsonl":
        assert len(lines(out)) == ran.json["lines"]
    assert snapshot(home) == before
    assert sorted(path.name for path in home.parent.iterdir()) == sorted([home.name, out.name])


def test_the_report_counts_what_was_left_out(flywheel: Run, home: Path) -> None:
    ran = flywheel("export", "--format", "trl-sft", "--out", "-")
    assert ran.code == 0
    written = [json.loads(line) for line in ran.out.split("\n") if line]
    assert len(written) == 9
    assert ran.err.splitlines()[0] == "9 lines in stdout (trl-sft, accepted, train)"
    reasons = [line for line in ran.err.splitlines() if line.startswith("left out 1: ")]
    assert len(reasons) == 4
    assert any("image" in line for line in reasons)


def test_the_score_is_of_the_verdict_that_decided(flywheel: Run, tmp_path: Path) -> None:
    asyncio.run(fill(tmp_path / "home", [good(reply(1), 0.75), bad(reply(2), 0.125), Judged(reply(3), score=None)]))

    def judge_again(conn: Connection) -> list[task_list.ExportedTask]:
        # Another rubric rejected the first task before the old rubric came back.
        add_verdict(conn, 1, Outcome.REJECTED, 0.0, "another rubric")
        add_verdict(conn, 2, Outcome.UNDECIDED, None, "another rubric")
        return task_list.with_verdicts(conn, [3, 1, 2, 99])

    found = write_state(tmp_path / "home", judge_again)
    assert [(one.id, one.outcome, one.score) for one in found] == [
        (3, None, None),
        (1, Outcome.ACCEPTED, 0.75),
        (2, Outcome.REJECTED, 0.125),
    ]


def test_a_state_of_many_pages_comes_whole_and_in_order(flywheel: Run, tmp_path: Path) -> None:
    asyncio.run(fill(tmp_path / "home", [good(reply(number)) for number in range(950)]))
    assert flywheel("export", "--format", "trl-grpo").code == 0
    written = lines(tmp_path / "trl-grpo.jsonl")
    assert [line["answer"] for line in written] == [f"\\boxed{{{number + 1}}}" for number in range(950)]


def test_the_richest_line_is_the_first(flywheel: Run, tmp_path: Path) -> None:
    entries = [Judged(reply(number), TaskState.PENDING, None) for number in range(300)]
    entries.append(good(later_turn(300)))
    asyncio.run(fill(tmp_path / "home", entries))
    assert flywheel("export", "--format", "trl-grpo", "--state", "all").code == 0
    scores = [line["score"] for line in lines(tmp_path / "trl-grpo.jsonl")]
    assert scores == [1.0] + [None] * 300


def test_files_are_replaced_only_by_force_and_that_of_metrics_is_never_that_of_the_records(
    flywheel: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text("precious")
    for option in ("--out", "--metrics"):
        ran = flywheel("export", "--format", "trl-sft", option, mine)
        assert (ran.code, mine.read_text()) == (1, "precious")
        assert "--force" in ran.err and option in ran.err
        assert not (tmp_path / "trl-sft.jsonl").exists()
    (tmp_path / "link").symlink_to(mine)
    for out, metrics in ((mine, mine), (mine, tmp_path / "link"), ("new", "./new"), ("-", "-")):
        ran = flywheel("export", "--format", "trl-sft", "--out", out, "--metrics", metrics, "--force")
        assert (ran.code, mine.read_text()) == (2, "precious")
    assert flywheel("export", "--format", "trl-sft", "--metrics", mine, "--force").code == 0
    assert "lexical_diversity" in mine.read_text()
    assert flywheel("export", "--format", "agentjet", "--out", mine, "--force").code == 0
    assert len(lines(mine)) == 13
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    flywheel("export", "--format", "verl").fails(1, f"pip install {own_package.requirement('cpu')}")
    assert not (tmp_path / "verl.parquet").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--format", "trl-dpo", "--state", "all"],
        ["--format", "trl-sft", "--margin", "0.1"],
        ["--format", "trl-dpo", "--margin", "-1"],
        ["--format", "trl-sft", "--out", "-", "--json"],
        [],
        ["--format", "xlsx"],
    ],
    ids=" ".join,
)
def test_options_that_do_not_go_together_are_refused(flywheel: Run, home: Path, wrong: list[str]) -> None:
    ran = flywheel("export", *wrong)
    assert ran.code == 2
    assert "xlsx" not in wrong or all(name in ran.err for name in (*FORMATS, "verl"))
    assert not [path for path in home.parent.iterdir() if path != home]


def test_new_exports_are_private_and_an_existing_file_keeps_its_mode(
    flywheel: Run, home: Path, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        for force in ([], ["--force"]):
            files = ["trl-sft.jsonl", "metrics.jsonl"]
            assert flywheel("export", "--format", "trl-sft", "--metrics", files[1], *force).code == 0
            modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in files]
            assert modes == ([0o644, 0o644] if force else [0o600, 0o600])
            for name in files:
                (tmp_path / name).chmod(0o644)
        (tmp_path / "source.jsonl").write_text('{"main_query": "1 + 1", "answer": "2"}\n')
        config = write_config(tmp_path, sources=[{"type": "jsonl", "path": "source.jsonl"}])
        assert flywheel("ingest", "-c", config, "--out", "ingested.jsonl").code == 0
        assert stat.S_IMODE((tmp_path / "ingested.jsonl").stat().st_mode) == 0o600
        assert flywheel("ingest", "-c", config, "--out", tmp_path / "state" / "a.jsonl").code == 1
    finally:
        os.umask(before)


@pytest.mark.parametrize("option", ["--out", "--metrics"])
@pytest.mark.parametrize("through", ["", "link"])
def test_nothing_is_exported_into_the_state_where_an_erasure_would_miss_it(
    flywheel: Run, home: Path, tmp_path: Path, option: str, through: str
) -> None:
    (tmp_path / "link").symlink_to(home)
    place = (tmp_path / "link" if through else home) / "new.jsonl"
    flywheel("export", "--format", "trl-sft", option, place).fails(1, "it is in the state directory")
    assert not place.exists()


def test_what_people_say_counts_more_than_the_verdict(flywheel: Run, home: Path) -> None:
    before = {line["task_id"]: line for line in lines_of(flywheel, home)}
    [rejected] = [
        line["task_id"]
        for line in json.loads(flywheel("tasks", "--state", "rejected", "--json").out)["tasks"]
        if line["task_id"] not in before
    ][:1]
    disliked, disputed, *_ = before
    for task, by, label in (
        (disliked, "ann", "accept"), (disliked, "ann", "reject"), (rejected, "ann", "accept"),
        (disputed, "ann", "reject"), (disputed, "bob", "accept"),
    ):  # fmt: skip
        assert flywheel("label", task, label, "--by", by).code == 0
    ran = flywheel("export", "--format", "trl-sft", "--force", "--json")
    after = {line["task_id"]: line for line in lines(home.parent / "trl-sft.jsonl")}
    assert after.keys() == before.keys() - {disliked} | {rejected}
    assert after[rejected]["score"] == 1.0
    assert ran.json["left_out"]["most people reject the reply"] == 1
    assert "left out 1: most people reject the reply" in flywheel("export", "--format", "trl-sft", "--force").out
    of_rejected = flywheel("export", "--format", "agentjet", "--state", "rejected", "--json").json
    assert of_rejected["left_out"]["most people accept the reply"] == 1
    kept = {line["task_id"] for line in lines(home.parent / "agentjet.jsonl")}
    assert disliked in kept and rejected not in kept


def test_a_pair_follows_what_people_say(flywheel: Run, home: Path) -> None:
    assert flywheel("export", "--format", "trl-dpo").code == 0
    [pair] = lines(home.parent / "trl-dpo.jsonl")
    for task, label in ((pair["chosen_task_id"], "reject"), (pair["rejected_task_id"], "accept")):
        assert flywheel("label", task, label).code == 0
    assert flywheel("export", "--format", "trl-dpo", "--force").code == 0
    [other] = lines(home.parent / "trl-dpo.jsonl")
    assert (other["chosen_task_id"], other["rejected_task_id"]) == (pair["rejected_task_id"], pair["chosen_task_id"])
    assert (other["chosen_score"], other["rejected_score"]) == (1.0, 0.0)


def test_a_home_directory_is_expanded_as_it_is_checked(
    flywheel: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user := tmp_path / "user").mkdir()
    monkeypatch.setenv("HOME", str(user))
    ran = flywheel("export", "--format", "trl-sft", "--out=~/x.jsonl", "--metrics=~/m.jsonl")
    assert ran.code == 0
    assert sorted(path.name for path in user.iterdir()) == ["m.jsonl", "x.jsonl"]
    assert f"in {user}/x.jsonl" in ran.out
    flywheel("export", "--format", "trl-sft", "--out=~/x.jsonl").fails(1, "it exists")
    flywheel("export", "--format", "trl-sft", "--out=~nobody-has-this-name/x.jsonl").fails(78, "home directory")
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("out", ["", "missing/x.jsonl"])
def test_a_place_that_cannot_be_written_is_named(flywheel: Run, home: Path, tmp_path: Path, out: str) -> None:
    ran = flywheel("export", "--format", "agentjet", "--out", tmp_path / out)
    assert ran.code == 1
    assert ran.err.startswith(f"flywheel: cannot write {tmp_path / out}")
    assert "--out" in ran.err


def test_no_task_and_no_state_say_what_there_is(flywheel: Run, tmp_path: Path) -> None:
    flywheel("export", "--format", "agentjet").fails(1, "has no task", "flywheel ingest")
    assert not (tmp_path / "home").exists()
    asyncio.run(fill(tmp_path / "home", [Judged(reply(1), TaskState.PENDING, None), bad(reply(2))]))
    flywheel("export", "--format", "agentjet").fails(1, "1 pending (train), 1 rejected (train)")
    flywheel("export", "--format", "trl-dpo").fails(1, "no reply with the other verdict")
    assert not list(tmp_path.glob("*.jsonl"))


def run_alone(home: Path, *arguments: str, limit: str = "") -> tuple[int, str]:
    # Buffered, as for everybody: what a full disk refused is still there when the program ends.
    environment = {**os.environ, "FLYWHEEL_HOME": str(home), "PYTHONUNBUFFERED": ""}
    code = (
        f"import resource, sys; from flywheel.cli import main; sys.argv = ['flywheel', *sys.argv[1:]]; {limit}main()"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = warm.run(command, cwd=home.parent, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl-sft", VERL])
def test_a_full_disk_leaves_no_file_and_a_full_device_is_an_error(home: Path, name: str) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
    code, err = run_alone(home, "export", "--format", name, "--out", "out", limit=limit)
    assert (code, len(err.splitlines())) == (1, 1)
    assert err.startswith("flywheel: cannot write out: File too large.")
    assert [path.name for path in home.parent.iterdir()] == [home.name]
    code, err = run_alone(home, "export", "--format", name, "--out", "/dev/full")
    assert (code, len(err.splitlines())) == (1, 1)
    assert err.startswith("flywheel: cannot write /dev/full: No space left on device.")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--state", "accepted"], 13), (["--state", "pending"], 2), (["--state", "rejected"], 2),
        (["--state", "all"], 18), (["--split", "train"], 13), (["--split", "held-out"], 1), (["--split", "all"], 14),
    ],
)  # fmt: skip
def test_state_and_split_choose_and_rounds_take_nothing_away(
    flywheel: Run, home: Path, options: list[str], expected: int
) -> None:
    ran = flywheel("export", "--format", "agentjet", *options, "--json")
    assert ran.json["lines"] == expected
    splits = {line["metadata"]["split"] for line in lines(home.parent / "agentjet.jsonl")}
    wanted = {"held-out": {"held-out"}, "all": {"train", "held-out"}}.get(options[1], {"train"})
    assert splits == ({"train"} if options[0] == "--state" else wanted)


def test_the_export_keeps_out_of_a_running_writers_way(flywheel: Run, home: Path) -> None:
    async def beside() -> int:
        async with open_state(home) as store:
            ran = await asyncio.to_thread(flywheel, "export", "--format", "agentjet", "--json")
            assert ran.code == 0, ran.err
            return len(await store.read(lambda conn: conn.execute(select(tasks.c.id)).all()))

    assert asyncio.run(beside()) == 12 + len(TaskState)


def test_metrics_of_the_replies_are_written_beside_them(flywheel: Run, home: Path) -> None:
    """Loss is there where a round has measured it; the newest counts."""
    keys = [line["task_id"] for line in lines_of(flywheel, home)]

    def measured(conn: Connection) -> None:
        for number, loss in ((1, 2.5), (2, 1.5)):
            path = home / "rounds" / f"r{number:04d}"
            path.mkdir(parents=True)
            line = {"task_id": keys[0], "loss": loss, "tokens": 7, "outcome": "released"}
            (path / "selection.jsonl").write_text(json.dumps(line) + "\n")
            put_round(conn, number, path=path)

    write_state(home, measured)
    ran = flywheel("export", "--format", "trl-sft", "--force", "--metrics", "metrics.jsonl")
    assert ran.code == 0, ran.err
    found = {line["task_id"]: line for line in lines(home.parent / "metrics.jsonl")}
    assert found.keys() == set(keys)
    assert [line["loss"] for line in found.values() if line["loss"] is not None] == [1.5]
    assert found[keys[0]]["loss"] == 1.5
    assert all(line.keys() == {"task_id", "tokens", "lexical_diversity", "loss"} for line in found.values())
    assert all(0 < line["lexical_diversity"] <= 1 for line in found.values())
    flywheel("export", "--format", "trl-dpo", "--metrics", str(home.parent / "no" / "m.jsonl")).fails(
        1, "whose directory exists"
    )


def lines_of(flywheel: Run, home: Path) -> list[dict[str, Any]]:
    assert flywheel("export", "--format", "trl-sft").code == 0
    return lines(home.parent / "trl-sft.jsonl")
