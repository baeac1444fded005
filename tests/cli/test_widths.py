"""Verdicts, comparisons, dead letters, `ingest` and `status` on terminals of any width and in pipes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from flywheel.cli.tables import Row, print_rows, stdout, verdict_table
from tests import warm
from tests.cli.conftest import Run
from tests.cli.filter_bench import Bench
from tests.cli.terminal import in_terminal
from tests.factories.judge_server import JudgeServer
from tests.sources.studio.writer import DATA

REASON = "the carry was forgotten in the second step, so that the sum is wrong by ten " * 3
LONG = "is not JSON, as everybody can see who looks at this long line " * 3
ROWS = ("judge all 2 with the new rubric", "the same with what is stored now", "this comparison took")


@pytest.fixture
def bench(flywheel: Run, tmp_path: Path, judge: JudgeServer) -> Bench:
    answer = judge.content

    def content(request: dict[str, Any]) -> dict[str, Any]:
        said = answer(request)
        for criterion in said["criteria"].values():
            criterion["reason"] = REASON
        return said

    judge.content = content  # type: ignore[method-assign]
    bench = Bench(flywheel, tmp_path, judge)
    bench.settings["prices"] = {"input_per_million": 100, "output_per_million": 400}
    bench.rubric(name="old.yaml", threshold=0.9)
    bench.lines("good, without a box", "good: \\boxed{1}")
    bench("ingest")
    return bench


def piped(folder: Path, *arguments: str) -> list[str]:
    """The lines that a pipe gets."""
    done = warm.run(
        [sys.executable, "-m", "flywheel", *arguments],
        cwd=folder,
        # Readline, which pytest loads, puts COLUMNS where only a process without this would find it.
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["", "wide", "0"])
def test_a_pipe_gets_each_reason_in_one_line(bench: Bench, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """Columns that are no number are no width."""
    monkeypatch.setenv("COLUMNS", columns)
    lines = piped(bench.folder, "filter", "--dry-run")
    assert len([line for line in lines if REASON.strip() in line]) == 4
    assert len([line for line in lines if re.match(r"a-task-with-a-long-name-\d  +accepted  +\d", line)]) == 2


@pytest.mark.slow
def test_a_pipe_gets_a_comparison_in_whole_lines(bench: Bench) -> None:
    lines = piped(bench.folder, "filter", "--against", "old.yaml")
    assert any(line == "  question  What is 0 plus 1?" for line in lines)
    assert any(
        re.match(rf"{ROWS[0]}: 2 calls, [\d,]+ tokens sent, [\d,]+ received, about .* USD", line) for line in lines
    )
    assert max(map(len, lines)) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 120])
def test_a_comparison_is_whole_on_any_terminal(bench: Bench, columns: int) -> None:
    seen = in_terminal(bench.folder, ["filter", "--against", "old.yaml"], columns=columns, home=bench.folder)
    assert seen.code == 0
    assert max(map(len, seen.lines)) <= columns
    # Without the bar, which is gone when all is done.
    words = " ".join(" ".join(line for line in seen.lines if not line.endswith("left")).split())
    assert "…" not in words
    for row in ROWS:
        assert row in words
    assert len(re.findall(r"about \d\S* USD", words)) >= len(ROWS)


@pytest.fixture
def dead(flywheel: Run, tmp_path: Path) -> Path:
    settings = {"state": {"dir": "state"}, "sources": [{"type": "jsonl", "path": "some-lines.jsonl"}]}
    (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
    (tmp_path / "some-lines.jsonl").write_text("".join(f"{number} {LONG}\n" for number in range(3)))
    flywheel("ingest")
    return tmp_path


def test_a_pipe_gets_each_letter_in_one_line(flywheel: Run, dead: Path) -> None:
    told = flywheel("dead-letters", "--json").json["letters"]
    head, *lines, last = piped(dead, "dead-letters")
    assert head.split("\t") == ["id", "kind", "source", "subject", "when", "state", "error"]
    assert [line.split("\t")[0] for line in lines] == [str(letter["id"]) for letter in told]
    for line, letter in zip(lines, told, strict=True):
        assert line.split("\t")[2:4] == ["some-lines.jsonl", letter["subject"]]
        assert line.split("\t")[-1] == letter["error"]
    assert last == "Dead letters: 3 open"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 99, 100])
def test_a_letter_is_whole_on_any_terminal(flywheel: Run, dead: Path, columns: int) -> None:
    told = flywheel("dead-letters", "--json").json["letters"]
    seen = in_terminal(dead, ["dead-letters"], columns=columns, home=dead)
    assert seen.code == 0
    assert max(map(len, seen.lines)) <= columns
    assert "…" not in seen.screen
    together = re.sub(r"[\s│┃]", "", seen.screen)
    for letter in told:
        # In a table, what belongs together stands in several lines: the words of a cell are looked for.
        error = letter["error"].split() if columns < 100 else []
        for word in (*letter["subject"].split(), letter["created_at"][:10], *error):
            assert word[:6] in together


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "columns"), [(["dead-letters"], "0"), (["dead-letters"], "²"), (["status"], "²"), (["ingest"], "0")]
)
def test_columns_that_are_no_number_leave_a_terminal_as_wide_as_it_is(
    dead: Path, command: list[str], columns: str
) -> None:
    variables = {"COLUMNS": columns, "LINES": columns}
    plain = in_terminal(dead, command, columns=100, home=dead)
    seen = in_terminal(dead, command, columns=100, home=dead, variables=variables)
    assert (seen.code, [_without_times(line) for line in seen.lines]) == (
        plain.code,
        [_without_times(line) for line in plain.lines],
    )


def _without_times(line: str) -> str:
    return re.sub(r"\d+\.\d ms", "ms", line)


def test_wide_characters_keep_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = {"outcome": "accepted", "score": 1.0, "failed": [], "criteria": [], "reason": ""}
    verdict_table(
        Console(width=60), [{**verdict, "task_id": name} for name in ("中文任务", "t-0123456789abcdef0123")]
    )
    head, *lines = capsys.readouterr().out.splitlines()
    places = [cell_len(line.partition("accepted")[0]) for line in lines]
    assert places == [head.index("verdict")] * 2


@pytest.mark.parametrize("arguments", [["-h"], ["tasks", "release", "-h"]])
def test_help_is_asked_for_in_short_too(flywheel: Run, arguments: list[str]) -> None:
    ran = flywheel(*arguments)
    assert ran.code == 0
    assert "-h, --help" in ran.out


def test_a_table_that_fits_is_as_wide_as_its_texts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row(("7 plus 4?", "It is 11.", "accepted")), Row(("1 plus 1?", "The answer is 2.", "accepted"))]
    for columns, fits in (("100", True), ("30", False)):
        monkeypatch.setenv("COLUMNS", columns)
        print_rows(stdout(), ("question", "answer", "verdict"), rows, wide=0, fold=("answer",))
        told = capsys.readouterr().out
        assert ("The answer is 2." in told) is fits
        assert max(len(line.rstrip()) for line in told.splitlines()) <= 50


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
