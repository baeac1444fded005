"""Several targets: each has its samples, its rubric, its gate tests and its rounds, which alternate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import Connection, select, update

from flywheel.config.file import Config
from flywheel.daemon.configured_source import apply_model_rules
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.judging.judge_setup import rubric_of, rubric_of_target
from flywheel.daemon.judging.judging import TaskJudging
from flywheel.daemon.rounds import planner
from flywheel.daemon.rounds.gate_planning import next_test
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.errors import ConfigError, TrainError
from flywheel.judge.filters.deduplication import fingerprint
from flywheel.records.exclusion import Exclusion, Scope
from flywheel.records.round import Comparison, Score
from flywheel.records.states import RoundState, Split
from flywheel.records.task import task_line
from flywheel.store import deduplication, gate_tests, ledger, rounds, samples
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.store.views.left_out import count_left_out
from tests.factories.config import BOXED_RUBRIC, base_model, make_config, write_rubric
from tests.factories.judge_server import JudgeServer
from tests.factories.round import put_deployed
from tests.factories.targets import TARGETS, both, put_of
from tests.factories.trace import batch, put_replies, record, reply


def made(tmp_path: Path, **sections: Any) -> Config:
    defaults = {
        "model": {"base": base_model(tmp_path)},
        "filter": {"rubric": str(BOXED_RUBRIC)},
        "trigger": {"min_samples": 4},
        "gate": {"min_tasks": 2, "min_power": 0},
        "targets": TARGETS,
    }
    return make_config(tmp_path, **{**defaults, **sections})


def rounds_of(store: Store, config: Config) -> Rounds:
    return Rounds(store, config, rubric_of(config), Deployer(store, config))


async def live(store: Store) -> Any:
    row = await store.read(rounds.live)
    assert row is not None
    return row


async def end(store: Store, state: RoundState = RoundState.REJECTED) -> None:
    row = await live(store)
    await store.write(move, row.id, RoundState.PLANNED, RoundState.TRAINING)
    await store.write(move, row.id, RoundState.TRAINING, RoundState.EVALUATING)
    await store.write(rounds.finish, row.id, RoundState.EVALUATING, state, "it ended", max_uses=9)


def test_each_target_has_settings_of_its_own(tmp_path: Path) -> None:
    config = made(tmp_path, targets={"planner": {"rubric": "p.yaml"}, "worker": TARGETS["worker"]})
    own = config.by_target()
    assert [(each.target, each.model.alias, each.trigger.min_samples) for each in own.values()] == [
        ("planner", "planner", 4), ("worker", "work", 2),
    ]  # fmt: skip
    assert (own["planner"].filter.rubric, own["worker"].filter.rubric) == (tmp_path / "p.yaml", BOXED_RUBRIC)
    assert own["planner"].by_target() == own
    assert own["worker"].takes.gate.target == "worker" and config.takes.gate.target is None
    assert config.aliases == own["worker"].aliases == ("planner", "work")
    # What a worker reads in its specification.
    again = Config.model_validate(own["worker"].model_dump(mode="json"))
    assert (again.model.alias, again.aliases) == ("work", ("planner", "work"))
    one = made(tmp_path, targets={}, model={"alias": "agent"})
    assert one.by_target() == {"": one} and one.aliases == ("agent",) and one.target == ""


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        ({"a": {"alias": "x"}, "b": {"alias": "x"}}, "a and b have the same alias, x"),
        ({"a": {}, "b": {"agents": ["a", "b"]}}, "a and b both have the agent a; a reply is a task of one target"),
        ({"a b": {}}, "`targets.a b`: a target's name has only letters, digits and `_.-`"),
        ({"ref": {}}, "`targets.ref`: rollout.auxiliary_models has a model of that name as well"),
    ],
)
def test_targets_that_cannot_be_told_apart_are_refused(tmp_path: Path, targets: dict[str, Any], why: str) -> None:
    other = {"ref": {"base_url": "http://localhost:1/v1", "model": "m"}}
    program = {"workflow": "agent.py:run"}
    with pytest.raises(ConfigError, match=why.replace("(", r"\(")):
        made(tmp_path, targets=targets, rollout={"agent": program, "auxiliary_models": other})


@pytest.mark.parametrize(
    ("agent", "model", "adapter", "target"),
    [
        ("planner", "", "", "planner"),
        ("Doer", "gpt-4o", "", "worker"),
        ("Doer", "planner", "", "planner"),
        ("Doer", "planner@r0001", "", "planner"),
        ("other", "gateway", "work@r0001", "worker"),
        ("worker", "", "", ""),
        ("other", "my-agent", "", ""),
    ],
)
def test_the_alias_that_was_called_says_the_target_else_the_agent_s_name(
    tmp_path: Path, agent: str, model: str, adapter: str, target: str
) -> None:
    assert made(tmp_path).models_of(None).target_of(agent, model, adapter) == target


def test_criteria_with_a_margin_are_those_of_the_rubrics_that_are_used(tmp_path: Path) -> None:
    write_rubric(tmp_path, name="one.yaml", criteria=[{"id": "short", "value": "It is short."}])
    gate = {"non_inferiority_margins": {"short": 0.1}}
    own = {"rubric": "one.yaml"}
    config = made(tmp_path, targets={"a": own, "b": own}, gate=gate)
    assert rubric_of_target(config.by_target()["b"], rubric_of(config)).id == "r"
    with pytest.raises(ConfigError, match="has no criterion short"):
        rubric_of(made(tmp_path, targets={"a": own, "b": {}}, gate=gate))


async def test_targets_are_found_when_replies_are_read_and_again_when_settings_change(
    store: Store, tmp_path: Path
) -> None:
    def targets(conn: Connection) -> list[tuple[str, str]]:
        of = schema.tasks.c
        return [tuple(row) for row in conn.execute(select(of.target, of.excluded).order_by(of.id))]

    config = made(tmp_path)
    told = [
        reply(1, agent="planner"),
        reply(2, agent="Doer"),
        reply(3, agent="other"),
        reply(4, agent="x", model="work"),
    ]
    await store.write(put_replies, *told, models=config.models_of(None))
    found = [("planner", ""), ("worker", ""), ("", "target"), ("worker", "")]
    assert await store.read(targets) == found
    await apply_model_rules(store, made(tmp_path, targets={}, model={"alias": "work"}))
    assert await store.read(targets) == [("", "")] * 4
    await apply_model_rules(store, config)
    assert await store.read(targets) == found
    assert await store.read(count_left_out) == {Exclusion.TARGET: 1}


async def test_rounds_alternate_and_each_takes_only_samples_of_its_target(store: Store, tmp_path: Path) -> None:
    config = made(tmp_path)
    await store.write(both, config)
    wheel = rounds_of(store, config)
    used: list[tuple[str, set[str]]] = []

    def agents(conn: Connection, number: int) -> set[str]:
        query = (
            select(schema.tasks.c.agent).join(schema.round_samples).where(schema.round_samples.c.round_id == number)
        )
        return set(conn.execute(query).scalars())

    for _ in range(2):
        assert await wheel.start_due()
        row = await live(store)
        used.append((row.target, await store.read(agents, row.id)))
        await end(store)
    assert used == [("planner", {"planner"}), ("worker", {"Doer"})]
    # Each waits for new samples of its own now.
    assert not await wheel.start_due()
    due = await wheel.due()
    assert due.reason == (
        "planner: 0 of 4 new samples are free, after 1 round without promotion; "
        "worker: 0 of 2 new samples are free, after 1 round without promotion"
    )
    assert (await store.read(samples.newest_available, 10, "worker"))[0].waits_for.startswith("0 of 2 new")
    await store.write(put_of, config, Split.TRAIN, 4, "Doer", "again", query="Another one?")
    assert (await wheel.due()).target == "worker"
    with pytest.raises(TrainError, match=r"there is no target cook.*The targets are planner, worker"):
        await wheel.plan("by hand", "cook")
    # By hand, the one whose round is the longest ago, or the one that is named.
    assert await wheel.plan("by hand", "worker") == "r0003"
    assert (await live(store)).target == "worker"


async def test_a_target_without_samples_keeps_no_other_one_waiting(store: Store, tmp_path: Path) -> None:
    config = made(tmp_path)
    await store.write(both, config, 0, 2)
    wheel = rounds_of(store, config)
    assert await wheel.start_due()
    assert (await live(store)).target == "worker"
    assert (await store.read(samples.newest_available, 10, "planner"))[0].waits_for == "0 of 4 samples are free"


async def test_the_worker_is_told_which_target_it_trains_and_how_the_others_answer(
    store: Store, tmp_path: Path
) -> None:
    config = made(tmp_path)
    await store.write(put_deployed, config.model.base, 1, "work")
    await store.write(put_deployed, config.model.base, 2, "planner")
    await store.write(both, config)
    own, rubric = config.by_target()["worker"], rubric_of(config)
    row = await store.write(planner.plan, own, rubric, config.state_dir / "rounds", "test")
    spec = await store.read(planner.spec_of, row, own, rubric)
    assert (spec.target, spec.settings["model"]["alias"], spec.parent.name) == ("worker", "work", "r0001")
    (frozen,) = spec.frozen
    assert (frozen.target, frozen.alias, frozen.adapter and frozen.adapter.name) == ("planner", "planner", "r0002")
    assert len(spec.train) == 2 and len(spec.held_out) == 2
    # An adapter of another base model cannot answer beside the trained one either.
    await store.write(
        lambda conn: conn.execute(update(schema.adapters).where(schema.adapters.c.id == 2).values(base_model="b"))
    )
    with pytest.raises(TrainError, match="r0002, which serves, was trained on b"):
        await store.write(planner.begin, row, own, rubric)


async def test_the_gate_of_each_target_has_epochs_of_its_own(store: Store, tmp_path: Path) -> None:
    """A conversation that tested the planner is new for the worker."""
    config = made(tmp_path)
    await store.write(both, config)
    wheel = rounds_of(store, config)
    assert await wheel.start_due()
    row = await live(store)

    def spend(conn: Connection) -> None:
        ids = rounds.samples_of(conn, row.id, Split.HELD_OUT)
        keys = conn.execute(select(schema.tasks.c.key).where(schema.tasks.c.id.in_(ids))).scalars()
        scores = [Score(task_id=key, candidate=0.5, deployed=0.5) for key in keys]
        values = {"candidate_mean": 0.5, "deployed_mean": 0.5, "gain": 0, "lower": -1, "upper": 1, "confidence": 0.95}
        gate_tests.spend(
            conn, row.id, Comparison(tasks=3, samples=1, undecided=0, method="t", scores=scores, **values)
        )

    await store.write(spend)
    await end(store)
    own = config.by_target()
    tests = {name: (await store.read(next_test, each)) for name, each in own.items()}
    assert {name: (each.test.epoch, each.test.number, each.conversations) for name, each in tests.items()} == {
        "planner": (1, 2, 3), "worker": (1, 1, 2),
    }  # fmt: skip
    fresh = {name: await store.read(gate_tests.candidates, 10, Scope(target=name)) for name in own}
    assert [len(each) for each in fresh.values()] == [0, 2]
    assert len(await store.read(gate_tests.spent, 9, "worker")) == 0
    # Tests from before there were targets count for each.
    await store.write(lambda conn: conn.execute(update(schema.rounds).values(target="")))
    assert len(await store.read(gate_tests.spent, 9, "worker")) == 1
    assert await store.read(gate_tests.candidates, 10, Scope(target="worker")) == []


async def test_a_round_of_a_target_that_is_gone_gives_its_samples_back(store: Store, tmp_path: Path) -> None:
    config = made(tmp_path)
    await store.write(both, config)
    assert await rounds_of(store, config).start_due()
    assert await rounds_of(store, made(tmp_path, targets={"worker": {}})).finish_live() is RoundState.FAILED
    row = await store.read(rounds.by_name, "r0001")
    assert row is not None and "`targets` has no planner now" in row.reason
    assert await store.read(samples.count_free, Scope(target="planner")) == 4


async def test_each_target_is_judged_by_its_rubric(store: Store, tmp_path: Path) -> None:
    criteria: dict[str, Any] = {"id": "r", "threshold": 0.5, "criteria": [{"id": "correct", "value": "It is right."}]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(criteria))
    own = criteria | {"id": "plan", "criteria": [{"id": "short", "value": "The plan is short."}]}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(own))
    targets = {"planner": {"rubric": "plan.yaml"}, "worker": TARGETS["worker"]}
    with JudgeServer(lambda *_: True) as judge:
        config = made(
            tmp_path, targets=targets, filter={"rubric": "r.yaml"},
            judge={"base_url": judge.base_url, "model": "j", "max_attempts": 1},
        )  # fmt: skip
        told = [reply(n, agent=("planner", "Doer", "other")[n % 3]) for n in range(7)]
        source = await store.write(ledger.source_id, "/a")
        # They were read before there were targets.
        await store.write(record, source, batch(*told), train_ratio=0.7, split_seed=42)
        judging = TaskJudging(store, config)
        assert await judging.count() == 7
        assert (await judging.preview()).tasks == 7
        assert (await judging.run(limit=5)).judged == 5
        report = await judging.run()
    assert (report.judged, report.error) == (2, None)

    def criteria_of(conn: Connection) -> set[tuple[str, str]]:
        query = select(schema.tasks.c.target, schema.verdicts.c.results).join(schema.verdicts)
        return {(target, each["criterion"]) for target, results in conn.execute(query) for each in results}

    assert await store.read(criteria_of) == {("planner", "short"), ("worker", "correct"), ("", "correct")}


async def test_the_same_question_to_two_targets_is_no_repetition(store: Store, tmp_path: Path) -> None:
    line = task_line(reply(1, query="What is 2 plus 2?"), "/a")
    one, other = (fingerprint(line, 0.8, target) for target in ("planner", "worker"))
    assert one.scope != other.scope and one.text == other.text
    assert fingerprint(line, 0.8) == fingerprint(line, 0.8, "")
    await store.write(both, made(tmp_path))
    assert {row.target for row in await store.read(deduplication.unknown, 0.8, 100)} == {"planner", "worker"}
