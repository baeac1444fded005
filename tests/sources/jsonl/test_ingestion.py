"""Task files on their way into the ledger: each task once, and the books balanced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Connection, select, update

from flywheel.config.file import Config, parse
from flywheel.records.task import entry_of
from flywheel.sources.audit import SourceAudit, compare_sources
from flywheel.sources.ingestion import Ingestion, SourceReport
from flywheel.store.erasures import Kind
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import metadata, replies, tasks
from flywheel.store.views import balance, lineage
from tests.factories.erased import erase_rows
from tests.factories.trace import put_replies, reply
from tests.sources.jsonl.reading import line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasks.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks"


def config(tmp_path: Path, path: Path) -> Config:
    return parse({"sources": [{"type": "jsonl", "path": str(path)}], "state": {"dir": "state"}}, "test", tmp_path)


async def ingest(tmp_path: Path, path: Path, *, passes: int = 1, sweep: bool = False) -> list[SourceReport]:
    """Some passes of one process; the last one's reports."""
    settings = config(tmp_path, path)
    store = await Store.open(settings.state_dir)
    ingestion = Ingestion(store, settings)
    try:
        for _ in range(passes):
            reports = await ingestion.run(final=True, sweep=sweep)
        assert (await store.read(balance.balance)).balanced
    finally:
        await ingestion.close()
        await store.close()
    return reports


async def compared(tmp_path: Path, path: Path) -> SourceAudit:
    """The only source of the state against the ledger."""
    settings = config(tmp_path, path)
    store = await Store.open(settings.state_dir)
    try:
        [found] = await compare_sources(store, settings)
    finally:
        await store.close()
    return found


def exported(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (tmp_path / "state" / "tasks.jsonl").read_bytes().splitlines()]


async def test_agentjet_tasks_without_ids_stay_apart_and_come_once(tmp_path: Path) -> None:
    path = tmp_path / "agentjet.jsonl"
    told = [
        {
            "task_id": "no_id",
            "main_query": f"q{n}",
            "init_messages": [],
            "env_type": "no_env",
            "metadata": {"answer": "a"},
        }
        for n in range(700)
    ]
    path.write_text("".join(json.dumps(task) + "\n" for task in [*told, *told[:50], {"main_query": "no answer"}]))
    [report] = await ingest(tmp_path, path, passes=2)
    assert (report.schema, report.error) == ("jsonl", None)
    assert (report.counts.tasks, dict(report.counts.skipped), report.counts.dead) == (700, {"no_answer": 1}, 0)
    [report] = await ingest(tmp_path, path)
    assert (report.new, report.counts.replies) == (0, 701)
    assert {task["main_query"] for task in exported(tmp_path)} == {task["main_query"] for task in told}
    assert len(exported(tmp_path)) == 700


@pytest.mark.parametrize("batch", [False, True])
async def test_a_full_scan_reads_files_again(tmp_path: Path, path: Path, *, batch: bool) -> None:
    def text(number: int) -> bytes:
        if not batch:
            return line(number)
        body = {"model": "m", "messages": [{"role": "user", "content": f"What is {number} plus 1?"}]}
        return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body,
                           "response": None}).encode() + b"\n"  # fmt: skip

    path.write_bytes(text(1) + text(2) + text(3))
    [report] = await ingest(tmp_path, path)
    assert report.counts.replies == 3
    # A program that keeps the time of the file changes a line.
    before = path.stat()
    path.write_bytes(text(1) + text(7) + text(3))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    [report] = await ingest(tmp_path, path)
    assert report.counts.replies == 3
    for _ in range(2):
        [report] = await ingest(tmp_path, path, sweep=True)
        assert (report.counts.replies, report.error) == (4, None)
    if not batch:
        assert {task["main_query"] for task in exported(tmp_path)} == {f"What is {n} plus 1?" for n in (1, 2, 3, 7)}


async def test_half_of_the_files_that_may_be_open_are_a_reserve(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def opened() -> list[str]:
        found = []
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(each.readlink().name)
        return sorted(name for name in found if name.endswith(".jsonl") and name != "tasks.jsonl")

    for number in range(310):
        (folder / f"{number:03}.jsonl").write_bytes(line(number))
    settings = config(tmp_path, folder)
    store = await Store.open(settings.state_dir)
    # So many that half of them is more than what the tests before this one have open.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        ingestion = Ingestion(store, settings)
        for _ in range(2):
            assert [report.error for report in await ingestion.run()] == [None] * 310
            assert len(opened()) == 300
        assert len([message for message in caplog.messages if "LimitNOFILE" in message]) == 1
        # What was read last stays open, and is read to its end when it is moved away.
        moved = folder / opened()[-1]
        with moved.open("ab") as file:
            file.write(line(400))
        moved.rename(moved.with_suffix(".old"))
        moved.write_bytes(line(401))
        await ingestion.run()
        assert {"What is 400 plus 1?", "What is 401 plus 1?"} <= {task["main_query"] for task in exported(tmp_path)}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await ingestion.close()
        await store.close()
    assert opened() == []


async def test_too_many_open_files_are_a_condition_with_what_to_raise(tmp_path: Path, path: Path) -> None:
    path.write_bytes(line(1))
    settings = config(tmp_path, path)
    store = await Store.open(settings.state_dir)
    ingestion = Ingestion(store, settings)
    await ingestion.run()  # threads and files of the state are there
    await ingestion.sources()[0].connector.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        report = await ingestion.sources()[0].read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert report.error is not None and "Too many open files. Raise" in str(report.error)
    assert "LimitNOFILE" in str(report.error)
    assert (await ingestion.run())[0].error is None
    await ingestion.close()
    await store.close()


async def test_files_of_a_directory_come_and_go(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await ingest(tmp_path, folder) == []
    assert caplog.messages == []
    (folder / "a.json").touch()
    (folder / "older").mkdir()
    assert await ingest(tmp_path, folder, passes=2) == []
    [said] = caplog.messages
    assert said.startswith(f"{folder}: not read: 1 subfolder (older), 1 file of another name (a.json). Only")
    (folder / "b.jsonl").write_bytes(line(1) + b"nonsense\n")
    (folder / "a.jsonl").write_bytes(line(2) + line(1))
    reports = await ingest(tmp_path, folder)
    assert [report.path.name for report in reports] == ["a.jsonl", "b.jsonl"]
    assert [(report.counts.replies, report.counts.dead) for report in reports] == [(2, 0), (2, 1)]
    # The same task in two files is one.
    assert len(exported(tmp_path)) == 2
    (folder / "a.jsonl").rename(folder / "c.jsonl")
    (folder / "b.jsonl").unlink()
    assert [report.path.name for report in await ingest(tmp_path, folder)] == ["c.jsonl"]
    assert len(exported(tmp_path)) == 2


async def test_a_file_whose_name_is_no_text_costs_itself(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "good.jsonl").write_bytes(line(1))
    misnamed = Path(os.fsdecode(os.fsencode(folder) + b"/\xff.jsonl"))
    misnamed.write_bytes(line(2))
    [good] = await ingest(tmp_path, folder)
    assert (good.path.name, good.counts.tasks, good.error) == ("good.jsonl", 1, None)
    assert "not read: 1 file whose name is not UTF-8 (\\xff.jsonl)" in caplog.text
    misnamed.rename(folder / "renamed.jsonl")
    assert [report.new for report in await ingest(tmp_path, folder)] == [0, 1]


async def test_what_was_exported_is_read_back_into_another_state(tmp_path: Path) -> None:
    first = tmp_path / "exported.jsonl"
    first.write_bytes(b"".join(entry_of(reply(number), "/a.sqlite").line + b"\n" for number in range(20)))
    [report] = await ingest(tmp_path, first)
    assert report.new == 20
    before = {task["task_id"]: task for task in map(json.loads, first.read_text().splitlines())}
    for task in exported(tmp_path):
        told = before[task["task_id"]]
        assert task["init_messages"] == told["init_messages"]
        assert task["metadata"]["conversation_id"] == told["metadata"]["conversation_id"]
        assert task["metadata"]["started_at"] == told["metadata"]["started_at"]


async def test_a_missing_file_is_an_error_of_its_source(tmp_path: Path) -> None:
    [report] = await ingest(tmp_path, tmp_path / "nowhere.jsonl")
    assert "No such file" in str(report.error)
    (tmp_path / "nowhere.jsonl").write_bytes(line(1))
    [report] = await ingest(tmp_path, tmp_path / "nowhere.jsonl")
    assert (report.error, report.new) == (None, 1)


@pytest.mark.parametrize("conversation", [None, "", "unknown"])
async def test_answers_to_one_question_are_on_one_side(tmp_path: Path, conversation: str | None, path: Path) -> None:
    metadata = {} if conversation is None else {"conversation_id": conversation}
    rows = [{"question": f"q{n}", "answer": answer, "metadata": metadata} for n in range(30) for answer in "ab"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    await ingest(tmp_path, path)
    store = await Store.view(tmp_path / "state")
    found = await store.read(lambda conn: conn.execute(select(tasks.c.payload, tasks.c.split)).all())
    await store.close()
    sides: dict[str, set[str]] = {}
    for payload, split in found:
        sides.setdefault(payload["question"], set()).add(split)
    assert len(found) == 60
    assert all(len(side) == 1 for side in sides.values())
    assert len(set.union(*sides.values())) == 2


def told(own: str, question: str, answer: str | None = "a", **more: Any) -> dict[str, Any]:
    return {"task_id": own, "question": question, "answer": answer, **more}


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def add(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as out:
        out.writelines(json.dumps(each) + "\n" for each in lines)


def asked(tmp_path: Path) -> dict[str, str]:
    """The exported questions and answers by their ids."""
    return {task["task_id"]: f"{task['question']} {task['answer']}" for task in exported(tmp_path)}


async def test_two_files_that_number_their_tasks_alike_lose_none(tmp_path: Path, folder: Path) -> None:
    for name in ("gsm", "law"):
        write(folder / f"{name}.jsonl", *(told(str(n), f"{name} {n}") for n in (1, 2, 3)))
    reports = await ingest(tmp_path, folder)
    assert sum(report.new for report in reports) == 6
    assert [len(report.warnings) for report in reports].count(1) == 1
    found = asked(tmp_path)
    assert sorted(found.values()) == sorted(f"{name} {n} a" for name in ("gsm", "law") for n in (1, 2, 3))
    assert {"1", "2", "3"} < set(found)
    # The same again, from the beginning and in other places, is nothing new.
    for name in ("gsm", "law"):
        text = (folder / f"{name}.jsonl").read_text()
        (folder / f"{name}.jsonl").unlink()
        (folder / f"again-{name}.jsonl").write_text(text)
    assert [report.new for report in await ingest(tmp_path, folder)] == [0, 0]
    assert asked(tmp_path) == found


@pytest.mark.parametrize("answers", ["a", "ab"])
async def test_an_id_on_many_lines_of_a_file_loses_none(tmp_path: Path, answers: str, path: Path) -> None:
    lines = [told("math", f"q{n}", answer) for n in range(700) for answer in answers]
    write(path, *lines)
    [report] = await ingest(tmp_path, path)
    assert (report.new, report.counts.replies) == (len(lines), len(lines))
    assert report.warnings == ("some lines have the task_id of a different task: those tasks get a hash as id",)
    assert asked(tmp_path)["math"] == "q0 a"
    add(path, told("math", "another"), told("math", "q1"))
    assert [report.new for report in await ingest(tmp_path, path)] == [1]
    write(path, *reversed(lines))
    assert [report.new for report in await ingest(tmp_path, path)] == [0]
    assert len(exported(tmp_path)) == len(lines) + 1


async def test_a_line_with_the_same_to_say_is_the_same_task_whatever_is_beside_it(tmp_path: Path, path: Path) -> None:
    write(path, told("x", "q"), told("x", "q", metadata={"model": "m"}))
    [report] = await ingest(tmp_path, path)
    assert (report.new, report.counts.replies, report.warnings) == (1, 1, ())
    add(path, told("x", "q", metadata={"model": "n"}), told("x", "q"))
    [report] = await ingest(tmp_path, path)
    assert (report.new, report.counts.replies, report.warnings) == (0, 1, ())


async def test_another_id_other_images_or_other_tools_make_another_task(tmp_path: Path, path: Path) -> None:
    tools = [{"type": "function", "function": {"name": name, "maximum": 10**30}} for name in ("add", "sum")]
    parts = [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}]
    seen = {"task_id": "x", "prompt": [{"role": "user", "content": parts}], "answer": "a"}
    lines = [told("x", "q"), told("x", "q", tools=tools[:1]), told("x", "q", tools=tools[1:]), seen, told("y", "q")]
    for new in (5, 0):
        write(path, *lines)
        assert [report.new for report in await ingest(tmp_path, path)] == [new]
        lines.reverse()
    # The order of keys is that of the program that wrote them.
    add(path, told("x", "q", tools=[{"function": {"maximum": 10**30, "name": "add"}, "type": "function"}]))
    assert [report.new for report in await ingest(tmp_path, path)] == [0]


async def test_an_export_that_is_read_into_its_own_state_adds_what_was_edited_alone(
    tmp_path: Path, path: Path
) -> None:
    tools = {"tools": ({"type": "function", "function": {"name": "add"}},), "images": ("https://x/y.png",)}
    store = await Store.open(tmp_path / "state")
    await store.write(lambda conn: put_replies(conn, reply(1, **tools), reply(2, **tools)))
    await store.close()
    lines = [json.loads(entry_of(reply(number, **tools), "/a").line) for number in (1, 2)]
    write(path, lines[0], {**lines[1], "answer": "edited"})
    for new in (1, 0):
        [report] = await ingest(tmp_path, path)
        assert (report.new, report.counts.replies) == (new, 2)
        path.write_text(path.read_text() + "\n")
    found = asked(tmp_path)
    assert found.pop(lines[0]["task_id"]) == "What is 1 plus 1? \\boxed{2}"
    assert found.pop(lines[1]["task_id"]) == "What is 2 plus 1? \\boxed{3}"
    assert list(found.values()) == ["What is 2 plus 1? edited"]


async def test_an_erasure_leaves_no_hash_of_a_text(tmp_path: Path, path: Path) -> None:
    own: dict[str, Any] = {"metadata": {"conversation_id": "conversation-x"}}
    lines = [told("own-z", "kept"), told("own-x", "q", **own), told("own-x", "other", **own)]
    lines += [told("own-y", "r", None, **own), {"question": "s", "answer": "a", **own}]
    write(path, *lines)
    await ingest(tmp_path, path)

    def ids(conn: Connection) -> set[str]:
        names = replies.c.span_id, replies.c.trace_id, replies.c.own_id, tasks.c.key
        of_it = replies.c.conversation_id == "conversation-x"
        rows = conn.execute(select(*names).select_from(replies.outerjoin(tasks)).where(of_it)).all()
        return {each for row in rows for each in row if each}

    def everything(conn: Connection) -> str:
        return " ".join(str(row) for table in metadata.sorted_tables for row in conn.execute(select(table)))

    store = await Store.open(tmp_path / "state")
    found, held = await store.read(ids), await store.read(everything)
    assert {"own-x", "own-y"} < found and len([each for each in found if each.startswith("t-")]) == 8
    assert all(each in held for each in found)
    assert await store.write(erase_rows, Kind.CONVERSATION, "conversation-x") == 4
    left = await store.read(everything)
    await store.close()
    assert [each for each in found if each in left] == []
    write(path, *reversed(lines))
    [report] = await ingest(tmp_path, path)
    assert (report.new, report.counts.replies, report.counts.erased) == (0, 5, 4)


async def test_a_task_keeps_its_hash_when_the_task_with_its_id_is_erased(tmp_path: Path, folder: Path) -> None:
    lines = [told("x", "q", metadata={"conversation_id": "erased"}), told("x", "other")]
    write(folder / "a.jsonl", *lines)
    await ingest(tmp_path, folder)
    store = await Store.open(tmp_path / "state")
    assert await store.write(erase_rows, Kind.CONVERSATION, "erased") == 1
    await store.close()
    write(folder / "b.jsonl", lines[1])
    assert [report.new for report in await ingest(tmp_path, folder)] == [0, 0]


async def test_an_edited_line_is_another_task_and_the_earlier_one_stays(tmp_path: Path, path: Path) -> None:
    write(path, told("x", "q", "wrong"), told("y", "r"))
    await ingest(tmp_path, path)
    write(path, told("x", "q", "right"), told("y", "r"))
    for new in (1, 0):
        assert [report.new for report in await ingest(tmp_path, path)] == [new]
    found = asked(tmp_path)
    assert (found.pop("x"), found.pop("y")) == ("q wrong", "r a")
    assert list(found.values()) == ["q right"]


async def test_a_line_without_an_answer_takes_no_task_away_and_may_get_one(tmp_path: Path, path: Path) -> None:
    write(path, told("x", "q"), told("x", "other", None), told("y", "r", None))
    [report] = await ingest(tmp_path, path)
    assert (report.counts.tasks, dict(report.counts.skipped)) == (1, {"no_answer": 1})
    assert report.warnings == ("some lines without a task have the task_id of a task: they are ignored",)
    store = await Store.view(tmp_path / "state")
    assert (waiting := await store.read(lineage.why, "y")) is not None
    await store.close()
    assert [each["skip_reason"] for each in waiting["replies"]] == ["no_answer"]
    add(path, told("x", "third", None), told("y", "r"))
    found = await compared(tmp_path, path)
    assert (found.in_ledger, found.not_read_yet, found.missing, found.gone) == (2, 0, [], 0)
    [report] = await ingest(tmp_path, path)
    assert (report.counts.tasks, dict(report.counts.skipped)) == (2, {})
    assert asked(tmp_path) == {"x": "q a", "y": "r a"}


async def test_a_line_whose_answer_came_later_is_counted_once_however_often_it_is_read(
    tmp_path: Path, path: Path
) -> None:
    # Of two lines without an answer, the second is no earlier form of the task.
    lines = [told("x", "q", None), told("x", "other", None), told("x", "q")]
    write(path, *lines)
    [report] = await ingest(tmp_path, path)
    assert (report.counts.tasks, dict(report.counts.skipped), report.warnings) == (1, {"no_answer": 1}, ())
    for beside in (1, 2):
        write(path, told("z", "z", beside=beside), *lines)
        assert (await compared(tmp_path, path)).missing == []
        [report] = await ingest(tmp_path, path)
        assert (report.counts.tasks, dict(report.counts.skipped)) == (2, {"no_answer": 1})
        found = await compared(tmp_path, path)
        assert (found.problems, found.in_ledger, found.not_read_yet, found.gone) == ([], 3, 0, 0)
    add(path, told("x", "a third question"))
    [report] = await ingest(tmp_path, path)
    assert (report.counts.tasks, dict(report.counts.skipped)) == (3, {"no_answer": 1})


async def test_the_task_of_another_file_is_not_told_by_a_line_that_says_something_else(
    tmp_path: Path, folder: Path
) -> None:
    write(folder / "a.jsonl", told("x", "q", None))
    await ingest(tmp_path, folder)
    write(folder / "b.jsonl", told("x", "q", "b"))
    await ingest(tmp_path, folder)
    write(folder / "a.jsonl", told("z", "z"), told("x", "q", None), told("x", "q", "a"))
    assert sum(report.new for report in await ingest(tmp_path, folder)) == 2
    assert sorted(asked(tmp_path).values()) == ["q a", "q b", "z a"]


async def test_an_older_state_gets_no_doubles_and_what_it_lost(tmp_path: Path, path: Path) -> None:
    write(path, told("x", "q1"), told("y", "r"))
    await ingest(tmp_path, path)
    store = await Store.open(tmp_path / "state")
    await store.write(lambda conn: conn.execute(update(replies).values(content=None)))
    await store.close()
    write(path, told("x", "q1"), told("x", "q2"), told("y", "r"))
    assert [report.new for report in await ingest(tmp_path, path)] == [1]
    assert sorted(asked(tmp_path).values()) == ["q1 a", "q2 a", "r a"]


async def test_redaction_keeps_lines_the_same(tmp_path: Path, path: Path) -> None:
    chain = tmp_path / "chain.yaml"
    chain.write_text(
        json.dumps({"id": "c", "filters": [{"type": "pii", "params": {"action": "redact", "kinds": ["email"]}}]})
    )
    lines = [told("x", "mail a@example.org"), told("x", "mail b@example.org please")]
    write(path, *lines)
    for chained in (None, chain):
        settings = parse(
            {
                "sources": [{"type": "jsonl", "path": str(path)}],
                "state": {"dir": "state"},
                **({"filter": {"chain": str(chained)}} if chained else {}),
            },
            "test",
            tmp_path,
        )
        store = await Store.open(settings.state_dir)
        ingestion = Ingestion(store, settings)
        [report] = await ingestion.run(final=True)
        await ingestion.close()
        await store.close()
        assert report.new == (0 if chained else 2)
        write(path, {**lines[1]}, lines[0])


@pytest.mark.parametrize("between", [0, 1200])
async def test_what_differs_in_redacted_data_alone_is_two_tasks_wherever_it_stands(
    tmp_path: Path, between: int, path: Path
) -> None:
    chain = tmp_path / "chain.yaml"
    chain.write_text(json.dumps({"id": "c", "filters": [{"type": "pii", "params": {"kinds": ["email"]}}]}))
    lines = [told("x", f"mail {name}@example.org") for name in ("ann", "bob")]
    lines[1:1] = [told(f"y{n}", "q") for n in range(between)]
    write(path, *lines)
    settings = config(tmp_path, path)
    settings = settings.model_copy(update={"filter": settings.filter.model_copy(update={"chain": chain})})
    store = await Store.open(settings.state_dir)
    ingestion = Ingestion(store, settings)
    try:
        [before] = await compare_sources(store, settings)
        [report] = await ingestion.run(final=True)
        [after] = await compare_sources(store, settings)
    finally:
        await ingestion.close()
        await store.close()
    assert (report.new, report.counts.replies) == (2 + between, 2 + between)
    assert (before.not_read_yet, before.problems) == (2 + between, [])
    assert (after.in_ledger, after.not_read_yet, after.problems, after.gone) == (2 + between, 0, [], 0)
    assert [task["question"] for task in exported(tmp_path)].count("mail [EMAIL_1]") == 2


async def test_a_directory_of_many_files_takes_few_threads(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.jsonl").write_text(
            f'{{"question": "What is {number} plus 1?", "answer": "{number + 1}"}}\n'
        )
    settings = config(tmp_path, folder)
    store = await Store.open(settings.state_dir)
    ingestion = Ingestion(store, settings)
    before, opened = threading.active_count(), psutil.Process().num_fds()
    reports = await asyncio.gather(*(source.read(final=True) for source in ingestion.sources()))
    assert threading.active_count() - before <= 20
    assert psutil.Process().num_fds() - opened <= 20
    assert [(report.counts.tasks, report.error) for report in reports] == [(1, None)] * 60
    await ingestion.close()
    await store.close()
