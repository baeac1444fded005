"""What the state has of a round's result loses erased tasks too: figures, sentences, system prompts and probes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, delete, insert, select, update

from flywheel.daemon.deployer import Deployer
from flywheel.daemon.rounds.removal import UNPROVABLE, erase_from_results, erase_from_round
from flywheel.errors import ServeError
from flywheel.records.erasure import ERASED as ERASED_SENTENCE
from flywheel.records.round import Probe, Recording, RoundResult
from flywheel.records.states import RoundState, Split
from flywheel.serving.client.weight_verification import can_prove
from flywheel.store import rounds
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import record
from flywheel.system.files import tree_sha256
from tests.factories.config import make_config
from tests.factories.erasure import ERASED, GONE, STAYS, TEXTS, put_erasable_round
from tests.factories.round import put_adapter, put_round
from tests.factories.trace import put_replies, replies_on
from tests.serving.fake_vllm import FakeVllm

TEXTS_OF_PROBE, PLACES_OF_TEXT = 8, 16


def probe_of(*tasks: str) -> Probe:
    """A probe with as many places in each task's text, by which the adapter differs much from the base model."""
    random = np.random.default_rng(1)
    places = [(text, 1 + at) for at in range(PLACES_OF_TEXT) for text in range(len(tasks))]
    base = -random.exponential(1, len(places))
    adapter = base + random.laplace(0, 0.6, len(places))
    recordings = (
        Recording(adapter=(adapter + noise).tolist(), base=(base - noise).tolist())
        for noise in random.normal(0, 0.001, (2, len(places)))
    )
    first, second = recordings
    texts = [list(range(1 + PLACES_OF_TEXT)) for _ in tasks]
    return Probe(texts=texts, tasks=list(tasks), places=places, first=first, second=second)


MANY = [GONE, *(f"t-{number}" for number in range(TEXTS_OF_PROBE - 1))]


def put(conn: Connection, directory: Path, probe: Probe | None) -> None:
    """A round with the first of two tasks, whose key is that of the erasable round, and another one without it."""
    put_replies(conn, *replies_on(Split.TRAIN, 2))
    conn.execute(update(schema.tasks).where(schema.tasks.c.id == 1).values(key=GONE))
    result = json.loads((directory / "result.json").read_bytes())
    reason = f"cannot train r0001: KeyError: {TEXTS[GONE]!r}"
    put_round(conn, 1, RoundState.FAILED, directory, result=result, reason=reason)
    put_round(conn, 2, RoundState.PROMOTED, directory / "none", result=result, reason="no gain")
    for number, task in ((1, 1), (2, 2)):
        dumped = probe and probe.model_dump(mode="json")
        put_adapter(conn, number, probe=dumped)
        conn.execute(insert(schema.round_samples).values(round_id=number, task_id=task, split="train"))
        record(conn, "rounds", [str(number)], "training", "failed", reason)


async def stored(store: Store, number: int) -> tuple[Any, Any, list[str]]:
    """The row of a round, that of its adapter, and the details of its events."""

    def read(conn: Connection) -> tuple[Any, Any, list[str]]:
        row = conn.execute(select(schema.rounds).where(schema.rounds.c.id == number)).one()
        adapter = conn.execute(select(schema.adapters).where(schema.adapters.c.round_id == number)).one()
        own = schema.events.c.kind == "rounds", schema.events.c.subject == str(number)
        return row, adapter, list(conn.execute(select(schema.events.c.detail).where(*own)).scalars())

    return await store.read(read)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "rounds" / "r0001"
    put_erasable_round(made)
    return made


async def test_the_result_of_a_round_in_the_state_loses_what_its_files_lose(store: Store, directory: Path) -> None:
    await store.write(put, directory, probe_of(*MANY))
    before = await stored(store, 2)
    erase_from_round(directory, ERASED, used=True)
    assert await store.write(erase_from_results, ERASED) == []
    row, adapter, details = await stored(store, 1)
    assert RoundResult.model_validate(row.result) == RoundResult.model_validate_json(
        (directory / "result.json").read_bytes()
    )
    said = json.dumps([row.result, row.reason, details], ensure_ascii=False)
    assert "Amélie" not in said and "七三九" not in said
    assert (row.reason, details) == (ERASED_SENTENCE, [ERASED_SENTENCE])
    assert {each["task_id"] for each in row.result["comparison"]["scores"]} == {STAYS, "t-stays-held-out"}
    assert await stored(store, 2) == before, "it did not use the task"
    assert await store.write(erase_from_results, ERASED) == []
    assert await stored(store, 1) == (row, adapter, details)


async def test_sentences_made_of_figures_stay_and_errors_of_attempts_go(store: Store, directory: Path) -> None:
    await store.write(put, directory, None)
    gain, left = "the gain of 0.1 (0.02 to 0.18) is shown", "its samples are free: " + "x" * 300

    def decide(conn: Connection) -> None:
        conn.execute(delete(schema.events))
        conn.execute(update(schema.rounds).where(schema.rounds.c.id == 1).values(state="promoted", reason=gain))
        for old, new, why in (
            (None, "planned", "100 samples"), ("training", "abandoned", TEXTS[GONE]),
            ("abandoned", "planned", TEXTS[GONE]), ("evaluating", "promoted", gain),
        ):  # fmt: skip
            record(conn, "rounds", ["1"], old, new, why)
        record(conn, "tasks", ["1"], "reserved", "consumed", gain)

    def refuse(conn: Connection) -> None:
        # The worker refused it: nothing was compared.
        values = {"state": "rejected", "reason": left, "result": {"outcome": "refused", "reason": left}}
        conn.execute(update(schema.rounds).where(schema.rounds.c.id == 1).values(**values))
        record(conn, "rounds", ["1"], "evaluating", "rejected", left)
        record(conn, "tasks", ["1"], "reserved", "accepted", left[:200])

    def said(conn: Connection) -> tuple[str, list[str]]:
        reason = conn.execute(select(schema.rounds.c.reason).where(schema.rounds.c.id == 1)).scalar_one()
        return reason, list(conn.execute(select(schema.events.c.detail).order_by(schema.events.c.id)).scalars())

    await store.write(decide)
    await store.write(erase_from_results, ERASED)
    erased = ERASED_SENTENCE
    assert await store.read(said) == (gain, ["100 samples", erased, erased, gain, gain])
    await store.write(refuse)
    await store.write(erase_from_results, ERASED)
    assert await store.read(said) == (erased, ["100 samples", erased, erased, gain, gain, erased, erased])


async def test_that_a_round_ended_for_an_erasure_is_known_afterwards(store: Store, directory: Path) -> None:
    """The next one need not wait, as after a failure."""
    await store.write(put, directory, None)
    ended = update(schema.rounds).where(schema.rounds.c.id == 1).values(reason=rounds.HAS_ERASED)
    await store.write(lambda conn: conn.execute(ended))
    await store.write(erase_from_results, ERASED)
    row, *_ = await stored(store, 1)
    assert row.reason == rounds.HAS_ERASED


async def test_system_prompts_whose_rollouts_are_gone_are_not_kept(store: Store, directory: Path) -> None:
    await store.write(put, directory, None)
    (directory / "result.json").unlink()
    await store.write(erase_from_results, ERASED)
    row, *_ = await stored(store, 1)
    assert row.result["sampling"]["system_prompts"] == []


async def test_a_probe_that_can_still_prove_its_adapter_stays_without_the_text(store: Store, directory: Path) -> None:
    probe = probe_of(*MANY)
    assert can_prove(probe)
    await store.write(put, directory, probe)
    assert await store.write(erase_from_results, ERASED) == []
    _, adapter, _ = await stored(store, 1)
    left = Probe.model_validate(adapter.probe)
    assert (left.tasks, len(left.places)) == (MANY[1:], (TEXTS_OF_PROBE - 1) * PLACES_OF_TEXT)
    assert can_prove(left)
    assert await store.read(rounds.why_unprovable, adapter.id) == ""


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(probe_of(GONE, "t-0", "t-1", "t-2"), id="too few places are left"),
        pytest.param(probe_of(*MANY).model_copy(update={"tasks": []}), id="it is unknown whose its texts are"),
    ],
)
async def test_an_adapter_that_cannot_be_proven_any_more_is_marked_and_not_deployed(
    store: Store, directory: Path, server: tuple[FakeVllm, str], probe: Probe
) -> None:
    await store.write(put, directory, probe)
    assert await store.write(erase_from_results, ERASED) == ["r0001"]
    assert await store.write(erase_from_results, ERASED) == [], "it is known"
    _, adapter, _ = await stored(store, 1)
    assert not adapter.probe
    assert await store.read(rounds.why_unprovable, adapter.id) == UNPROVABLE
    (adapter_dir := directory / "adapter").mkdir()
    (adapter_dir / "weights").write_text("1")
    config = make_config(directory, model={"base": "a/base", "alias": "agent"}, serving={"urls": [server[1]]})
    await store.write(_put_files, adapter_dir)
    with pytest.raises(ServeError, match=f"deploy adapter r0001: {UNPROVABLE}.*A rollback to this one needs no"):
        await Deployer(store, config).deploy("r0001", "test")


def _put_files(conn: Connection, path: Path) -> None:
    conn.execute(update(schema.adapters).values(path=str(path), sha256=tree_sha256(path)))


def test_few_places_and_small_differences_prove_nothing() -> None:
    assert not can_prove(probe_of("t-1", "t-2", "t-3"))
    near = probe_of(*MANY)
    scaled = {
        name: Recording(
            adapter=[b + (a - b) / 20 for a, b in zip(each.adapter, each.base, strict=True)], base=each.base
        )
        for name, each in (("first", near.first), ("second", near.second))
    }
    assert not can_prove(near.model_copy(update=scaled))
