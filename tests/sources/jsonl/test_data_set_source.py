"""A data set as a source: it is written once, its tasks are all of one split, and a failure is the source's error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config, parse
from flywheel.records.skipping import MIN_REPLIES
from flywheel.sources.ingestion import Ingestion
from flywheel.store.erasures import Kind
from flywheel.store.kernel.database import Store
from tests.factories.erased import erase_rows
from tests.factories.state import open_state
from tests.factories.trace import write_lines


def config_of(folder: Path, sources: list[dict[str, Any]]) -> Config:
    state = {"dir": str(folder / "state")}
    raw = {"state": state, "sources": [{"type": "jsonl", **each} for each in sources]}
    return parse(raw, "the test's", folder)


async def ingested(config: Config) -> tuple[list[str], dict[str, str]]:
    """The errors of the sources, and the split of each task by its question."""
    store = await Store.open(config.state_dir)
    ingestion = Ingestion(store, config)
    try:
        reports = await ingestion.run(final=True)
    finally:
        await ingestion.close()
        await store.close()
    lines = config.task_file.read_text().splitlines() if config.task_file.exists() else []
    tasks = [json.loads(line) for line in lines]
    return [str(each.error) for each in reports if each.error], {
        task["main_query"]: task["metadata"]["split"] for task in tasks
    }


def rows(name: str, count: int) -> str:
    return "".join(json.dumps({"question": f"{name} {n}?", "answer": f"#### {n}"}) + "\n" for n in range(count))


@pytest.mark.slow
@pytest.mark.training
async def test_each_split_of_a_folder_is_on_its_side(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "sums"
    folder.mkdir()
    for name, count in (("train", 20), ("test", 10)):
        (folder / f"{name}.jsonl").write_text(rows(name, count))
    sources = [
        {"dataset": {"path": "./sums", "split": "train"}, "split": "train"},
        {"dataset": {"path": "./sums", "split": "test"}, "split": "held-out"},
    ]
    config = config_of(tmp_path, sources)
    errors, splits = await ingested(config)
    assert not errors
    assert {query.split()[0]: split for query, split in splits.items()} == {"train": "train", "test": "held-out"}
    assert len(splits) == 30
    made = sorted(path.name for path in (config.state_dir / "datasets").iterdir())
    assert made == ["sums-test.jsonl", "sums-train.jsonl"]
    # What was written is not written again.
    (folder / "train.jsonl").write_text(rows("changed", 3))
    assert (await ingested(config))[1] == splits


async def test_lines_of_a_split_of_their_own_need_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(rows("held", 12))
    _, splits = await ingested(config_of(tmp_path, [{"path": "held.jsonl", "split": "held-out"}]))
    assert set(splits.values()) == {"held-out"} and len(splits) == 12


@pytest.mark.slow
async def test_a_data_set_that_cannot_be_read_is_the_sources_error(tmp_path: Path) -> None:
    (tmp_path / "wrong.csv").write_bytes(b"\x00\xff")
    config = config_of(tmp_path, [{"dataset": {"path": "./wrong.csv"}}])
    [error], splits = await ingested(config)
    assert f"cannot write the data set {tmp_path}/wrong.csv to {config.state_dir}/datasets/wrong.csv.jsonl" in error
    assert not splits and list((config.state_dir / "datasets").iterdir()) == []


async def test_lines_are_erased_from_the_copy_alone_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    def written(path: Path) -> bytes:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ({"question": f"{name}?", "answer": "1", "metadata": {"conversation_id": name}} for name in "abc")
        spoken = [json.dumps(line) for line in lines]
        path.write_bytes("\n".join(["{torn", *spoken, "", "{torn at the end"]).encode())
        return path.read_bytes()

    copy, named, other = (tmp_path / name for name in ("state/datasets/x.jsonl", "named.jsonl", "other.jsonl"))
    before = [written(path) for path in (copy, named, other)]
    config = config_of(
        tmp_path,
        [{"dataset": {"path": "./x"}}, {"path": "named.jsonl", "dataset": {"path": "./y"}}, {"path": "other.jsonl"}],
    )
    store = await Store.open(config.state_dir)
    ingestion = Ingestion(store, config)
    try:
        assert await ingestion.erase_data_sets((), {"b", "none"}) == 2
        assert await ingestion.erase_data_sets((), {"b", "none"}) == 0, "it may be done again"
    finally:
        await ingestion.close()
        await store.close()
    assert other.read_bytes() == before[2], "a file of the user is only read"
    for path, was in ((copy, before[0]), (named, before[1])):
        assert path.read_bytes().split(b"\n") == [b"" if b'"b?"' in line else line for line in was.split(b"\n")]


async def test_what_is_erased_is_taken_out_of_a_copy_that_is_written_again(tmp_path: Path) -> None:
    copy = tmp_path / "state" / "datasets" / "x.jsonl"
    copy.parent.mkdir(parents=True)
    line = {"question": "secret?", "answer": "1", "metadata": {"conversation_id": "talk"}}
    text = rows("other", 2) + json.dumps(line) + "\n"
    copy.write_text(text)
    config = config_of(tmp_path, [{"dataset": {"path": "./x"}}])
    await ingested(config)
    async with open_state(config.state_dir) as store:
        assert await store.write(erase_rows, Kind.CONVERSATION, "talk") == 1
    copy.write_text("\n" + text)
    errors, _ = await ingested(config)
    assert not errors
    assert copy.read_text() == "\n" + rows("other", 2) + "\n"


async def test_a_warning_that_an_erasure_removed_is_said_again(tmp_path: Path) -> None:
    """Also that of a source of which nothing was erased."""
    write_lines(tmp_path / "asked.jsonl", *({"question": f"{n}?"} for n in range(MIN_REPLIES)))
    write_lines(
        tmp_path / "told.jsonl", {"question": "secret?", "answer": "1", "metadata": {"conversation_id": "talk"}}
    )
    config = config_of(tmp_path, [{"path": "asked.jsonl"}, {"path": "told.jsonl"}])
    warnings = "SELECT group_concat(warning, '') FROM sources"
    async with open_state(config.state_dir) as store:
        ingestion = Ingestion(store, config)

        async def said() -> str:
            return str(await store.read(lambda conn: conn.exec_driver_sql(warnings).scalar_one()))

        try:
            await ingestion.run(final=True)
            before = await said()
            assert "are skipped as `no_answer`" in before
            assert await store.write(erase_rows, Kind.CONVERSATION, "talk") == 1
            for source in ingestion.sources():
                source.count_again()
            assert "are skipped" not in await said()
            await ingestion.run(final=True)
            assert await said() == before
        finally:
            await ingestion.close()
