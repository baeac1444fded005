"""What rounds could train on is counted by every reason, before and after the judge, as rounds count it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection

from flywheel.cli.tables import forecast_text
from flywheel.config.file import Config
from flywheel.daemon.configured_source import apply_model_rules
from flywheel.daemon.forecast import Forecast, forecast, none_free
from flywheel.records import exclusion
from flywheel.records.exclusion import TrainedModels
from flywheel.records.states import Split
from flywheel.store import samples
from flywheel.store.kernel.database import Store
from tests.factories.config import make_config, round_config
from tests.factories.targets import TARGETS, both
from tests.factories.trace import put_replies, replies_on
from tests.factories.verdict import accepted, judge_all, put_judged, rejected
from tests.training.recorded.recordings import ADD

MODEL: dict[str, Any] = {"model": "helper-model"}
INEXACT: dict[str, Any] = {"prompt_reason": exclusion.NOT_RECORDED}
HIDDEN: dict[str, Any] = {"prompt_reason": f"{exclusion.HIDDEN_MESSAGE}; {exclusion.OTHER_PROMPT}"}
UNCALLED: dict[str, Any] = {"tools": (ADD,)}
TRAINED = {"alias": "my-agent", "base": "/models/base"}


def put(conn: Connection, *kinds: dict[str, Any], held_out: int = 0) -> None:
    """A task for training of each of these kinds, and held-out ones of the first."""
    plain, kept = replies_on(Split.TRAIN, len(kinds)), replies_on(Split.HELD_OUT, held_out)
    made = [*zip(plain, kinds, strict=True), *((each, kinds[0]) for each in kept)]
    put_replies(
        conn, *(replace(each, **kind) for each, kind in made), source="/a.sqlite", models=TrainedModels(**TRAINED)
    )


def config(folder: Path, models: dict[str, Any] | None = None, **sections: Any) -> Config:
    source = {"path": "/a.sqlite", **({"models": models} if models else {})}
    return make_config(folder, sources=[source], model=TRAINED, **sections)


def numbers(found: Forecast) -> tuple[int, ...]:
    return found.tasks, found.held_out, found.for_training, found.usable, found.left_out


async def test_each_reason_counts_every_task_and_the_last_number_each_task_once(tmp_path: Path, store: Store) -> None:
    await store.write(put, MODEL | INEXACT | UNCALLED, MODEL | HIDDEN, MODEL, UNCALLED, {}, held_out=2)
    found = await store.read(forecast, config(tmp_path))
    assert numbers(found) == (7, 2, 5, 1, 4)
    assert forecast_text(found) == (
        "7 tasks: 2 held out; of 5 for training 1 usable. Answered by another model (`sources[].models.include`): 3;"
        " no exact prompt (`training.inexact_prompts`): 2; tools uncalled (`rollout.tools.uncalled`): 2."
        " All three together: 4."
    )
    assert found.as_json()["reasons"][1] == {
        "reason": "no exact prompt", "exclusions": ["hidden", "inexact"], "setting": "training.inexact_prompts",
        "tasks": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([{}], "1 task: 0 held out; of 1 for training 1 usable."),
        ([MODEL], "1 task: 0 held out; of 1 for training 0 usable. Answered by another model"
                  " (`sources[].models.include`): 1."),
        ([MODEL | INEXACT, {}], "2 tasks: 0 held out; of 2 for training 1 usable. Answered by another model"
                                " (`sources[].models.include`): 1; no exact prompt (`training.inexact_prompts`): 1."
                                " Both together: 1."),
    ],
)  # fmt: skip
async def test_the_sentence_names_as_many_reasons_as_there_are(
    kinds: list[dict[str, Any]], expected: str, tmp_path: Path, store: Store
) -> None:
    await store.write(put, *kinds)
    assert forecast_text(await store.read(forecast, config(tmp_path))) == expected


async def test_settings_that_name_the_reason_make_tasks_usable(tmp_path: Path, store: Store) -> None:
    """Also those that no process has applied to the state."""
    await store.write(put, MODEL | INEXACT | UNCALLED, MODEL | HIDDEN, MODEL, UNCALLED, {})
    models, training = {"include": ["helper-*"]}, {"inexact_prompts": "use"}
    rollout = {"tools": {"uncalled": "use"}}
    for chosen, usable in (
        (config(tmp_path, models), 2),
        (config(tmp_path, training=training), 1),
        (config(tmp_path, rollout=rollout), 2),
        (config(tmp_path, models, training=training), 3),
        (config(tmp_path, models, training=training, rollout=rollout), 5),
    ):
        before = await store.read(forecast, chosen)
        assert before.usable == usable
        await apply_model_rules(store, chosen)
        assert await store.read(forecast, chosen) == before
        await apply_model_rules(store, config(tmp_path))


async def test_what_is_usable_is_what_a_round_may_take_when_all_is_accepted(tmp_path: Path, store: Store) -> None:
    await store.write(put, MODEL | UNCALLED, HIDDEN, UNCALLED, {}, {}, held_out=3)
    for sections in ({}, {"training": {"inexact_prompts": "use"}}, {"rollout": {"tools": {"uncalled": "use"}}}):
        chosen = config(tmp_path, **sections)
        before = await store.read(forecast, chosen)
        await store.write(judge_all, lambda _: accepted())
        assert await store.read(forecast, chosen) == before
        assert await store.read(samples.count_free, chosen.takes.train) == before.usable


async def test_rejected_tasks_count_where_they_are_asked(tmp_path: Path, store: Store) -> None:
    replies = replies_on(Split.TRAIN, 3) + replies_on(Split.HELD_OUT, 2)
    spans = {replies[0].span_id, replies[3].span_id}
    await store.write(
        put_judged, *replies, judge=lambda line: rejected() if line["metadata"]["span_id"] in spans else accepted()
    )
    assert numbers(await store.read(forecast, round_config(tmp_path))) == (4, 2, 2, 2, 0)
    decided = round_config(tmp_path, training={"prompts": "decided"})
    assert numbers(await store.read(forecast, decided)) == (5, 2, 3, 3, 0)


async def test_a_setting_that_does_not_help_is_not_named(tmp_path: Path, store: Store) -> None:
    """With `rollout.agent: reply`, tasks with uncalled tools are left out whatever `rollout.tools.uncalled` is."""
    await store.write(put, UNCALLED)
    found = await store.read(forecast, config(tmp_path, rollout={"agent": "reply"}))
    assert [each.setting for each in found.reasons] == ["rollout.agent"]


async def test_without_a_free_sample_it_is_said_what_leaves_out_how_many(tmp_path: Path, store: Store) -> None:
    await store.write(put, MODEL | INEXACT, MODEL, UNCALLED, {}, held_out=2)
    own = config(tmp_path)
    left_out = (
        "no sample is free; answered by another model (`sources[].models.include`): 2; "
        "no exact prompt (`training.inexact_prompts`): 1; tools uncalled (`rollout.tools.uncalled`): 1"
    )
    held_out = "held out (`ingest.train_ratio`): 2"
    why, hint = await store.read(none_free, own)
    assert (why, hint) == (
        f"{left_out}; {held_out}",
        "Wait: 1 task that rounds could take must still be judged.",
    )
    # What has been judged, or cannot be used, is nothing to wait for.
    await store.write(judge_all, lambda _: rejected())
    why, hint = await store.read(none_free, own)
    assert why == f"no sample is free; rejected (`filter`): 4; {held_out}"
    assert hint.startswith("No unjudged task could be used by a round")


async def test_a_target_has_a_forecast_of_its_own(tmp_path: Path, store: Store) -> None:
    whole = make_config(tmp_path, targets=TARGETS)
    await store.write(both, whole)
    found = {name: numbers(await store.read(forecast, own)) for name, own in whole.by_target().items()}
    assert found == {"planner": (7, 3, 4, 4, 0), "worker": (4, 2, 2, 2, 0)}
    assert numbers(await store.read(forecast, whole)) == (11, 5, 6, 6, 0)


@pytest.mark.parametrize("section", ["model", "targets", "trigger", "training", "rollout", "gate"])
def test_a_configuration_with_a_setting_of_training_has_a_trainer(section: str, tmp_path: Path) -> None:
    assert make_config(tmp_path, **{section: {}}).has_trainer
    judging = {"sources": [], "judge": {}, "filter": {}, "privacy": {}, "ingest": {}, "serving": {}, "daemon": {}}
    assert not make_config(tmp_path, **judging).has_trainer
