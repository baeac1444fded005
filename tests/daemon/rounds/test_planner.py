"""What the worker of a planned round is told: which samples, by which judge, and what it starts from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, select, update

from flywheel.config.file import Config
from flywheel.config.training import RolloutSettings
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds import planner
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.status import snapshot
from flywheel.errors import ConfigError, TrainError
from flywheel.records import exclusion
from flywheel.records.exclusion import Exclusion, TrainedModels
from flywheel.records.states import RoundState, Split, TaskState
from flywheel.records.verdict import Outcome, Verdict
from flywheel.store import claims, rounds, samples, verdicts
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move_all
from flywheel.store.views import balance, lineage
from tests.cases import for_each
from tests.factories.config import BOXED_RUBRIC, base_model, round_config, with_chain
from tests.factories.round import debug_round, planned_round, put_deployed, put_round
from tests.factories.task import task_keys
from tests.factories.trace import on_both_sides, put_replies, replies_on
from tests.factories.verdict import accepted, only_training_accepted, put_judged, rejected
from tests.training.recorded.recordings import ADD, call, steps


def judged(conn: Connection, train: int, held_out: int) -> None:
    put_judged(conn, *on_both_sides(train, held_out))


@pytest.mark.parametrize("right", [True, False])
async def test_an_accepted_answer_is_the_reference_of_a_held_out_task_and_a_rejected_one_is_not(
    tmp_path: Path, store: Store, right: bool
) -> None:
    """The judge is told that a reference was accepted, and `math-equal` takes it for the right result."""
    judge = (lambda _: accepted()) if right else only_training_accepted
    await store.write(put_judged, *on_both_sides(2, 3), judge=judge)
    spec = await planned_round(store, round_config(tmp_path))
    assert len(spec.held_out) == 3
    train, held_out = ([task.exchange.reference for task in tasks] for tasks in (spec.train, spec.held_out))
    assert all(answer.startswith("\\boxed{") if right else answer == "" for answer in held_out)
    assert all(answer.startswith("\\boxed{") for answer in train)


async def test_a_round_is_told_how_many_tokens_the_traced_replies_took(tmp_path: Path, store: Store) -> None:
    train = [replace(one, output_tokens=700 + n) for n, one in enumerate(replies_on(Split.TRAIN, 3))]
    await store.write(put_judged, *train, *replies_on(Split.HELD_OUT, 2))
    config = round_config(tmp_path)
    for spec in (await debug_round(store, config), await planned_round(store, config)):
        assert [task.output_tokens for task in spec.train] == [700, 701, 702]


async def test_rollouts_are_judged_as_the_chain_says_tasks_are(tmp_path: Path, store: Store) -> None:
    params = {"temperature": 0.3, "max_tokens": 77, "max_thread": 3}
    await store.write(judged, 2, 1)
    config = round_config(tmp_path, **with_chain(tmp_path, {"type": "llm_evaluate", "params": params}))
    for spec in (await debug_round(store, config), await planned_round(store, config)):
        judge = Config.model_validate(spec.settings).judge
        assert (judge.temperature, judge.max_tokens, judge.max_thread) == (0.3, 77, 3)


async def test_a_round_reports_to_a_directory_of_its_own(tmp_path: Path, store: Store) -> None:
    await store.write(judged, 2, 1)
    config = round_config(tmp_path, tracking={"report_to": ["tensorboard"]})
    specs = [await debug_round(store, config), await planned_round(store, config)]
    tracking = [Config.model_validate(spec.settings).tracking for spec in specs]
    assert [each.dir for each in tracking] == [config.state_dir / "tracking" / name for name in ("debug", "r0001")]


async def test_a_round_takes_no_more_samples_than_its_steps_look_at(tmp_path: Path, store: Store) -> None:
    """What is consumed without a rollout is lost, and `why` would name it as what made the adapter."""
    await store.write(judged, 9, 1)
    config = round_config(tmp_path, training={"steps": 3, "prompts_per_step": 2, "group_size": 4})
    spec = await planned_round(store, config)
    assert len(spec.train) == 6
    books = await store.read(balance.balance)
    assert (books.task_states["reserved"], books.task_states["accepted"]) == (6, 3 + 1)


async def test_a_round_whose_steps_ask_more_prompts_takes_more_samples(tmp_path: Path, store: Store) -> None:
    await store.write(judged, 9, 1)
    training = {"steps": 2, "prompts_per_step": 2, "group_size": 4}
    config = round_config(tmp_path, training=training, rollout={"oversample": 1.5})
    assert len((await planned_round(store, config)).train) == 2 * 3
    assert len((await debug_round(store, config)).train) == 3


async def test_a_debug_round_has_the_number_of_prompts_of_its_own(tmp_path: Path, store: Store) -> None:
    await store.write(judged, 9, 1)
    training = {"prompts_per_step": 4, "debug_prompts": 3, "group_size": 4}
    config = round_config(tmp_path, training=training, rollout={"oversample": 2})
    spec = await debug_round(store, config)
    settings = Config.model_validate(spec.settings)
    assert len(spec.train) == settings.rollout.prompts_asked(settings.training.prompts_per_step) == 3
    spec = await planned_round(store, config)
    assert Config.model_validate(spec.settings).training.prompts_per_step == 4


async def test_a_step_has_at_most_the_tasks_that_there_are(tmp_path: Path, store: Store) -> None:
    """Also one of a stage with settings of its own."""
    await store.write(judged, 9, 1)
    config = round_config(tmp_path, training={"prompts_per_step": 240, "group_size": 4})
    spec = await debug_round(store, config)
    assert len(spec.train) == Config.model_validate(spec.settings).training.prompts_per_step == 9
    stages = [{"grpo": {"prompts_per_step": 240}}, {"grpo": {"prompts_per_step": 3}}, "grpo"]
    config = round_config(tmp_path, training={"stages": stages, "prompts_per_step": 8, "group_size": 4})
    spec = await planned_round(store, config)
    settings = Config.model_validate(spec.settings)
    assert [len(spec.train), *(each.prompts_per_step for each in settings.training.of_grpo)] == [9, 9, 3, 8]
    assert settings.training.stages[1:] == config.training.stages[1:]


@for_each(
    ("oversample", "prompts", "expected"),
    [(1.0, 8, 8), (1.1, 10, 11), (1.1, 8, 9), (1.5, 3, 5), (8.0, 2, 16)],
)
def test_a_step_asks_its_prompts_times_oversample_rounded_up(oversample: float, prompts: int, expected: int) -> None:
    assert RolloutSettings(oversample=oversample).prompts_asked(prompts) == expected


async def test_a_round_goes_on_from_what_serves_when_it_starts(tmp_path: Path, store: Store) -> None:
    await store.write(judged, 2, 1)
    config = round_config(tmp_path)
    rubric = rubric_of(config)
    row = await store.write(planner.plan, config, rubric, config.state_dir / "rounds", "test")
    assert row.parent is None
    await store.write(put_deployed, base_model(tmp_path), 7)
    row = await store.write(planner.begin, row, config, rubric)
    spec = await store.read(planner.spec_of, row, config, rubric)
    assert spec.parent is not None
    live = await store.read(rounds.live)
    assert (spec.parent.name, live.parent) == ("r0007", "r0007")


async def test_an_adapter_of_another_base_model_is_not_gone_on_from(tmp_path: Path, store: Store) -> None:
    """Of the same shape it would load, and mean nothing."""
    await store.write(judged, 2, 8)
    await store.write(put_deployed, "/models/b")
    config = round_config(tmp_path, trigger={"min_samples": 2})
    wanted = await store.read(planner.due, config)
    assert not wanted.start
    assert f"r0001, which serves, was trained on /models/b, and model.base is {base_model(tmp_path)}" in wanted.reason
    with pytest.raises(TrainError, match=r"/models/b.*rollback --to base"):
        await planned_round(store, config)
    assert await store.read(rounds.live) is None


@pytest.mark.parametrize(
    ("base", "is_offline", "why"),
    [
        ("{tmp}/nowhere", False, "there is no directory {tmp}/nowhere"),
        ("{tmp}", False, "{tmp} has no config.json"),
        ("models/of/mine", False, "there is no directory models/of/mine, and it is not a name on the hub"),
        ("some/model", True, "some/model is not on this machine, and HF_HUB_OFFLINE forbids the download"),
        ("some/model", False, ""),
        ("kept/model", True, ""),
    ],
)
async def test_a_base_model_that_cannot_be_found_starts_no_worker(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, base: str, is_offline: bool, why: str
) -> None:
    base, why = base.format(tmp=tmp_path), why.format(tmp=tmp_path)
    kept = tmp_path / "hub" / "models--kept--model"
    for file, text in (("refs/main", "abc\n"), ("snapshots/abc/config.json", "{}")):
        (kept / file).parent.mkdir(parents=True)
        (kept / file).write_text(text)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if is_offline else "0")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    await store.write(judged, 4, 2)
    here, there = round_config(tmp_path), round_config(tmp_path, model={"base": base}, trigger={"min_samples": 2})
    rubric = rubric_of(there)
    if not why:
        assert (await store.read(planner.due, there)).start
        assert (await store.read(planner.debug_spec, there, rubric)).base_model == base
        return
    assert (await store.read(planner.due, there)).reason == why
    with pytest.raises(TrainError, match=re.escape(why)):
        await store.read(planner.debug_spec, there, rubric)
    with pytest.raises(TrainError, match=re.escape(why)):
        await planned_round(store, there)
    assert await store.read(rounds.live) is None
    row = await store.write(planner.plan, here, rubric, here.state_dir / "rounds", "test")
    with pytest.raises(TrainError, match=f"start r0001: {re.escape(why)}"):
        await store.write(planner.begin, row, there, rubric)


async def test_a_round_that_the_gate_could_only_reject_is_not_planned_by_hand_either(
    tmp_path: Path, store: Store
) -> None:
    """It would train for hours and consume its samples, for "not enough evidence"."""
    await store.write(judged, 4, 3)
    config = round_config(tmp_path, trigger={"min_samples": 2}, gate={"min_tasks": 4, "min_power": 0})
    assert (await store.read(planner.due, config)).reason == "3 of 4 held-out tasks are judged"
    with pytest.raises(TrainError, match=r"3 held-out tasks are judged, and gate\.min_tasks is 4"):
        await planned_round(store, config)
    assert await store.read(rounds.live) is None
    books = await store.read(balance.balance)
    assert "reserved" not in books.task_states


LEFT_OUT: dict[Exclusion, dict[str, Any]] = {
    Exclusion.IMAGE: {"images": ("https://example.org/cat.png",)},
    Exclusion.HIDDEN: {"prompt_reason": exclusion.HIDDEN_MESSAGE},
    Exclusion.INEXACT: {"prompt_reason": exclusion.NOT_RECORDED},
    Exclusion.UNRECORDED: {"tools": (ADD,), "trajectory": steps((call(), None))},
    Exclusion.UNDEFINED: {"trajectory": steps((call(), "3"))},
    Exclusion.MODEL: {"model": "helper-model"},
}
WITH_TOOLS: dict[Exclusion, dict[str, Any]] = {
    Exclusion.TOOLS: {"tools": (ADD,), "trajectory": steps((call(arguments={"a": 1, "b": 2}), "3"))},
    Exclusion.UNCALLED: {"tools": (ADD,)},
    Exclusion.UNRECORDED: LEFT_OUT[Exclusion.UNRECORDED],
    Exclusion.UNDEFINED: LEFT_OUT[Exclusion.UNDEFINED],
}
INFLUENCE = {"type": "influence", "params": {"conversation": 1, "user": 1, "template": 1}}
COMMAND = {"agent": {"command": ["agent"]}}
ALIAS = TrainedModels("agent", "/models/a")


def judged_with_some_left_out(
    conn: Connection, train: int, held_out: int, values: dict[str, Any], *, right: bool = True
) -> None:
    """Tasks of which two on each side have `values`: the first ones of all. Only these may be not `right`."""
    plain = replies_on(Split.TRAIN, train + 2)[2:] + replies_on(Split.HELD_OUT, held_out + 2)[2:]
    special = on_both_sides(2, 2, **values)
    spans = {each.span_id for each in special}
    put_judged(
        conn,
        *special,
        *plain,
        models=ALIAS,
        judge=lambda line: accepted() if right or line["metadata"]["span_id"] not in spans else rejected(),
    )


@pytest.mark.parametrize("reason", LEFT_OUT)
async def test_what_is_excluded_is_left_out_of_training_and_gate(
    tmp_path: Path, store: Store, reason: Exclusion
) -> None:
    await store.write(judged_with_some_left_out, 3, 2, LEFT_OUT[reason])
    config = round_config(tmp_path, trigger={"min_samples": 4}, gate={"min_tasks": 2, "min_power": 0})
    assert (await store.read(planner.due, config)).reason == "3 of 4 samples are free"
    status = await store.read(snapshot, config)
    assert (status["targets"][""]["free_samples"], status["targets"][""]["held_out"]) == (3, 2)
    (left_out,) = status["left_out"]
    assert (left_out["reason"], left_out["tasks"]) == (reason, 4)
    assert left_out["why"] and left_out["do"]
    debug = await debug_round(store, config)
    assert len(debug.train) == 3
    spec = await planned_round(store, config)
    assert (len(spec.train), len(spec.held_out)) == (3, 2)
    excluded = schema.tasks.c.excluded
    of_these = select(schema.tasks.c.key).where(excluded == reason.value)
    keys = await store.read(lambda conn: conn.execute(of_these).scalars().all())
    assert len(keys) == 4
    for key in keys:
        story = await store.read(lineage.why, key)
        (told,) = story["replies"][0]["task"]["left_out"]
        assert told["reason"] == reason
        assert told["why"]


async def test_the_choice_by_influence_leaves_excluded_tasks_out_too(tmp_path: Path, store: Store) -> None:
    await store.write(judged_with_some_left_out, 3, 2, LEFT_OUT[Exclusion.IMAGE])
    spec = await planned_round(store, round_config(tmp_path, **with_chain(tmp_path, INFLUENCE)))
    assert (len(spec.train), len(spec.held_out)) == (3, 2)


@pytest.mark.parametrize(
    ("setting", "taken"),
    [
        ({"images": "text-only"}, {Exclusion.IMAGE}),
        ({"inexact_prompts": "use"}, {Exclusion.HIDDEN, Exclusion.INEXACT}),
    ],
)
async def test_settings_take_what_is_left_out_otherwise(
    tmp_path: Path, setting: dict[str, str], taken: set[Exclusion]
) -> None:
    config = round_config(tmp_path, training=setting)
    for reason, values in LEFT_OUT.items():
        store = await Store.open(tmp_path / reason.value)
        await store.write(judged_with_some_left_out, 3, 2, values)
        status = await store.read(snapshot, config)
        own = status["targets"][""]
        spec = await planned_round(store, config)
        await store.close()
        wanted = (5, 4) if reason in taken else (3, 2)
        assert (own["free_samples"], own["held_out"]) == wanted == (len(spec.train), len(spec.held_out))
        assert bool(status["left_out"]) == (reason not in taken)


@pytest.mark.parametrize(
    ("reason", "rollout", "train", "gate"),
    [
        (Exclusion.TOOLS, {}, True, True),
        (Exclusion.TOOLS, {"agent": "recorded"}, True, True),
        (Exclusion.TOOLS, {"agent": "reply"}, False, False),
        (Exclusion.UNCALLED, {}, False, True),
        (Exclusion.UNCALLED, {"tools": {"uncalled": "use"}}, True, True),
        (Exclusion.UNCALLED, {"agent": "reply", "tools": {"uncalled": "use"}}, False, False),
        (Exclusion.UNRECORDED, {}, False, False),
        (Exclusion.UNRECORDED, {"tools": {"uncalled": "use"}}, False, False),
        (Exclusion.UNRECORDED, {"agent": "reply"}, False, False),
        (Exclusion.UNCALLED, COMMAND, True, True),
        (Exclusion.UNRECORDED, COMMAND, True, True),
        (Exclusion.UNDEFINED, {}, False, False),
        (Exclusion.UNDEFINED, {"tools": {"uncalled": "use"}}, False, False),
        (Exclusion.UNDEFINED, COMMAND, True, True),
    ],
)
@pytest.mark.parametrize("right", [True, False])
async def test_tasks_with_tools_are_taken_where_recordings_can_answer(
    tmp_path: Path, store: Store, reason: Exclusion, rollout: dict[str, Any], *, train: bool, gate: bool, right: bool
) -> None:
    """What was rejected is not trained on. The gate asks it, unless no tool was called: then recordings could not
    show whether calling one would have been better. The user's own agent can call its tools."""
    await store.write(judged_with_some_left_out, 3, 2, WITH_TOOLS[reason], right=right)
    config = round_config(tmp_path, rollout=rollout)
    gate = gate and (right or reason is not Exclusion.UNCALLED or rollout == COMMAND)
    status = await store.read(snapshot, config)
    expected = (5 if train and right else 3, 4 if gate else 2)
    assert (status["targets"][""]["free_samples"], status["targets"][""]["held_out"]) == expected
    spec = await planned_round(store, config)
    assert (len(spec.train), len(spec.held_out)) == expected
    left_out = {each["reason"]: each["tasks"] for each in status["left_out"]}
    # A rejected task of the training split is no sample that an exclusion could keep from rounds.
    missing = 2 * (right and not train) + 2 * (not gate)
    assert left_out == ({reason: missing} if missing else {})
    for task in (*spec.train, *spec.held_out):
        story = await store.read(lineage.why, task.task_id, config.takes)
        assert story is not None and story["replies"][0]["task"]["left_out"] == []


async def test_a_task_with_two_reasons_is_taken_when_both_are(tmp_path: Path, store: Store) -> None:
    both = LEFT_OUT[Exclusion.IMAGE] | LEFT_OUT[Exclusion.INEXACT]
    await store.write(judged_with_some_left_out, 3, 2, both)
    for training, free in (
        ({}, 3),
        ({"images": "text-only"}, 3),
        ({"inexact_prompts": "use"}, 3),
        ({"images": "text-only", "inexact_prompts": "use"}, 5),
    ):
        status = await store.read(snapshot, round_config(tmp_path, training=training))
        assert status["targets"][""]["free_samples"] == free
        assert len(status["left_out"]) == 2 - len(training)


async def test_a_margin_for_a_criterion_that_the_rubric_does_not_have_is_refused(tmp_path: Path) -> None:
    """A guard by a misspelled name would guard nothing, or stop every promotion hours later."""
    assert rubric_of(round_config(tmp_path, gate={"non_inferiority_margins": {"correct": 0.1}})).id == "math-boxed"
    with pytest.raises(ConfigError, match=r"math-boxed has no criterion corect\. Its criteria are boxed, correct"):
        rubric_of(round_config(tmp_path, gate={"non_inferiority_margins": {"corect": 0.1}}))


async def test_what_a_filter_or_a_person_put_aside_is_not_asked_by_the_gate(tmp_path: Path, store: Store) -> None:
    """A repeated question is no evidence of its own, and what a filter keeps from the judge is kept from it here."""

    def put_aside(conn: Connection) -> None:
        put_replies(conn, *on_both_sides(2, 5))
        stopped = Verdict(Outcome.REJECTED, 0.0, reason="pii: an email address")
        for number, task in enumerate(claims.claim(conn, 1000, "r", "j")):
            # Two are stopped before the judge; one of them is judged after all, as what repeats a rejected one is.
            hashes = ["r"] if number < 5 else ["chain:c"] if number == 5 else ["chain:c", "r"]
            for place, rubric_hash in enumerate(hashes):
                verdict = stopped if rubric_hash == "chain:c" else rejected() if number > 2 else accepted()
                verdicts.store(conn, task.id, verdict, rubric_hash, "j")
                where = (schema.verdicts.c.task_id == task.id, schema.verdicts.c.rubric_hash == rubric_hash)
                conn.execute(update(schema.verdicts).where(*where).values(created_at=f"2026-01-01T00:00:0{place}"))
            claims.apply(conn, task.id, verdict, 0.0)

    await store.write(put_aside)
    spec = await planned_round(store, round_config(tmp_path, gate={"min_tasks": 4, "min_power": 0}))
    keys = {task.task_id for task in spec.held_out}
    every = await store.read(task_keys)
    assert keys == {every[place] for place in (2, 3, 4, 6)}
    assert await store.read(samples.count_held_out) == 4


async def test_samples_of_before_the_chain_had_pii_lose_their_personal_data(tmp_path: Path, store: Store) -> None:
    """They would be learned by the policy, and shown to the judge with every rollout."""

    train = replies_on(Split.TRAIN, 1, query="Write to jo@example.com.", answer="jo@example.com it is")
    held_out = replies_on(Split.HELD_OUT, 1, query="Who reads the letters that jo@example.com is sent?")
    await store.write(put_judged, *train, *held_out)
    config = round_config(tmp_path, **with_chain(tmp_path, {"type": "pii"}))
    for spec in (await debug_round(store, config), await planned_round(store, config)):
        assert "[EMAIL_1]" in spec.train[0].exchange.query
        assert "jo@example.com" not in spec.model_dump_json()


async def test_a_round_is_recorded_with_the_rubric_that_it_is_graded_by(tmp_path: Path, store: Store) -> None:
    """The daemon can be started again with another one while a round is planned."""
    await store.write(judged, 2, 1)
    config = round_config(tmp_path)
    earlier = rubric_of(config)
    row = await store.write(planner.plan, config, earlier, config.state_dir / "rounds", "test")
    other = round_config(tmp_path, filter={"rubric": str(BOXED_RUBRIC.with_name("qa-quality.yaml"))})
    rubric = rubric_of(other)
    assert rubric.hash != earlier.hash
    row = await store.write(planner.begin, row, other, rubric)
    assert (await store.read(planner.spec_of, row, other, rubric)).rubric["id"] == "qa-quality"
    assert (row.rubric_hash, row.config_hash) == (rubric.hash, planner.config_hash(other))


async def test_rounds_that_fail_again_and_again_wait_longer_each_time(tmp_path: Path, store: Store) -> None:
    """What makes each of them fail after an hour of training would have the GPU for itself."""

    def ended(conn: Connection, number: int, state: RoundState, ago: timedelta) -> None:
        put_round(conn, number, state, finished_at=(datetime.now(UTC) - ago).isoformat())

    await store.write(judged, 2, 1)
    config = round_config(tmp_path, trigger={"min_samples": 2}, daemon={"failed_round_wait_seconds": 600})
    times = timedelta(seconds=600)
    await store.write(ended, 1, RoundState.FAILED, 1.5 * times)
    assert (await store.read(planner.due, config)).start
    await store.write(ended, 2, RoundState.FAILED, 1.5 * times)
    assert "r0002 failed; the next attempt is at" in (await store.read(planner.due, config)).reason
    await store.write(ended, 3, RoundState.REJECTED, 1.5 * times)
    assert (await store.read(planner.due, config)).start, "one that did not fail begins the count anew"
    for number in range(4, 12):
        await store.write(ended, number, RoundState.FAILED, 17 * times)
    assert (await store.read(planner.due, config)).start, "it is doubled four times at most"
    await store.write(ended, 12, RoundState.FAILED, timedelta(days=-3650))
    assert (await store.read(planner.due, config)).start, "the clock was wrong when it ended"


async def test_samples_that_influence_allows_are_looked_up_once_while_the_same_are_free(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trigger looks every few seconds; a large backlog must not be loaded, nor the chain read, each time."""
    training = {"steps": 5, "prompts_per_step": 2}
    config = round_config(tmp_path, **with_chain(tmp_path, INFLUENCE), trigger={"min_samples": 2}, training=training)
    await store.write(judged, 3, 1)
    rounds_ = Rounds(store, config, rubric_of(config), Deployer(store, config))
    loaded: list[int] = []
    candidates = samples.candidates

    def counted(conn: Connection, *how: Any) -> Sequence[Any]:
        loaded.append(1)
        return candidates(conn, *how)

    monkeypatch.setattr(samples, "candidates", counted)
    (tmp_path / "chain.yaml").unlink()
    due = [await store.read(planner.due, config, rounds_._targets[""].available_samples) for _ in range(3)]
    assert [each.start for each in due] == [True] * 3
    assert len(loaded) == 1
    await store.write(lambda conn: move_all(conn, [1], TaskState.ACCEPTED, TaskState.RESERVED))
    assert not (
        await store.read(
            planner.due, round_config(tmp_path, trigger={"min_samples": 3}), rounds_._targets[""].available_samples
        )
    ).start
    await store.read(planner.due, config, rounds_._targets[""].available_samples)
    assert len(loaded) == 2
