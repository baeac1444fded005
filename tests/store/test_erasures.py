"""Erased conversations are gone from the state, stay away, and are counted."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sqlalchemy import Connection, insert, select, text

from flywheel.records.states import Label, ReplyState, SkipReason, TaskState
from flywheel.records.trace import DeadRow, Reply
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.store import erasures, judge_usage, labels, ledger, notices, samples
from flywheel.store.dead_letters import dead_letter
from flywheel.store.erasures import ErasureState, Kind
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import STATE_FILE, Store
from flywheel.store.views import balance
from flywheel.system.purge import purge
from tests.factories.erased import erase_rows as erase
from tests.factories.planted import WORDS, planted_in
from tests.factories.state import execute
from tests.factories.task import task_keys
from tests.factories.trace import START, put_replies, reply
from tests.factories.verdict import judge_all, put_judged

PLANTED = " ".join(WORDS)


def outspoken(line: dict[str, object]) -> Verdict:
    result = CriterionResult("correct", "yes", 1.0, True, f"it says {line['answer']}")
    return Verdict(Outcome.ACCEPTED, 1.0, (result,), f"because of {line['main_query']}", calls=1)


def secret(number: int, **values: object) -> Reply:
    planted = {
        "query": f"{PLANTED} question {number}",
        "answer": f"{PLANTED} answer",
        "history": ({"role": "system", "content": f"Be kind to {PLANTED}."},),
        "conversation_id": f"conversation of {WORDS[0]}",
        "user": f"user {WORDS[1]}",
        "skip_detail": f"because {PLANTED}",
    }
    return reply(number, **{**planted, **values})


async def test_nothing_of_an_erased_conversation_is_left_in_the_files_of_the_state(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    shown = secret(1), secret(2, skip=SkipReason.ERROR), secret(3)
    await store.write(
        put_judged,
        reply(9),
        *shown,
        judge=outspoken,
        dead=(DeadRow(7, "span-of-the-dead-row", shown[0].trace_id, PLANTED, PLANTED),),
    )
    keys = [row[0] for row in execute(tmp_path / STATE_FILE, "SELECT key FROM tasks WHERE payload LIKE '%Quixo%'")]
    await store.write(labels.add, keys[0], Label.ACCEPT, "ann", comment=PLANTED)
    await store.write(dead_letter, "task", keys[1], f"it broke at {PLANTED}", PLANTED)
    await store.write(
        lambda conn: conn.execute(
            insert(schema.requests).values(
                kind="label", arguments={"task_id": keys[0], "comment": PLANTED}, requested_by="ann", state="done",
                created_at="2026-01-01",
            )
        )
    )  # fmt: skip
    await store.write(judge_usage.add_error, f"HTTP 400: no answer to {PLANTED}")
    await store.write(notices.note_judge, f"it cannot read {PLANTED}")
    assert set(planted_in(tmp_path)) == set(WORDS)
    assert await store.write(erase, Kind.CONVERSATION, shown[0].conversation_id) == 4
    assert purge(tmp_path / STATE_FILE, 5.0)
    ids = [*WORDS, *keys, *(each.span_id for each in shown), "span-of-the-dead-row"]
    assert planted_in(tmp_path, ids) == {}
    books = await store.read(balance.balance)
    assert books.balanced, books.problems
    assert (books.ends["erased"], books.ends["accepted"], books.replies) == (4, 1, 5)
    await store.close()
    assert planted_in(tmp_path, ids) == {}


@pytest.mark.slow
async def test_nothing_is_left_in_unused_parts_of_pages(tmp_path: Path) -> None:
    """Short rows and keys of indexes are moved between pages, and SQLite leaves copies of them there."""
    chance = random.Random(1)  # one of those in which they were found
    store = await Store.open(tmp_path)
    number = 0
    for _ in range(60):
        some = []
        for _ in range(chance.randint(5, 60)):
            number += 1
            ids = {name: f"{chance.random()}" for name in ("span_id", "trace_id", "conversation_id")}
            if chance.random() < 0.1:
                ids = {name: f"{WORDS[0]} {value}" for name, value in ids.items()} | {"conversation_id": WORDS[0]}
            some.append(reply(number, **ids, query=ids["trace_id"], answer="x" * chance.randint(1, 100), history=()))
        await store.write(put_judged, *some, judge=outspoken)
    assert await store.write(erase, Kind.CONVERSATION, WORDS[0]) > 100
    await store.release_memory()
    assert purge(tmp_path / STATE_FILE, 5.0, rewrite=True)
    assert planted_in(tmp_path) == {}
    await store.close()
    assert planted_in(tmp_path) == {}


async def test_without_secure_delete_the_search_would_find_it(tmp_path: Path) -> None:
    """The test above can fail: an ordinary connection leaves what it deletes in the file."""
    store = await Store.open(tmp_path)
    await store.write(put_replies, secret(1))
    await store.close()
    execute(tmp_path / STATE_FILE, "UPDATE tasks SET payload = '{}'")
    assert purge(tmp_path / STATE_FILE, 5.0)
    assert WORDS[0] in planted_in(tmp_path)


async def test_what_an_erased_conversation_brings_later_is_counted_and_not_stored(store: Store) -> None:
    first = reply(1, conversation_id="a", user="u")
    await store.write(put_replies, first)
    await store.write(erase, Kind.CONVERSATION, "a")
    again = await store.write(put_replies, first)
    assert (again.new_tasks, again.new_replies, again.erased) == (0, 0, 0)
    later = reply(2, conversation_id="a", user="u")
    fork = reply(3, conversation_id="b", root="a")
    in_its_trace = reply(4, conversation_id="c", trace_id=first.trace_id)
    dead = DeadRow(5, "s5", first.trace_id, "no JSON", "text")
    done = await store.write(put_replies, later, fork, in_its_trace, reply(6), dead=(dead,))
    assert (done.new_tasks, done.new_replies, done.dead, done.erased) == (1, 1, 0, 4)
    books = await store.read(balance.balance)
    assert books.balanced and books.ends == {**books.ends, "erased": 5, "pending": 1, "dead": 0}
    assert await store.read(task_keys) and len(await store.read(task_keys)) == 2
    counts = (await store.read(ledger.counts_by_source, 1))[1]
    assert (counts.replies, counts.tasks, counts.erased) == (6, 1, 5)


async def test_replies_with_ids_that_repeat_are_counted_once_in_whatever_order_they_are_read(store: Store) -> None:
    """The name of one depends on what was stored before it; the second here was stored first."""
    early, late = (
        reply(number, span_id="s", trace_id="t", conversation_id="a", started_at=START + timedelta(hours=number))
        for number in (1, 2)
    )
    unfinished = reply(3, conversation_id="a", skip=SkipReason.UNFINISHED)
    for each in (late, early, unfinished):
        await store.write(put_replies, each)
    assert await store.write(erase, Kind.CONVERSATION, "a") == 3
    # Its agent's own span has arrived, which began earlier.
    finished = replace(unfinished, skip=None, started_at=unfinished.started_at - timedelta(minutes=1))
    for some in ((early, late), (late,), (early,), (finished,), (early, late, finished)):
        assert (await store.write(put_replies, *some)).erased == 0
    books = await store.read(balance.balance)
    assert books.balanced and books.ends == {**books.ends, "erased": 3, "pending": 0, "skipped": 0}


async def test_another_run_with_the_ids_of_an_erased_one_is_stored(store: Store) -> None:
    """Of a client that gives every run the same ids."""
    run = reply(1, span_id="s", trace_id="t", conversation_id="a", started_at=START)
    await store.write(put_replies, run)
    await store.write(erase, Kind.CONVERSATION, "a")
    for hours, new in ((20, 0), (24 * 30, 1)):
        another = replace(run, conversation_id=f"after {hours} hours", started_at=START + timedelta(hours=hours))
        done = await store.write(put_replies, another)
        assert (done.new_tasks, done.erased) == (new, 1 - new)
    assert (await store.write(put_replies, run)).erased == 0
    books = await store.read(balance.balance)
    assert books.balanced and books.ends == {**books.ends, "erased": 2, "pending": 1}


async def test_a_user_is_found_by_pseudonym_and_new_conversations_are_ingested_unless_blocked(store: Store) -> None:
    own = reply(1, conversation_id="a", user="u"), reply(2, conversation_id="b", user="u")
    await store.write(put_replies, *own, reply(3, conversation_id="b", user="v"), reply(4, user="v"))
    assert await store.write(erase, Kind.USER, "u") == 3
    assert await store.write(erase, Kind.USER, "u") == 0
    done = await store.write(put_replies, reply(5, user="u"), reply(6, conversation_id="b", user="v"))
    assert (done.new_tasks, done.erased) == (1, 1)
    assert await store.write(erase, Kind.USER, "u", blocks=True) == 1
    done = await store.write(put_replies, reply(7, user="u"), reply(8, user="v"))
    assert (done.new_tasks, done.erased) == (1, 1)
    # An erasure without it does not lift the block.
    await store.write(erase, Kind.USER, "u")
    assert (await store.write(put_replies, reply(10, user="u"))).erased == 1


async def test_a_conversation_without_an_id_is_its_trace(store: Store) -> None:
    await store.write(put_replies, reply(1, conversation_id="unknown"), reply(2, conversation_id="unknown"))
    assert await store.write(erase, Kind.CONVERSATION, reply(1).trace_id) == 1
    assert (await store.read(balance.balance)).ends["pending"] == 1
    assert await store.write(erase, Kind.CONVERSATION, "unknown") == 0


async def test_copies_in_other_sources_are_erased(store: Store) -> None:
    await store.write(put_replies, reply(1, conversation_id="a"), source="/a")
    await store.write(put_replies, reply(1, conversation_id="a"), source="/b")
    assert await store.write(erase, Kind.CONVERSATION, "a") == 2
    books = await store.read(balance.balance)
    assert books.balanced and books.ends["erased"] == 2


async def test_nothing_takes_an_erased_task(store: Store) -> None:
    await store.write(put_judged, reply(1, conversation_id="a"), reply(2), train_ratio=1.0)
    assert len(await store.read(samples.candidates)) == 2
    await store.write(erase, Kind.CONVERSATION, "a")
    assert len(await store.read(samples.candidates)) == 1
    await store.write(judge_all)
    states = await store.read(lambda conn: list(conn.execute(select(schema.tasks.c.state)).scalars()))
    assert sorted(states) == [TaskState.ACCEPTED, TaskState.ERASED]


async def test_what_repeated_an_erased_task_is_judged_again(store: Store) -> None:
    await store.write(put_judged, reply(1, conversation_id="a"), reply(2), train_ratio=1.0)

    def repeat(conn: Connection) -> None:
        ids = list(conn.execute(select(schema.tasks.c.id).order_by(schema.tasks.c.id)).scalars())
        values = {"similarity": 1.0, "method": "exact", "created_at": ""}
        conn.execute(insert(schema.duplicates).values(task_id=ids[1], original_id=ids[0], **values))
        conn.execute(schema.tasks.update().where(schema.tasks.c.id == ids[1]).values(state=TaskState.REJECTED.value))

    await store.write(repeat)
    await store.write(erase, Kind.CONVERSATION, "a")
    states = await store.read(lambda conn: list(conn.execute(select(schema.tasks.c.state)).scalars()))
    assert states == [TaskState.ERASED, TaskState.PENDING]


async def test_erasures_beside_a_backup_are_taken_over(tmp_path: Path) -> None:
    """Only pseudonyms are kept beside it; the state that is restored has the key."""
    store = await Store.open(tmp_path / "state")
    await store.write(put_replies, reply(1, conversation_id="a", user="u"), reply(2, user="v"))
    await store.close()
    old = (tmp_path / "state" / STATE_FILE).read_bytes()
    store = await Store.open(tmp_path / "state")
    await store.write(erase, Kind.USER, "u", blocks=True)
    kept = await store.read(erasures.everything_erased)
    await store.close()
    (tmp_path / "state" / STATE_FILE).write_bytes(old)
    store = await Store.open(tmp_path / "state")
    await store.write(erasures.adopt, kept)
    to_be_erased = await store.read(erasures.in_states, ErasureState.OPEN)
    found = [await store.read(erasures.conversations_of, row.id) for row in to_be_erased]
    assert sorted(found, key=len) == [set(), {"a"}], "of the user, and of the conversation"
    done = await store.write(put_replies, reply(3, conversation_id="a"), reply(4, user="u"), reply(5))
    assert (done.new_tasks, done.erased) == (1, 2)
    await store.close()


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 2)), min_size=1, max_size=4)),
        st.tuples(st.just("erase"), st.integers(0, 3)),
        st.tuples(st.just("erase user"), st.integers(0, 1)),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_STEPS)
async def test_in_any_order_each_reply_is_counted_once_and_what_is_erased_stays_so(
    steps: list[tuple[str, object]],
) -> None:
    store = await Store.empty()
    gone: set[str] = set()
    seen: dict[int, str] = {}
    try:
        for what, about in steps:
            if what == "put":
                assert isinstance(about, list)
                # A reply has one conversation, and its content may change.
                some = dict(about)
                seen |= {number: f"c{number % 4}" for number in some}
                await store.write(
                    put_replies,
                    *(
                        reply(n, conversation_id=f"c{n % 4}", user=f"u{n % 2}", answer=f"answer {version}")
                        for n, version in some.items()
                    ),
                )
            elif what == "erase":
                gone.add(f"c{about}")
                await store.write(erase, Kind.CONVERSATION, f"c{about}")
            else:
                # The conversations of a user have even or odd numbers.
                gone |= {name for name in seen.values() if int(name[1:]) % 2 == about}
                await store.write(erase, Kind.USER, f"u{about}")
            books = await store.read(balance.balance)
            assert books.balanced and books.replies == len(seen)
            assert books.ends["erased"] == sum(name in gone for name in seen.values())
            left = await store.read(
                lambda conn: set(
                    conn.execute(
                        select(schema.replies.c.conversation_id).where(
                            schema.replies.c.state != ReplyState.ERASED.value
                        )
                    ).scalars()
                )
            )
            assert not left & gone
    finally:
        await store.close()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), st.just("erase"))))
async def test_in_any_order_each_reply_with_ids_that_repeat_is_counted_once(steps: list[list[int] | str]) -> None:
    """Runs of a client that gives each the ids of two spans, an hour apart. An erasure takes all runs of a trace."""
    store = await Store.empty()
    seen: set[int] = set()
    is_erased = False
    try:
        for step in steps:
            if isinstance(step, str):
                await store.write(erase, Kind.CONVERSATION, "a")
                is_erased = True
            else:
                seen |= {*step}
                ids = {"trace_id": "t", "conversation_id": "a"}
                runs = (reply(n, span_id=f"s{n % 2}", started_at=START + timedelta(hours=n), **ids) for n in step)
                await store.write(put_replies, *runs)
            books = await store.read(balance.balance)
            assert books.balanced and books.replies == len(seen)
            assert books.ends["erased"] == (len(seen) if is_erased else 0)
    finally:
        await store.close()


def shown(conn: Connection, query: str) -> list[str]:
    return list(conn.execute(text(query)).scalars())


async def test_a_row_that_cannot_be_read_belongs_to_whom_it_names(store: Store) -> None:
    def row(number: int, **values: str) -> DeadRow:
        return DeadRow(number, f"line {number}", f"hash {number}", "it is not JSON", "{torn", **values)

    await store.write(
        put_judged,
        dead=(
            row(1, conversation_id="secret talk"),
            row(2, user="ann"),
            row(3, conversation_id="talk", user="bob"),
            # As an earlier version stored it: without the names, and without a trace.
            DeadRow(4, "line 4", "", "it is not JSON", '{"main_query": 5, "metadata": {"user_id": "ann"'),
            DeadRow(5, "line 5", "", "it is not JSON", '{"main_query": 5, "metadata": {"user_id": "bob"'),
        ),
    )
    left = "SELECT subject FROM dead_letters WHERE excerpt <> '' ORDER BY id"
    assert await store.write(erase, Kind.CONVERSATION, "secret talk") == 1
    assert await store.read(shown, left) == ["line 2", "line 3", "line 4", "line 5"]
    assert await store.write(erase, Kind.USER, "ann") == 2
    assert await store.read(shown, left) == ["line 3", "line 5"]
    assert await store.write(erase, Kind.USER, "bob", blocks=True) == 2
    assert await store.read(shown, left) == []
    assert (await store.read(balance.balance)).ends["erased"] == 5

    # In another place of the file, and more of a blocked user: counted, and not stored. Another one is.
    again = (replace(row(12, user="ann"), trace_id="hash 2"), row(13, user="bob"), row(14, user="eve"))
    again += (DeadRow(15, "line 15", "", "it is not JSON", "{torn"),)
    await store.write(put_judged, dead=again)
    assert await store.read(shown, left) == ["line 14", "line 15"]
    assert (await store.read(balance.balance)).ends["erased"] == 7
