"""Batches of OpenAI's interface: requests and responses of one folder become replies, whatever comes first."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from flywheel.config.file import Config, parse
from flywheel.records.task import Batch
from flywheel.records.trace import Cursor
from flywheel.sources.audit import compare_sources
from flywheel.sources.ingestion import Ingestion, SourceReport
from flywheel.sources.jsonl.batch_reader import AMBIGUOUS, PAGE_LINES, BatchReader
from flywheel.store.dead_letters import retry
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import dead_letters, replies, tasks
from flywheel.store.views import balance
from tests.factories.batches import failed, request, response
from tests.factories.trace import write_lines

Lines = Sequence[dict[str, Any]]


class Bench:
    """A folder that is a source. Each `read` is a new process' pass, or several passes of `ingestion`."""

    def __init__(self, tmp_path: Path, **sections: Any) -> None:
        self.folder = tmp_path / "batch"
        self.folder.mkdir(exist_ok=True)
        source = {"type": "jsonl", "path": str(self.folder)}
        self.config: Config = parse({"sources": [source], "state": {"dir": "state"}, **sections}, "test", tmp_path)
        self.reports: list[SourceReport] = []

    def write(self, name: str, lines: Lines) -> None:
        write_lines(self.folder / name, *lines)

    def append(self, name: str, *lines: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    async def read(self) -> dict[str, int]:
        """The outcomes, by their number, in the balance."""
        store = await Store.open(self.config.state_dir)
        ingestion = Ingestion(store, self.config)
        try:
            return await self.read_by(store, ingestion)
        finally:
            await ingestion.close()
            await store.close()

    async def read_by(self, store: Store, ingestion: Ingestion) -> dict[str, int]:
        self.reports = await ingestion.run(final=True)
        assert [report.error for report in self.reports] == [None] * len(self.reports)
        books = await store.read(balance.balance)
        assert books.balanced, books.problems
        # The counts of a pass are those of the ledger.
        counts = [report.counts for report in self.reports]
        assert sum(each.replies for each in counts) == books.replies
        assert sum(each.pending for each in counts) == books.reply_states.get("open", 0)
        assert sum((Counter(each.skipped) for each in counts), Counter[str]()) == books.skipped
        for each in counts:
            assert each.replies == each.tasks + sum(each.skipped.values()) + each.dead + each.pending
        ends = {name: number for name, number in books.ends.items() if number}
        return ends | {f"skipped {reason}": number for reason, number in books.skipped.items()}

    async def stored(self) -> list[dict[str, Any]]:
        """The lines of the tasks that are there."""
        store = await Store.open(self.config.state_dir)
        try:
            query = select(tasks.c.payload).where(tasks.c.state == "pending").order_by(tasks.c.id)
            return list(await store.read(lambda conn: conn.execute(query).scalars().all()))
        finally:
            await store.close()

    async def rows(self) -> list[Any]:
        store = await Store.open(self.config.state_dir)
        try:
            return list(await store.read(lambda conn: conn.execute(select(replies).order_by(replies.c.id)).all()))
        finally:
            await store.close()

    async def audit(self) -> list[str]:
        """What the deep audit finds wrong."""
        store = await Store.open(self.config.state_dir)
        try:
            return [problem for each in await compare_sources(store, self.config) for problem in each.problems]
        finally:
            await store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def pairs(given: Lines) -> list[tuple[str, str]]:
    return [(line["main_query"], line["answer"]) for line in given]


TWO = [("What is 1 plus 1?", "2"), ("What is 2 plus 1?", "3")]


@pytest.mark.parametrize("names", [("in.jsonl", "out.jsonl"), ("z-in.jsonl", "out.jsonl")])
async def test_requests_and_responses_of_a_folder_are_replies(bench: Bench, names: tuple[str, str]) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    bench.write(names[0], [request(1, tools=[tool], user="u-1"), request(2)])
    bench.write(names[1], [response(2), response(1)])
    assert await bench.read() == {"pending": 2}
    [report] = bench.reports
    assert (report.path, report.counts.tasks, report.counts.pending) == (bench.folder, 2, 0)
    stored = await bench.stored()
    assert sorted(pairs(stored)) == TWO
    first = next(line for line in stored if line["answer"] == "2")
    told = first["metadata"]
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert (told["model"], told["user_id"], told["input_tokens"]) == ("gpt-4.1-2025-04-14", "u-1", 20)
    assert json.loads(told["tools_json"]) == [tool] and told["prompt_exact"] is True
    assert told["started_at"].startswith("2025-10-09") and json.loads(told["extra_json"]) == {
        "custom_id": "request-1"
    }
    assert await bench.audit() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
@pytest.mark.parametrize("is_one_process", [True, False])
async def test_what_comes_first_waits_and_is_counted_as_pending(
    bench: Bench, order: tuple[int, ...], is_one_process: bool
) -> None:
    files = [("in.jsonl", [request(1), request(2)]), ("out-1.jsonl", [response(1)]), ("out-2.jsonl", [response(2)])]
    store = await Store.open(bench.config.state_dir)
    ingestion = Ingestion(store, bench.config)
    try:
        there: set[int] = set()
        for number in order:
            bench.write(*files[number])
            there.add(number)
            ends = await bench.read_by(store, ingestion)
            if not is_one_process:
                await ingestion.close()
                ingestion = Ingestion(store, bench.config)
            joined = len(there - {0}) if 0 in there else 0
            waiting = 2 - joined if 0 in there else len(there)
            report = next(each for each in bench.reports if each.path == bench.folder)
            assert (report.counts.tasks, report.counts.pending) == (joined, waiting), there
            assert ends == {"pending": joined + waiting}
    finally:
        await ingestion.close()
        await store.close()
    assert sorted(pairs(await bench.stored())) == TWO
    rows = await bench.rows()
    assert [row.state for row in rows] == ["converted"] * 2
    assert await bench.audit() == []


async def test_files_grow_and_equal_lines_are_one(bench: Bench) -> None:
    bench.write("in.jsonl", [request(1), request(1)])
    assert await bench.read() == {"pending": 1}
    bench.append("in.jsonl", request(2), request(1))
    bench.write("out.jsonl", [response(1), response(1)])
    await bench.read()
    bench.append("out.jsonl", response(2), response(1))
    await bench.read()
    # The same files again, under other names and in another order.
    bench.write("a-copy.jsonl", [response(2), response(1), request(2), request(1)])
    assert await bench.read() == {"pending": 2}
    assert sorted(pairs(await bench.stored())) == TWO


async def test_a_file_may_have_both(tmp_path: Path, bench: Bench) -> None:
    path = write_lines(tmp_path / "both.jsonl", response(1), request(1), request(2))
    bench.config = parse(
        {"sources": [{"type": "jsonl", "path": str(path)}], "state": {"dir": "state"}}, "test", tmp_path
    )
    assert await bench.read() == {"pending": 2}
    [report] = bench.reports
    assert (report.path, report.counts.tasks, report.counts.pending) == (path, 1, 1)
    assert await bench.audit() == []


async def test_other_files_of_the_folder_are_sources_of_their_own(bench: Bench) -> None:
    bench.write("in.jsonl", [request(1)])
    bench.write(
        "others.jsonl", [{"question": "Who?", "answer": "Goethe", "custom_id": "request-1", "response": None}]
    )
    await bench.read()
    bench.write("out.jsonl", [response(1)])
    await bench.read()
    assert {report.path.name: report.counts.tasks for report in bench.reports} == {"others.jsonl": 1, "batch": 1}
    # A line of a batch in another file is named as such.
    bench.append("others.jsonl", response(2))
    bench.append("in.jsonl", {"question": "Who?", "answer": "Schiller"})
    await bench.read()
    store = await Store.open(bench.config.state_dir)
    errors = await store.read(lambda conn: conn.execute(select(dead_letters.c.error)).scalars().all())
    await store.close()
    assert sorted(error[:31] for error in errors) == [
        "it is a line of a batch (`custo", "it is neither a request nor a r",
    ]  # fmt: skip


@pytest.mark.parametrize("has_request", [True, False])
async def test_a_line_with_an_error_is_skipped_with_it(bench: Bench, has_request: bool) -> None:
    if has_request:
        bench.write("in.jsonl", [request(1), request(2), request(3)])
        assert await bench.read() == {"pending": 3}
    bench.write("out.jsonl", [failed(1), failed(2, status=429)])
    ends = await bench.read()
    assert ends.get("pending", 0) == has_request and ends["skipped error"] == 2
    details = {row.detail for row in await bench.rows() if row.state == "skipped"}
    assert details == {
        "This request could not be executed before the completion window.", "HTTP 429: Rate limit reached",
    }  # fmt: skip
    # The request is sent again, and answered.
    bench.write("in.jsonl", [request(1), request(2), request(3)])
    bench.write("again.jsonl", [response(1)])
    assert (await bench.read())["skipped error"] == 2
    assert pairs(await bench.stored()) == TWO[:1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_an_id_of_two_different_requests_joins_nothing(bench: Bench, order: tuple[int, ...]) -> None:
    files = [
        ("in-1.jsonl", [request(1), request(2)]),
        ("in-2.jsonl", [request(7, custom_id="request-1")]),
        ("out.jsonl", [response(1), response(2), response(7, custom_id="request-1")]),
    ]
    for number in order:
        bench.write(*files[number])
        await bench.read()
    assert await bench.read() == {"pending": 1, "skipped": 2, "skipped ambiguous": 2}
    assert pairs(await bench.stored()) == TWO[1:]
    assert {row.detail for row in await bench.rows() if row.state == "skipped"} == {AMBIGUOUS}
    assert "one folder per batch" in AMBIGUOUS
    assert await bench.audit() == []


async def test_folders_are_not_joined(tmp_path: Path, bench: Bench) -> None:
    (tmp_path / "other").mkdir()
    bench.write("in.jsonl", [request(1)])
    write_lines(tmp_path / "other" / "out.jsonl", response(1))
    sources = [{"type": "jsonl", "path": str(path)} for path in (bench.folder, tmp_path / "other")]
    bench.config = parse({"sources": sources, "state": {"dir": "state"}}, "test", tmp_path)
    store = await Store.open(bench.config.state_dir)
    ingestion = Ingestion(store, bench.config)
    reports = await ingestion.run(final=True)
    await ingestion.close()
    await store.close()
    assert [(report.counts.tasks, report.counts.pending) for report in reports] == [(0, 1), (0, 1)]


async def test_a_folder_of_the_next_batch_adds_and_changes_nothing(bench: Bench) -> None:
    """The files are replaced by those of a batch with the same ids, the requests first."""
    bench.write("in.jsonl", [request(1)])
    bench.write("out.jsonl", [response(1)])
    await bench.read()
    (bench.folder / "in.jsonl").unlink()
    bench.write("in.jsonl", [request(7, custom_id="request-1")])
    await bench.read()
    (bench.folder / "out.jsonl").unlink()
    bench.write("out.jsonl", [response(7, custom_id="request-1")])
    await bench.read()
    assert pairs(await bench.stored()) == [TWO[0], ("What is 7 plus 1?", "8")]


@pytest.mark.parametrize("gone", ["in.jsonl", "out.jsonl"])
async def test_a_reply_stays_when_one_of_its_files_is_gone(bench: Bench, gone: str) -> None:
    bench.write("in.jsonl", [request(1)])
    bench.write("out.jsonl", [response(1)])
    await bench.read()
    shutil.move(bench.folder / gone, bench.folder / "moved.txt")
    assert await bench.read() == {"pending": 1}
    shutil.move(bench.folder / "moved.txt", bench.folder / "back.jsonl")
    assert await bench.read() == {"pending": 1}
    assert pairs(await bench.stored()) == TWO[:1]


async def test_several_responses_to_one_request_are_replies_of_one_split(bench: Bench) -> None:
    bench.write("in.jsonl", [request(1)])
    await bench.read()
    again = response(1, "It is 2.")
    bench.write("out.jsonl", [response(1), again])
    await bench.read()
    stored = await bench.stored()
    assert sorted(line["answer"] for line in stored) == ["2", "It is 2."]
    assert len({line["metadata"]["split"] for line in stored}) == 1
    assert len({row.trace_id for row in await bench.rows()}) == 1


async def test_nothing_of_a_text_waits_in_the_state(bench: Bench) -> None:
    bench.write("in.jsonl", [request(1, "What is the secret-question?")])
    bench.write("out.jsonl", [response(2, "It is the secret-answer.")])
    assert await bench.read() == {"pending": 2}
    for path in bench.config.state_dir.rglob("*"):
        assert not path.is_file() or b"secret-" not in path.read_bytes(), path


async def test_calls_of_tools_refusals_and_responses_of_the_other_interface(bench: Bench) -> None:
    call = {"id": "c-1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    asked = {"model": "gpt-5", "instructions": "Add.", "input": "What is 3 plus 1?"}
    other = {**request(3), "url": "/v1/responses", "body": asked}
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "three and one"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
    ]
    answered = response(3)
    answered["response"]["body"] = {
        "id": "resp_3", "object": "response", "created_at": 1_760_000_000, "model": "gpt-5-2025",
        "status": "completed", "output": items,
    }  # fmt: skip
    embedding = {**request(4), "url": "/v1/embeddings", "body": {"model": "e", "input": "x"}}
    bench.write("in.jsonl", [request(1), request(2, chat_template_kwargs={"enable_thinking": False}), other])
    bench.write("out.jsonl", [response(1, "", tool_calls=[call]), response(2, "", refusal="No."), answered])
    bench.append("in.jsonl", embedding)
    bench.append("out.jsonl", response(4))
    ends = await bench.read()
    assert (ends["skipped unfinished"], ends["skipped no_query"], ends["pending"]) == (1, 1, 2)
    refused, said = sorted(await bench.stored(), key=lambda line: line["main_query"])
    assert (refused["answer"], refused["metadata"]["refusal"]) == ("No.", True)
    assert refused["metadata"]["prompt_exact"] is False
    assert (said["answer"], said["metadata"]["answer_reasoning"]) == ("4", "three and one")
    assert [message["role"] for message in said["prompt"]] == ["system", "user"]


async def test_a_private_user_is_only_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, privacy={"exclude": {"users": ["u-1", str(2**70)]}})
    bench.write("in.jsonl", [request(1, user="u-1"), request(2, metadata={"user_id": 2**70})])
    await bench.read()
    assert [row.user for row in await bench.rows()] == ["", ""]
    bench.write("out.jsonl", [response(1), response(2)])
    assert await bench.read() == {"skipped": 2, "skipped private": 2}
    assert await bench.stored() == []


def test_a_new_process_reads_nothing_of_files_that_have_not_changed(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", request(1))
    reader = BatchReader(tmp_path)
    [batch] = reader.read(Cursor())
    assert batch.cursor is not None and len(batch.entries) == 1
    assert list(BatchReader(tmp_path).read(batch.cursor)) == []
    assert list(reader.read(batch.cursor)) == []


def test_what_was_not_stored_is_read_again(tmp_path: Path) -> None:
    """The process goes on, or another one does: the cursor comes with the last batch."""
    lines = [request(number) for number in range(2 * PAGE_LINES)]
    write_lines(tmp_path / "in.jsonl", *lines, "no object")
    reader = BatchReader(tmp_path)
    first = next(reader.read(Cursor()))
    assert first.cursor is None and len(first.dead) == 1
    reader.forget()
    batches = list(reader.read(Cursor()))
    assert [batch.cursor is None for batch in batches] == [True] * (len(batches) - 1) + [False]
    assert sum(len(batch.entries) for batch in batches) == len(lines)
    assert sum(len(batch.dead) for batch in batches) == 1


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    whole = json.dumps(request(2))
    write_lines(path, request(1))
    with path.open("a") as file:
        file.write(whole[:100])
    reader, cursor = BatchReader(tmp_path), Cursor()
    [batch] = reader.read(cursor)
    assert len(batch.entries) == 1 and not batch.warnings and batch.cursor is not None
    [again] = reader.read(batch.cursor)
    assert again.warnings == (f"{path}: line 2 is incomplete: it is read once complete",)
    with path.open("a") as file:
        file.write(whole[100:])
    [last] = reader.read(batch.cursor)
    assert [entry.waits for entry in last.entries] == [True]


@pytest.mark.parametrize("stored", range(5))
@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_pass_that_ends_between_batches_loses_and_doubles_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stored: int, goes_on: bool
) -> None:
    """A batch and the rest of a pass are not stored, and the same process goes on, or another one does."""
    monkeypatch.setattr("flywheel.sources.jsonl.batch_reader.PAGE_LINES", 1)
    store = await Store.open(bench.config.state_dir)
    ingestion = Ingestion(store, bench.config)
    bench.write("in.jsonl", [request(1), request(2), request(3)])
    await bench.read_by(store, ingestion)
    bench.write("out.jsonl", [response(1), response(2), failed(3), response(4)])
    bench.append("in.jsonl", {"neither": 1})
    read = BatchReader.read

    def torn(self: BatchReader, *args: Any, **options: Any) -> Iterator[Batch]:
        batches = read(self, *args, **options)
        yield from itertools.islice(batches, stored)
        next(batches, None)
        raise OSError("torn")

    with monkeypatch.context() as patch:
        patch.setattr(BatchReader, "read", torn)
        [report] = await ingestion.run(final=True)
        assert report.error is not None
    if not goes_on:
        await ingestion.close()
        ingestion = Ingestion(store, bench.config)
    ends = await bench.read_by(store, ingestion)
    await ingestion.close()
    await store.close()
    assert ends == {"pending": 3, "skipped": 1, "skipped error": 1, "dead": 1}
    [report] = bench.reports
    assert (report.counts.tasks, report.counts.pending) == (2, 1)
    assert sorted(pairs(await bench.stored())) == TWO
    assert await bench.audit() == []


async def test_a_file_that_was_empty_becomes_one_of_a_batch(bench: Bench) -> None:
    bench.write("in.jsonl", [])
    store = await Store.open(bench.config.state_dir)
    ingestion = Ingestion(store, bench.config)
    await bench.read_by(store, ingestion)
    bench.write("in.jsonl", [request(1)])
    bench.write("out.jsonl", [response(1)])
    await bench.read_by(store, ingestion)
    assert {each.path.name: each.counts.tasks for each in bench.reports} == {"in.jsonl": 0, "batch": 1}
    await ingestion.close()
    await store.close()


async def test_a_dead_letter_of_a_folder_is_retried(bench: Bench) -> None:
    bench.write("out.jsonl", [response(1)])
    bench.append("out.jsonl", {"custom_id": "request-2"})
    assert await bench.read() == {"pending": 1, "dead": 1}
    [letter] = [row.span_id for row in await bench.rows() if row.state == "dead"]
    assert letter.startswith("out.jsonl line 2 (")
    bench.write("out.jsonl", [response(1), response(2)])
    bench.write("in.jsonl", [request(1), request(2)])
    store = await Store.open(bench.config.state_dir)
    await store.write(retry)
    await store.close()
    assert await bench.read() == {"pending": 2, "dead": 1}
    assert sorted(pairs(await bench.stored())) == TWO
