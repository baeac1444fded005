"""Which samples a round can take: what ordinary installations have suffices, and what waits is counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, select

from flywheel.cli.status import facts_of
from flywheel.config.file import Config
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds import planner
from flywheel.daemon.rounds.sample_selection import choose, most_samples
from flywheel.daemon.status import snapshot
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.coreset import ORDERS
from flywheel.records.round import RoundResult, RoundSelection, RoundSpec
from flywheel.records.states import Label, RoundState, Split
from flywheel.records.trace import Reply
from flywheel.store import claims, labels, rounds, samples
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks
from flywheel.store.kernel.transitions import move
from flywheel.store.views import balance, lineage
from flywheel.system import files
from tests.daemon.filter_bench import Make, burst, run, states, tell
from tests.factories.round import comparison, debug_round
from tests.factories.trace import put_replies, replies_on, reply
from tests.factories.verdict import Judge, accepted, put_judged, rejected, settle
from tests.training.recorded.recordings import ADD, call, steps, tool

CHAINS = files.shipped_folder() / "filters"
NEEDED: dict[str, Any] = {"trigger": {"min_samples": 40}, "gate": {"min_tasks": 2, "min_power": 0}}


def by_chain(make: Make, name: str, **values: Any) -> Config:
    chain = {"chain": str(CHAINS / f"{name}.yaml"), "rubric": "rubric.yaml"}
    return make(filter=chain, **{**NEEDED, **values})


def one_kind(count: int, users: int = 0, conversations: int = 0) -> list[Reply]:
    """So many samples of one kind of question, by few users or in few conversations if it is said."""
    first = replies_on(Split.TRAIN, count)
    return [
        reply(
            1000 + n,
            query=f"What is {1000 + n} plus 1?",
            conversation_id=first[n % (conversations or count)].conversation_id,
            turn=n // conversations if conversations else 0,
            user=f"user {n % users}" if users else "",
        )
        for n in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "widened"),
    [
        ({}, None),
        ({"users": 3}, "one user may be 35% of a round"),
        ({"users": 1}, "one user may be 100% of a round"),
        ({"conversations": 3}, "one conversation may be 35% of a round"),
        ({"conversations": 1, "users": 1}, "one conversation may be 100% and one user may be 100% of a round"),
    ],
)
async def test_the_default_chain_fills_a_round_with_what_an_ordinary_installation_has(
    store: Store, make: Make, kind: dict[str, int], widened: str | None
) -> None:
    """One kind of question, few users, few conversations, bursts: none of them keeps the wheel from turning."""
    config = by_chain(make, "default")
    await tell(store, *one_kind(40, **kind), *replies_on(Split.HELD_OUT, 2))
    await run(store, config)
    assert set(await states(store)) == {"accepted"}
    assert (await store.read(planner.due, config)).start
    state = await store.read(snapshot, config)
    own = state["targets"][""]
    assert (own["free_samples"], own["waiting_samples"]) == (40, {})
    assert [text.partition(",")[0] for text in state["warnings"]] == ([widened] if widened else [])
    row = await store.write(planner.plan, config, rubric_of(config), config.state_dir / "rounds", "test")
    assert len(await store.read(rounds.samples_of, row.id, Split.TRAIN)) == 40


async def test_open_to_strangers_keeps_to_its_shares_and_holds_bursts(store: Store, make: Make) -> None:
    config = by_chain(make, "open-to-strangers")
    await tell(store, *one_kind(40), *replies_on(Split.HELD_OUT, 2))
    await run(store, config)
    due = await store.read(planner.due, config)
    assert not due.start
    waiting = "39 over their share"
    assert due.reason == f"1 of 40 samples are free; {waiting}"
    state = await store.read(snapshot, config)
    own = state["targets"][""]
    assert (own["free_samples"], own["waiting_samples"]) == (1, {"over their share": 39})
    assert ("samples", f"1 free of 40 needed, 2 held out for the gate; {waiting}") in facts_of(state)
    await tell(store, *burst(25, first=5000))
    await run(store, config)
    assert (await states(store)).count("held") > 0


async def test_the_default_chain_holds_no_burst(store: Store, make: Make) -> None:
    config = by_chain(make, "default")
    await tell(store, *burst(25))
    await run(store, config)
    assert "held" not in await states(store)


async def test_what_is_more_than_a_round_takes_is_counted_apart(tmp_path: Path, store: Store, make: Make) -> None:
    trigger = {"min_samples": 4, "max_samples": 8}
    await tell(store, *one_kind(20), *replies_on(Split.HELD_OUT, 2))
    for config in (make(trigger=trigger), by_chain(make, "default", trigger=trigger)):
        await run(store, config)
        state = await store.read(snapshot, config)
        own = state["targets"][""]
        assert (own["free_samples"], own["waiting_samples"]) == (8, {"more than a round takes": 12})


async def test_status_works_without_a_chain_that_can_be_read(store: Store, make: Make, tmp_path: Path) -> None:
    config = make(filter={"chain": "chain.yaml"})
    (tmp_path / "chain.yaml").write_text("filters: no")
    state = await store.read(snapshot, config)
    assert "read filter chain" in state["warnings"][0]
    assert state["targets"][""]["free_samples"] == 0


CLASSES: dict[str, dict[str, Any]] = {
    "no_tools": {},
    "one_tool": {"tools": (ADD,), "trajectory": steps((call(arguments={"a": 1, "b": 2}), "3"))},
    "several_tools": {
        "tools": (ADD, tool("mul")),
        "trajectory": steps((call(arguments={"a": 1}), "3"), (call("mul", arguments={"a": 1}), "3")),
    },
    "several_turns": {"turn": 1},
}


def of_classes(**counts: int) -> list[Reply]:
    """Training replies with so many of each class, and two that are held out."""
    plain = iter(replies_on(Split.TRAIN, sum(counts.values())))
    found = [replace(next(plain), **CLASSES[name]) for name, count in counts.items() for _ in range(count)]
    return [*found, *replies_on(Split.HELD_OUT, 2)]


def judge_by(conn: Connection, rubric: Rubric, judge: Judge = lambda _: accepted()) -> None:
    """Judge all tasks that are due by this rubric."""
    for task in claims.claim(conn, 100_000, rubric.hash, "j"):
        settle(conn, task.id, judge(task.line), rubric.hash, "j", 0.0)


async def planned(store: Store, config: Config) -> tuple[Any, list[int], RoundSelection]:
    """A round that is planned now, its training tasks, and how they were chosen."""
    rubric = rubric_of(config)
    row = await store.write(planner.plan, config, rubric, config.state_dir / "rounds", "test")
    spec = await store.read(planner.spec_of, row, config, rubric)
    assert spec.selection == RoundSelection.model_validate(row.selection)
    assert spec.selection is not None
    return row, await store.read(rounds.samples_of, row.id, Split.TRAIN), spec.selection


async def ended(
    store: Store,
    row: Any,
    state: RoundState,
    without_gradient: Sequence[str] = (),
    max_uses: int = 9,
    released: Sequence[str] = (),
) -> None:
    """End a planned round with a result of a comparison."""
    result = RoundResult(
        round_id=row.name,
        outcome="trained",
        comparison=comparison(),
        without_gradient=list(without_gradient),
        released=list(released),
    )

    def end(conn: Connection) -> None:
        for old, new in pairwise((RoundState.PLANNED, RoundState.TRAINING, RoundState.EVALUATING)):
            move(conn, row.id, old, new)
        rounds.store_result(conn, row.id, result)
        rounds.finish(conn, row.id, RoundState.EVALUATING, state, "it ended", max_uses=max_uses)

    await store.write(end)


def small(make: Make, **training: Any) -> Config:
    return make(filter={"rubric": "rubric.yaml"}, **NEEDED, training=training)


async def test_quotas_of_classes_are_planned_and_what_is_missing_is_said(store: Store, make: Make) -> None:
    weights = {"one_tool": 2, "several_tools": 1, "no_tools": 1, "several_turns": 0}
    config = small(make, task_weights=weights, steps=2, prompts_per_step=6)
    await store.write(put_judged, *of_classes(no_tools=20, one_tool=8, several_tools=1, several_turns=3))
    row, train, selection = await planned(store, config)
    structures = await store.read(lambda conn: dict(conn.execute(select(tasks.c.id, tasks.c.structure)).all()))
    assert Counter(structures[task] for task in train) == {"one_tool": 7, "no_tools": 4, "several_tools": 1}
    assert selection.sentences == [
        "12 of 32 free samples: those of the fewest rounds first, then the oldest",
        "one_tool: 7 of 8, 6 by its weight",
        "several_tools: 1 of 1, 3 by its weight, 2 too few",
        "no_tools: 4 of 20, 3 by its weight",
        "left out 3: of a class without a weight in training.task_weights",
        "left out 17: more than a round takes",
    ]
    story = await store.read(lineage.why, row.name)
    assert story is not None
    assert RoundSelection.model_validate(story["selection"]) == selection
    assert {sample["class"] for sample in story["samples"]} == {"one_tool", "no_tools", "several_tools"}


async def test_the_same_plan_follows_from_the_same_state(store: Store, make: Make) -> None:
    config = small(make, task_weights={"one_tool": 1, "no_tools": 1}, replay={"ratio": 0.5}, prompts_per_step=4)
    await store.write(put_judged, *of_classes(no_tools=9, one_tool=9))
    choices = [await store.read(choose, config, rubric_of(config)) for _ in range(2)]
    assert choices[0] == choices[1]
    row, train, selection = await planned(store, config)
    assert (train, selection) == (sorted(choices[0][0].tasks), choices[0][1])
    assert selection.seed == row.seed


async def test_prompts_with_rejected_replies_are_used_as_often_as_others(store: Store, make: Make) -> None:
    """They keep their state, and none is trained on after a promoted round had it."""
    replies = [*replies_on(Split.TRAIN, 6), *replies_on(Split.HELD_OUT, 2)]
    wrong = {each.span_id for each in replies[:2]}
    verdict = lambda line: rejected() if line["metadata"]["span_id"] in wrong else accepted()  # noqa: E731
    await store.write(put_judged, *replies, judge=verdict)
    assert len((await store.read(choose, small(make), rubric_of(small(make))))[0].tasks) == 4
    config = small(make, prompts="decided", max_uses=2)
    assert (await store.read(snapshot, config))["targets"][""]["free_samples"] == 6
    for uses in range(2):
        row, train, selection = await planned(store, config)
        assert (len(train), selection.chosen) == (6, 6), uses
        assert (await states(store)).count("rejected") == 2
        await ended(store, row, RoundState.REJECTED)
    row, train, _ = await planned(store, config)
    assert len(train) == 4, "two rounds had the rejected ones"
    assert (await states(store)).count("reserved") == 4
    await ended(store, row, RoundState.PROMOTED)
    once = small(make, prompts="decided", max_uses=9)
    assert await store.read(samples.count_free, once.takes.train) == 2, "none of them was in a promoted round"
    row, train, _ = await planned(store, once)
    await ended(store, row, RoundState.PROMOTED)
    assert await store.read(samples.count_free, once.takes.train) == 0


async def test_tasks_of_promoted_rounds_are_replayed(store: Store, make: Make) -> None:
    config = small(make, replay={"ratio": 0.3}, max_uses=1)
    rubric = rubric_of(config)

    async def tell_more(first: int, count: int) -> None:
        more = replies_on(Split.TRAIN, first + count)[first:]
        await store.write(put_replies, *more, *replies_on(Split.HELD_OUT, 2))
        await store.write(judge_by, rubric)

    await tell_more(0, 10)
    row, first, selection = await planned(store, config)
    assert (len(first), selection.replayed) == (10, 0), "nothing to replay yet"
    keys = await store.read(lambda conn: dict(conn.execute(select(tasks.c.id, tasks.c.key)).all()))
    await ended(store, row, RoundState.PROMOTED, [keys[task] for task in first[:2]], max_uses=1)
    # Two gave no gradient, and were used as often as they may be; one is rejected by people.
    await store.write(labels.add, keys[first[2]], Label.REJECT, "ann")
    await tell_more(10, 10)
    row, second, selection = await planned(store, config)
    replayed = set(first) & set(second)
    assert (len(second), len(replayed), selection.replayed, selection.replayable) == (13, 3, 3, 7)
    assert not replayed & set(first[:3])
    assert "3 of 7 tasks of earlier promoted rounds, drawn at random" in selection.sentences
    story = await store.read(lineage.why, row.name)
    assert story is not None
    assert {each["task_id"] for each in story["samples"] if each["replayed"]} == {keys[task] for task in replayed}
    task = await store.read(lineage.why, keys[min(replayed)])
    assert task is not None
    assert [each["replayed"] for each in task["replies"][0]["task"]["rounds"]] == [False, True]
    await ended(store, row, RoundState.REJECTED)
    found = dict(zip(await store.read(task_ids), await states(store), strict=True))
    assert {found[task] for task in first} == {"consumed"}, "a rejected round leaves what it replayed as it was"
    # Under another rubric, none of them was judged.
    other = rubric.model_copy(update={"threshold": 0.9})
    assert other.hash != rubric.hash
    chosen, _ = await store.read(choose, config, other)
    assert chosen.replayed == []


async def test_a_large_backlog_of_one_user_leaves_room_for_others(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates are limited, so that planning needs bounded memory."""
    monkeypatch.setattr(samples, "MOST_CANDIDATES", 8)
    config = by_chain(make, "default")
    await tell(store, *one_kind(40, users=1), *replies_on(Split.HELD_OUT, 2))
    last = replies_on(Split.TRAIN, 41)[40]
    await tell(store, replace(last, user="another"))
    await run(store, config)
    rows = await store.read(samples.candidates)
    assert len(rows) == 8
    assert [row.user for row in rows] == ["user 0"] * 7 + ["another"]


def task_ids(conn: Connection) -> list[int]:
    return list(conn.execute(select(tasks.c.id).order_by(tasks.c.id)).scalars())


@pytest.mark.parametrize("strategy", ["random", "diversity"])
async def test_a_coreset_of_the_free_samples_is_planned(store: Store, make: Make, strategy: str) -> None:
    """It may be smaller than what a round waits for."""
    config = small(make, coreset={"size": 6, "strategy": strategy}, replay={"ratio": 0.5})
    plain = replies_on(Split.TRAIN, 60)
    repeated = [replace(each, query="Where is my order?") for each in plain[:50]]
    await store.write(put_judged, *repeated, *plain[50:], *replies_on(Split.HELD_OUT, 2))
    own = (await store.read(snapshot, config))["targets"][""]
    assert (own["free_samples"], own["waiting_samples"]) == (6, {"more than a round takes": 54})
    assert (await store.read(planner.due, config)).start
    row, train, selection = await planned(store, config)
    lines = await store.read(rounds.payloads, train)
    assert len({line["main_query"] for line in lines}) == len(lines) == selection.chosen == 6
    assert selection.left_out == {"more than a round takes": 54}
    assert selection.order == ORDERS["random" if strategy == "random" else "diversity"]
    await ended(store, row, RoundState.FAILED)
    again, same, _ = await planned(store, config)
    assert (again.seed - row.seed, same == train) == (1, strategy == "diversity"), "chance follows the round's seed"


@pytest.mark.parametrize(
    ("stages", "most"),
    [
        pytest.param(["grpo"], 8, id="those of its steps"),
        pytest.param([{"grpo": {"steps": 3, "prompts_per_step": 3}}, "grpo"], 17, id="those of both stages"),
        pytest.param([{"grpo": {"samples": 5}}], 5, id="no more than the stage takes"),
        pytest.param([{"sft": {"samples": 5}}, {"grpo": {"samples": 6}}], 11, id="nor than both take"),
        pytest.param([{"sft": {"samples": 5}}, "sft", "grpo"], 2048, id="as many as there are"),
    ],
)
def test_a_round_takes_what_its_stages_use(make: Make, stages: list[Any], most: int) -> None:
    assert most_samples(small(make, stages=stages, steps=2, prompts_per_step=4)) == most


async def test_a_debug_round_is_one_of_the_first_stage_of_grpo(store: Store, make: Make) -> None:
    first = {"prompts_per_step": 3, "group_size": 5, "steps": 7, "warmup_steps": 4}
    config = small(make, stages=["sft", {"grpo": first}, {"grpo": {"steps": 3}}])
    await store.write(put_judged, *replies_on(Split.TRAIN, 20))
    spec = await debug_round(store, config)
    training = Config.model_validate(spec.settings).training
    assert (len(spec.train), training.prompts_per_step, training.group_size, training.steps) == (3, 3, 5, 7)


async def test_the_worker_of_a_choice_by_loss_gets_a_pool_and_releases_the_rest(store: Store, make: Make) -> None:
    config = small(make, stages=["sft"], coreset={"size": 3, "strategy": "loss_topk"}, max_uses=1)
    await store.write(put_judged, *replies_on(Split.TRAIN, 20), *replies_on(Split.HELD_OUT, 2))
    rubric = rubric_of(config)
    assert (await store.read(snapshot, config))["targets"][""]["free_samples"] == 12
    row = await store.write(planner.plan, config, rubric, config.state_dir / "rounds", "test")
    spec = RoundSpec.model_validate_json((await store.read(planner.spec_of, row, config, rubric)).model_dump_json())
    assert spec.pool is not None
    assert (spec.pool.size, spec.pool.strategy, len(spec.train)) == (3, "loss_topk", 12)
    assert spec.pool.candidates.keys() == {task.task_id for task in spec.train}
    assert spec.selection is not None
    assert spec.selection.order.startswith("a pool, of which the worker takes 3 by loss_topk; at random")
    names = [task.task_id for task in spec.train]
    await ended(store, row, RoundState.PROMOTED, [names[3]], max_uses=1, released=names[4:])
    found = await store.read(lambda conn: dict(conn.execute(select(tasks.c.key, tasks.c.state)).all()))
    assert [found[name] for name in names] == ["consumed"] * 4 + ["accepted"] * 8
    story = await store.read(lineage.why, row.name)
    assert story is not None
    assert ([each["task_id"] for each in story["samples"]], story["released"]) == (names[:4], 8)
    assert await store.read(samples.count_new) == 16, "they count as never used"
    assert (await store.read(balance.balance)).balanced
