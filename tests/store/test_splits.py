"""Which side a conversation is on: the same for ever, and the same for those that begin alike."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, func, select, update

from flywheel.config.file import load, parse
from flywheel.records.states import Split
from flywheel.records.task import split_of
from flywheel.records.trace import Reply
from flywheel.sources.ingestion import Ingestion
from flywheel.store import gate_tests, ledger, samples, splits
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import recent_bands, signature_bands, tasks
from flywheel.store.views import left_out
from flywheel.store.views.lineage import why
from tests.daemon.following import killed_at
from tests.factories.config import write_config
from tests.factories.state import open_state
from tests.factories.trace import batch, record, reply
from tests.sources.studio.writer import DATA

QUESTION = "A train travels at 150 km/h for 7 hours. How many kilometres does it cover?"
LIKE_IT = (
    QUESTION.lower(),
    f"Please: {QUESTION}",
    QUESTION.replace(" ", "  "),
    f"{QUESTION}\n",
    QUESTION.replace("?", "  ??"),
)
OTHERS = (QUESTION.replace("150", "160"), "Who wrote the Odyssey?", "")


def put(conn: Connection, *replies: Reply) -> None:
    record(conn, ledger.source_id(conn, "/a"), batch(*replies), train_ratio=0.5, split_seed=1)


async def told(store: Store) -> dict[str, Split]:
    rows = await store.read(lambda conn: conn.execute(select(tasks.c.payload, tasks.c.split)).all())
    for payload, split in rows:
        assert payload["metadata"]["split"] == split
    return {payload["metadata"]["span_id"]: Split(split) for payload, split in rows}


def by_hash(one: Reply) -> Split:
    return split_of(one.conversation_id, one.trace_id, train_ratio=0.5, seed=1)


@pytest.mark.parametrize("at_once", [True, False])
async def test_near_duplicates_share_their_side_in_whatever_order_they_come(store: Store, at_once: bool) -> None:
    first = [reply(n, query=QUESTION) for n in (1,)]
    later = [reply(10 + 7 * n, query=text) for n, text in enumerate(LIKE_IT * 3)]
    assert {by_hash(one) for one in later} == {Split.TRAIN, Split.HELD_OUT}, "the hash alone would part them"
    for some in ([*first, *later],) if at_once else ([one] for one in (*first, *later)):
        await store.write(put, *some)
    assert set((await told(store)).values()) == {by_hash(first[0])}


async def test_other_questions_are_decided_by_the_hash(store: Store) -> None:
    many = [reply(n, query=text.replace("Odyssey", f"Odyssey {n}")) for n, text in enumerate(OTHERS * 8)]
    many = [one for n, one in enumerate(many) if n % 3]
    await store.write(put, *many)
    wanted = {one.span_id: by_hash(one) for one in many if one.query}
    found = await told(store)
    assert {span: found[span] for span in wanted} == wanted


async def test_a_later_turn_stays_with_its_conversation(store: Store) -> None:
    one = reply(1, query=QUESTION, conversation_id="k")
    await store.write(put, one)
    more = [reply(n, conversation_id="k", turn=n, query=f"Now double that, {n}.") for n in range(2, 9)]
    await store.write(put, *more)
    assert set((await told(store)).values()) == {by_hash(one)}


@pytest.mark.parametrize("portion", [1, 3, 60])
async def test_a_template_is_no_duplicate(store: Store, monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    """Repetitions among its members change nothing: each follows its own first one, and counts for nothing."""
    many = [reply(n, query=QUESTION + "?" * n) for n in range(60)]
    hashes = [by_hash(one) for one in many]
    # Both the last that joins and the first that does not would be elsewhere by their hash.
    most = next(n for n in range(5, 60) if hashes[n - 1] is hashes[n] is not hashes[0])
    monkeypatch.setattr(splits, "TEMPLATE", most)
    again = [reply(100 + n, query=one.query) for n, one in enumerate(many)]
    for start in range(0, 60, portion):
        await store.write(put, *many[start : start + portion], *again[start : start + portion])
    found = await told(store)
    assert {found[one.span_id] for one in many[:most]} == {hashes[0]}
    assert [found[one.span_id] for one in many[most:]] == hashes[most:]
    assert [found[one.span_id] for one in again] == [found[one.span_id] for one in many]


@pytest.mark.parametrize("portion", [1, 7, 300])
@pytest.mark.parametrize("query", [QUESTION, ""])
async def test_exact_repeats_follow_their_first_however_many(store: Store, portion: int, query: str) -> None:
    many = [reply(n, query=query) for n in range(300)]
    assert {by_hash(one) for one in many} == {Split.TRAIN, Split.HELD_OUT}
    for start in range(0, 300, portion):
        await store.write(put, *many[start : start + portion])
    assert set((await told(store)).values()) == {by_hash(many[0])}


ANOTHER_PROMPT = {"history": ({"role": "system", "content": "You are terse."},)}
ANOTHER_TOOL = {"tools": ({"type": "function", "function": {"name": "add"}},)}


@pytest.mark.parametrize("other", [ANOTHER_PROMPT, ANOTHER_TOOL])
async def test_only_what_is_the_same_in_prompt_tools_and_question_is_an_exact_repeat(
    store: Store, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """The rest is a near-repeat, of which `TEMPLATE` are one."""
    monkeypatch.setattr(splits, "TEMPLATE", 1)
    first = reply(1, query=QUESTION)
    second = next(
        one for n in range(2, 99) if by_hash(one := reply(n, query=QUESTION, **other)) is not by_hash(first)
    )
    for one in (first, second):
        await store.write(put, one)
    for n in range(100, 120):
        await store.write(put, reply(n, query=QUESTION), reply(100 + n, query=QUESTION, **other))
    found = await told(store)
    assert {found[f"span{n:012d}"] for n in range(100, 120)} == {by_hash(first)}
    assert {found[f"span{n:012d}"] for n in range(200, 220)} == {by_hash(second)}


async def test_a_conversation_whose_later_turn_comes_first_follows_what_it_begins_with(store: Store) -> None:
    begun = ({"role": "system", "content": "You do sums."}, {"role": "user", "content": QUESTION})
    later = (*begun, {"role": "assistant", "content": "1050"})
    await store.write(put, first := reply(1, query=QUESTION))
    many = [reply(n, query="And back?", turn=1, history=later) for n in range(2, 12)]
    assert {by_hash(one) for one in many} == {Split.TRAIN, Split.HELD_OUT}
    await store.write(put, *many)
    assert set((await told(store)).values()) == {by_hash(first)}


async def gate_of(store: Store) -> set[str]:
    """The span ids of the tasks that the gate may ask."""
    await store.write(lambda conn: conn.execute(update(tasks).values(state="accepted")))
    ids = [number for number, _ in await store.read(gate_tests.candidates, 1000)]
    rows = await store.read(
        lambda conn: conn.execute(select(tasks.c.payload).where(tasks.c.id.in_(ids))).scalars().all()
    )
    assert len(ids) == await store.read(samples.count_held_out)
    assert sum((await store.read(left_out.count_left_out)).values()) == 2
    return {payload["metadata"]["span_id"] for payload in rows}


def on(side: Split, number: int, **values: Any) -> Reply:
    """A reply whose conversation the hash puts on a side."""
    return next(one for n in range(number, number + 99) if by_hash(one := reply(n, **values)) is side)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("trained_first", [True, False])
async def test_a_held_out_task_that_is_repeated_in_training_leaves_the_gate(
    store: Store, at_once: bool, trained_first: bool
) -> None:
    """Dialogues that share a conversation id are on its side, whatever they ask."""
    trained = on(Split.TRAIN, 100, query="Who wrote the Odyssey?")
    kept = on(Split.HELD_OUT, 300, query="Where is Ithaca?")
    alike = [
        reply(n, query=QUESTION, conversation_id=one.conversation_id)
        for n, one in ((500, trained), (501, kept), (502, kept))
    ]
    other = reply(503, query="Where is Troy?", conversation_id=kept.conversation_id)
    order = [trained, kept, other, *(alike if trained_first else alike[::-1])]
    for some in (order,) if at_once else ([one] for one in order):
        await store.write(put, *some)
    found = await told(store)
    assert [found[one.span_id] for one in alike] == [Split.TRAIN, Split.HELD_OUT, Split.HELD_OUT], "where they were"
    assert await gate_of(store) == {kept.span_id, other.span_id}
    await store.write(put, late := reply(504, query=QUESTION))
    assert (await told(store))[late.span_id] is Split.TRAIN, "what is trained on already is followed"
    for one in alike[1:]:
        story = await store.read(why, one.span_id)
        assert story is not None
        (told_of,) = story["replies"][0]["task"]["left_out"]
        assert told_of["why"] == "a conversation in the training split begins exactly like this held-out one"


async def test_those_that_joined_are_counted_without_a_look_at_the_others(store: Store) -> None:
    plan = await store.read(
        lambda conn: conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {splits._FOLLOWERS}", ("k",)).all()
    )
    assert "conversations_joined" in str(plan)


@pytest.mark.parametrize("recent", [0, 25, 10**6])
async def test_near_duplicates_are_found_in_both_tables_of_bands(
    store: Store, monkeypatch: pytest.MonkeyPatch, recent: int
) -> None:
    monkeypatch.setattr(splits, "RECENT", recent)
    texts = [f"{QUESTION} And what about number {n} of them?" for n in range(12)]
    first = [reply(n, query=text) for n, text in enumerate(texts)]
    later = [reply(100 + n, query=text.lower()) for n, text in enumerate(texts)]
    assert any(by_hash(one) != by_hash(other) for one, other in zip(first, later, strict=True))
    for one in (*first, *later):
        await store.write(put, one)
    kept = await store.read(
        lambda conn: [
            conn.execute(select(func.count()).select_from(table)).scalar_one()
            for table in (recent_bands, signature_bands)
        ]
    )
    assert sum(kept) == 12 * 10 + 24 and kept[0] <= recent, "bands of the first ones alone, and how each begins"
    assert (kept[1] > 0) is (recent < 144)
    found = await told(store)
    assert [found[one.span_id] for one in later] == [by_hash(one) for one in first]


async def test_near_duplicates_of_the_fixtures(tmp_path: Path, store: Store) -> None:
    config = parse(
        {
            "state": {"dir": str(tmp_path)},
            # Here each dialogue is a conversation; with clients of 1.x, a whole run of them is one.
            "sources": [{"path": str(DATA / "new_v2.sqlite")}],
        },
        "test",
        tmp_path,
    )
    ingestion = Ingestion(store, config, export_tasks=False)
    await ingestion.run(final=True)
    await ingestion.close()
    rows = await store.read(lambda conn: conn.execute(select(tasks.c.payload, tasks.c.split)).all())
    sides_of: dict[str, set[str]] = {}
    for payload, split in rows:
        query = payload["main_query"].casefold().removeprefix("please: ")
        key = "".join(char for char in query if char.isalnum() or char in "+*%/")
        if payload["metadata"]["turn"] == 0:
            sides_of.setdefault(key, set()).add(split)
    assert {key: found for key, found in sides_of.items() if len(found) > 1} == {}


@pytest.mark.parametrize("root_first", [True, False])
async def test_a_fork_is_on_the_side_of_its_root(store: Store, root_first: bool) -> None:
    roots = [on(Split.TRAIN, 0, query=QUESTION), on(Split.HELD_OUT, 50, query="Who wrote the Odyssey?")]
    forks = [
        reply(100 + 10 * n + m, query=f"{n} times {m}?", turn=1, conversation_id=f"fork-{n}-{m}", root=of)
        for n, of in enumerate(root.conversation_id for root in roots)
        for m in range(5)
    ]
    for one in (*roots, *forks) if root_first else (*forks, *roots):
        await store.write(put, one)
    found = await told(store)
    assert set(found.values()) == {Split.TRAIN, Split.HELD_OUT}
    for n, root in enumerate(roots):
        assert {found[one.span_id] for one in forks[5 * n : 5 * n + 5]} == {found[root.span_id]}


async def test_each_source_has_its_own_ratio(store: Store) -> None:
    def put_all(conn: Connection) -> None:
        for number, (source, ratio) in enumerate({"/a": 0.0, "/b": 1.0}.items()):
            found = batch(*(reply(n) for n in range(9 * number, 9 * number + 9)), source=source)
            record(conn, ledger.source_id(conn, source), found, train_ratio=ratio, split_seed=1)

    await store.write(put_all)
    assert list((await told(store)).values()) == [Split.HELD_OUT] * 9 + [Split.TRAIN] * 9


async def test_the_line_of_a_task_is_written_once_with_its_split(store: Store) -> None:
    def watch(conn: Connection) -> None:
        conn.exec_driver_sql("CREATE TABLE changed (split)")
        change = "INSERT INTO changed VALUES (new.split)"
        conn.exec_driver_sql(f"CREATE TRIGGER watch AFTER UPDATE ON tasks BEGIN {change}; END")

    await store.write(watch)
    await store.write(put, *(reply(n) for n in range(40)), reply(40, conversation_id="ü", extra={"split": "mine"}))
    assert not await store.read(lambda conn: conn.exec_driver_sql("SELECT split FROM changed").all())
    assert {*(await told(store)).values()} == {*Split}


async def test_a_task_that_joins_a_conversation_of_the_other_split_keeps_its_own(store: Store) -> None:
    trained, kept = on(Split.TRAIN, 0, query="Who wrote the Odyssey?"), on(Split.HELD_OUT, 50, query="Where is Troy?")
    await store.write(put, trained, kept)
    before = await told(store)
    assert set(before.values()) == {*Split}
    await store.write(put, replace(trained, conversation_id=kept.conversation_id))
    await store.write(put, replace(kept, conversation_id=trained.conversation_id))
    assert await told(store) == before


@pytest.mark.slow
async def test_kill_9_before_a_commit_changes_no_split(tmp_path: Path) -> None:
    sources, ingest = [{"path": str(DATA / "new_v2.sqlite")}], {"train_ratio": 0.5}
    found = []
    for name, arrivals in (("killed", (3, 2)), ("whole", ())):
        (folder := tmp_path / name).mkdir()
        config = load(file := write_config(folder, sources=sources, ingest=ingest))
        for arrival in arrivals:
            await asyncio.to_thread(killed_at, file, "before commit", arrival)
        async with open_state(config.state_dir) as store:
            ingestion = Ingestion(store, config)
            await ingestion.run(final=True)
            await ingestion.close()
            found.append(await told(store))
    assert {*found[0].values()} == {*Split}
    assert found[0] == found[1]
