"""Planning: when a round is due, its samples, and the specification that its worker reads."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Row

from flywheel.config.file import Config
from flywheel.daemon.forecast import none_free
from flywheel.daemon.judging.judge_setup import judge_settings
from flywheel.daemon.rounds.candidate import candidate_in
from flywheel.daemon.rounds.gate_planning import next_test
from flywheel.daemon.rounds.round_tasks import RECORDED, RoundTasks, round_tasks
from flywheel.daemon.rounds.sample_selection import (
    AvailableSamplesCache,
    choose,
    most_samples,
    new_samples_needed,
    pool_of,
)
from flywheel.daemon.rounds.suites import apart_from
from flywheel.errors import TrainError
from flywheel.judge.filters.chain import chain_of
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.round import FrozenTarget, RoundSelection, RoundSpec, Suite
from flywheel.records.selection import Selection
from flywheel.records.states import RoundState, Split
from flywheel.serving.server.model_parsers import folder_of
from flywheel.store import deployments, gate_tests, rounds, samples
from flywheel.system.terminal import quantity

log = logging.getLogger(__name__)

MOST_DOUBLINGS: Final = 4
"""The wait after a failed round doubles at most this often when more rounds fail in a row."""

_COLLECT: Final = "Collect and judge more traces first, or lower {}. `flywheel round --debug` needs none."


@dataclass(frozen=True, slots=True)
class Due:
    """Whether a round of a target should start, and the reason."""

    start: bool
    reason: str
    target: str = ""


def due(
    conn: Connection, config: Config, available_samples: AvailableSamplesCache | None = None, *, window: bool = False
) -> Due:
    """Whether a round is due, of the target whose settings these are. `window` is true when a cron window has just
    opened; `available_samples` has them, if it is given."""
    if (live := rounds.live(conn)) is not None:
        return Due(False, f"{live.name} is {live.state}")
    if wait := _backoff(conn, config):
        return Due(False, wait)
    takes = config.takes
    free = samples.count_free(conn, takes.train)
    trigger = config.trigger
    wanted = trigger.min_held_out or config.gate.min_tasks
    held_out = samples.count_held_out(conn, takes.gate, most=wanted)
    needed = min(trigger.cron_min_samples, trigger.min_samples) if window else trigger.min_samples
    if free < needed:
        return Due(False, f"{free} of {needed} samples are free")
    if wait := new_samples_needed(conn, config, needed).wait:
        return Due(False, wait)
    if why := missing_base_model(config.model.base) or _other_base(conn, config):
        return Due(False, why)
    available = (available_samples or AvailableSamplesCache(config)).now(conn)
    if available.usable < min(needed, most_samples(config)):
        return Due(False, "; ".join((f"{available.usable} of {needed} samples are free", *available.waits)))
    if held_out < wanted:
        return Due(False, f"{held_out} of {wanted} held-out tasks are judged")
    if shortfall := next_test(conn, config).shortfall:
        return Due(False, shortfall)
    reason = f"{'cron window' if window else 'min_samples'}: {available.usable} samples are free"
    return Due(True, reason, config.target)


def in_turn(conn: Connection, config: Config) -> list[Config]:
    """The settings of each target, the one whose last round was longest ago first: rounds alternate."""
    last = rounds.last_by_target(conn)
    return sorted(config.by_target().values(), key=lambda own: last.get(own.target, 0))


def next_with_samples(conn: Connection, config: Config, target: str | None = None) -> Config:
    """The settings of the given target, else of the first in turn with a free sample. Raises TrainError for an
    unknown target."""
    known = config.by_target()
    if target is None:
        turn = in_turn(conn, config)
        return next((own for own in turn if samples.count_free(conn, own.takes.train)), turn[0])
    if not target or target not in known:
        hint = f"The targets are {', '.join(known)}." if config.targets else "The configuration has no `targets`."
        raise TrainError("start a round", f"there is no target {target}", hint)
    return known[target]


def _backoff(conn: Connection, config: Config) -> str:
    newest = reversed(rounds.newest(conn, 1 + MOST_DOUBLINGS, config.takes.train.target))
    failed = list(itertools.takewhile(partial(_has_failed, conn), newest))
    if not failed:
        return ""
    seconds = config.daemon.failed_round_wait_seconds * 2 ** (len(failed) - 1)
    since = datetime.fromisoformat(failed[0].finished_at)
    until = since + timedelta(seconds=seconds)
    # A time to come was noted under a clock that was wrong.
    if not since <= datetime.now(UTC) < until:
        return ""
    return f"{failed[0].name} failed; the next attempt is at {until.isoformat(timespec='seconds')}"


def _has_failed(conn: Connection, row: Row[Any]) -> bool:
    """Whether a round failed by itself: that a waiting candidate was overtaken, or that tasks were erased, says
    nothing about the next round."""
    is_failed = row.state == RoundState.FAILED and row.reason != rounds.HAS_ERASED
    return is_failed and rounds.waits_since(conn, row.id) is None


def _other_base(conn: Connection, config: Config) -> str:
    """Why no round can use the active adapters, its own and those of other targets: one belongs to another base
    model."""
    for alias in config.aliases:
        active = deployments.active(conn, alias)
        adapter = rounds.adapter(conn, active.adapter) if active and active.adapter else None
        if adapter is not None and adapter.base_model != config.model.base:
            trained = f"{adapter.name}, which serves, was trained on {adapter.base_model}"
            return f"{trained}, and model.base is {config.model.base}"
    return ""


def _check(conn: Connection, config: Config, attempted: str) -> None:
    """Raise TrainError for a base model that cannot be trained."""
    if why := missing_base_model(config.model.base):
        raise TrainError(attempted, why, "Set model.base to a model's directory, or to its name on the hub.")
    if why := _other_base(conn, config):
        raise TrainError(
            attempted,
            why,
            "Serve the new base model first (`flywheel rollback --to base`), or set model.base back. If the same"
            " model was moved, keep the old path as a link.",
        )


def plan(
    conn: Connection,
    config: Config,
    rubric: Rubric,
    rounds_dir: Path,
    trigger: str,
    place: Callable[[Path], None] | None = None,
    chosen: tuple[Selection, RoundSelection] | None = None,
) -> Row[Any]:
    """Reserve samples for a round and write it down: those that were `chosen`. None for the comparison of an adapter,
    which `place` puts into the round's directory. Raises TrainError when it cannot be."""
    _check(conn, config, "plan a round")
    takes, needed = config.takes, config.gate.min_tasks
    # A live round, which may have them, is the first thing that `rounds.plan` says.
    if place is None and rounds.live(conn) is None and not samples.count_free(conn, takes.train):
        raise TrainError("plan a round", *none_free(conn, config))
    if (held_out := samples.count_held_out(conn, takes.gate, most=needed)) < needed:
        why = f"{held_out} held-out tasks are judged, and gate.min_tasks is {needed}: the gate would reject all"
        raise TrainError("plan a round", why, _COLLECT.format("gate.min_tasks"))
    coming = next_test(conn, config)
    if coming.shortfall:
        raise TrainError("plan a round", coming.shortfall, _COLLECT.format("gate.min_power"))
    own: Selection = Selection(())
    record: RoundSelection | None = None
    more: Sequence[int] = ()
    if place is None:
        own, record = chosen or choose(conn, config, rubric)
        if not own.tasks and record.left_out:
            why = "; ".join(f"{number:,} {each}" for each, number in record.left_out.items())
            raise TrainError(
                "plan a round", f"no free sample fits: {why}", "Change the settings that leave them out."
            )
        if RECORDED & {*config.training.kinds} and not takes.train.rejected_uses:
            room = most_samples(config) - len(own.tasks) - len(own.replayed)
            more = samples.accepted_by_people(conn, room, takes.train)
    return rounds.plan(
        conn,
        rounds_dir,
        own.tasks,
        coming.tasks,
        coming.test,
        more=more,
        replayed=own.replayed,
        place=place,
        selection=record.model_dump(mode="json") if record is not None else None,
        trigger=trigger,
        target=config.target,
        seed=config.training.seed,
        **_of_now(conn, config, rubric),
    )


def _of_now(conn: Connection, config: Config, rubric: Rubric) -> dict[str, str | None]:
    """The active adapter, the settings and the rubric of now, as columns of a round."""
    active = deployments.active(conn, config.model.alias)
    parent = active.adapter if active else None
    return {"parent": parent, "config_hash": config_hash(config), "rubric_hash": rubric.hash}


def begin(conn: Connection, row: Row[Any], config: Config, rubric: Rubric) -> Row[Any]:
    """Prepare a planned round for its start: with the active adapter, the settings and the rubric of now.

    Raises TrainError when the active adapter belongs to another base model, and when the base model is missing.
    """
    _check(conn, config, f"start {row.name}")
    return rounds.go_on_from(conn, row.name, **_of_now(conn, config, rubric))


def spec_of(
    conn: Connection, row: Row[Any], config: Config, rubric: Rubric, suites: Sequence[Suite] = ()
) -> RoundSpec:
    """The specification of a planned round for its worker. Raises TrainError when no task is left to train on, or an
    adapter to compare cannot be read."""
    train, held_out = (rounds.samples_of(conn, row.id, split) for split in (Split.TRAIN, Split.HELD_OUT))
    tasks = round_tasks(conn, train, held_out, config)
    tasks.train, near = apart_from(suites, tasks.train)
    tasks.left_out |= near
    return _spec(
        conn,
        config,
        rubric,
        row.parent,
        tasks,
        round_id=row.name,
        attempt=row.attempt,
        seed=row.seed,
        debug=False,
        candidate=None if train else candidate_in(Path(row.dir), row.name),
        test=gate_tests.of_round(conn, row.id),
        selection=row.selection,
        pool=pool_of(conn, config, train) if train else None,
        suites=list(suites),
    )


def debug_spec(conn: Connection, config: Config, rubric: Rubric) -> RoundSpec:
    """The specification of a round that only shows rollouts and rewards: no training, no reservation.

    Raises TrainError.
    """
    _check(conn, config, "try a round")
    training = config.training.of_grpo[0]
    if (prompts := training.debug_prompts) is not None:
        training = training.model_copy(update={"prompts_per_step": prompts})
        config = _without_surplus(config)
    config = config.model_copy(update={"training": training})
    asked = config.rollout.prompts_asked(config.training.prompts_per_step)
    free = [row.id for row in samples.candidates(conn, config.takes.train, asked)]
    if not free:
        raise TrainError("try a round", *none_free(conn, config))
    return _spec(
        conn,
        config,
        rubric,
        _of_now(conn, config, rubric)["parent"],
        round_tasks(conn, free, [], config),
        round_id="debug",
        attempt=1,
        seed=config.training.seed,
        debug=True,
    )


def _spec(
    conn: Connection, config: Config, rubric: Rubric, parent: str | None, tasks: RoundTasks, **values: Any
) -> RoundSpec:
    trains = values.get("candidate") is None
    if trains and not tasks.train:
        why = next(iter(tasks.left_out.values()))
        raise TrainError(
            f"start {values['round_id']}",
            f"none of its {quantity(len(tasks.left_out), 'task')} can be used: {why}",
            "Check rollout.agent, rollout.tools.uncalled, rollout.finish_tools and gate.suites.",
        )
    if trains:
        config = _of_tasks(config, len(tasks.train))
    # Rollouts are graded as tasks are: with the chain's judge settings.
    own = {
        "judge": judge_settings(config, chain_of(config)),
        "tracking": config.tracking.of_round(values["round_id"], config.state_dir),
    }
    return RoundSpec(
        base_model=config.model.base,
        parent=rounds.adapter_ref(conn, parent),
        target=config.target,
        frozen=_frozen(conn, config),
        rubric=rubric.model_dump(mode="json"),
        settings=config.model_copy(update=own).model_dump(mode="json"),
        train=tasks.train,
        held_out=tasks.held_out,
        left_out=tasks.left_out,
        shared=tasks.shared,
        shared_gate=tasks.shared_gate,
        **values,
    )


def _of_tasks(config: Config, tasks: int) -> Config:
    """The settings for so many tasks. If a stage has more prompts in a step than these, no step asks a surplus."""
    asked = max(each.prompts_per_step for each in (config.training, *config.training.of_grpo))
    config = config.model_copy(update={"training": config.training.fitted(tasks)})
    if asked <= tasks:
        return config
    log.info("a step asks all %d tasks: training.prompts_per_step is %d", tasks, asked)
    return _without_surplus(config)


def _without_surplus(config: Config) -> Config:
    """The settings with exactly `training.prompts_per_step` prompts in a step."""
    rollout = config.rollout.model_copy(update={"oversample": 1.0})
    return config.model_copy(update={"rollout": rollout})


def _frozen(conn: Connection, config: Config) -> list[FrozenTarget]:
    """The targets other than that of the settings, with their active adapters."""
    found = []
    for name, other in config.by_target().items():
        if name != config.target:
            active = deployments.active(conn, other.model.alias)
            adapter = rounds.adapter_ref(conn, active.adapter if active else None)
            found.append(FrozenTarget(target=name, alias=other.model.alias, adapter=adapter))
    return found


def config_hash(config: Config) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


_OFF: Final = ("", "0", "false", "off", "no")
_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def missing_base_model(base: str) -> str:
    """Why the base model cannot be loaded here; empty when its files exist or the hub may have them."""
    path = Path(base)
    if path.is_absolute() or path.is_dir():
        if not path.is_dir():
            return f"there is no directory {base}"
        return "" if (path / "config.json").is_file() else f"{base} has no config.json"
    if not _NAME.fullmatch(base):
        return f"there is no directory {base}, and it is not a name on the hub"
    variables = (os.environ.get(name, "").lower() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if any(value not in _OFF for value in variables) and folder_of(base) is None:
        return f"{base} is not on this machine, and HF_HUB_OFFLINE forbids the download"
    return ""
