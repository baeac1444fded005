"""Texts of erased tasks in the files of rounds and evaluations: nothing is left of them, and all else stays."""

from __future__ import annotations

import fcntl
import itertools
import json
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flywheel.daemon.evaluation_answers import answers_in
from flywheel.daemon.rounds.removal import EMPTIED, erase_from_files, erase_from_round
from flywheel.errors import LockedError, StoreError
from flywheel.records.erasure import ERASED as ERASED_SENTENCE
from flywheel.records.round import RoundResult
from flywheel.system.files import json_line, write_json
from flywheel.training.data.rollout_file import groups, prompts_of, read_answers, rollout_of, rollouts
from flywheel.training.data.round_directory import read_spec
from tests.factories.erasure import (
    ERASED,
    GONE,
    GONE_HELD_OUT,
    STAYS,
    STAYS_HELD_OUT,
    TEXTS,
    contents,
    forms,
    places_of,
    put_erasable_round,
    records,
    rollout,
)
from tests.factories.rollout import IN_ONE_FILE
from tests.factories.round import round_spec
from tests.factories.task import round_task

MARKS = ("Amélie", "七三九一二四", "🦊🔑")
"""What only texts of erased tasks have."""
OTHERS = {GONE: "Amélie", GONE_HELD_OUT: "🦊🔑", STAYS: "Boris", STAYS_HELD_OUT: "🐻🔔"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "r0001"
    put_erasable_round(made)
    return made


def assert_nothing_left(directory: Path) -> None:
    files = contents(directory)
    assert {mark for mark in (*MARKS, GONE) if places_of(mark, files)} == set()


def of_others(files: dict[str, bytes]) -> dict[str, list[Any]]:
    """The records of other tasks in each file, in their order."""

    def found(value: Any) -> list[Any]:
        if isinstance(value, list):
            return [record for item in value for record in found(item)]
        if not isinstance(value, dict):
            return []
        if isinstance(name := value.get("task_id"), str):
            named = {name, value.get("rejected_task_id")}
            return [value] if not named & ERASED else []
        return [record for item in value.values() for record in found(item)]

    own = {name: [record for value in records(data, name) for record in found(value)] for name, data in files.items()}
    return {name: some for name, some in own.items() if some}


@pytest.mark.parametrize("is_over", [True, False], ids=["over", "its worker died"])
def test_nothing_of_an_erased_task_is_left_in_any_file_and_all_of_others_stays(tmp_path: Path, is_over: bool) -> None:
    put_erasable_round(tmp_path, is_over=is_over)
    before = contents(tmp_path)
    assert {name for mark in MARKS for name in places_of(mark, before)} >= {
        "spec.json", "result.json", "error.json", "progress.json", "stages/1-dpo/trained.json",
        "worker.log", "stages/1-dpo/pairs.jsonl", "selection.jsonl", "rollouts/0001.jsonl", "evaluation.jsonl",
        "rollouts/.0003.jsonl.0123abcd",
        *(() if is_over else ("partial.jsonl",)),
    }  # fmt: skip
    assert erase_from_round(tmp_path, ERASED) >= 10
    assert_nothing_left(tmp_path)
    after = contents(tmp_path)
    assert of_others(after) == of_others(before)
    assert of_others(after).keys() >= {"spec.json", "result.json", "rollouts/0001.jsonl", "stages/1-dpo/pairs.jsonl"}
    assert after["metrics.jsonl"] == before["metrics.jsonl"]
    assert (after["worker.log"], "partial.jsonl" in after, "identity.json" in after) == (EMPTIED, False, False)
    # Lines of others are the same bytes.
    assert set(after["evaluation.jsonl"].splitlines()) < set(before["evaluation.jsonl"].splitlines())
    assert erase_from_round(tmp_path, ERASED, used=True) == 0
    assert contents(tmp_path) == after


def test_adapters_stay_as_they_are(directory: Path) -> None:
    """What they learned stays, and what is beside their weights has no tasks."""
    adapters = [directory / name for name in ("adapter", "candidate", "stages/1-dpo/adapter")]
    for each in adapters:
        each.mkdir(parents=True, exist_ok=True)
        (each / "adapter_config.json").write_text(json.dumps({"r": 8, "error": "a name"}))
        (each / "chat_template.jsonl").write_text("{{ messages }}")
    before = [marks(each) for each in adapters]
    assert erase_from_round(directory, ERASED, used=True) > 10
    assert [marks(each) for each in adapters] == before


def test_what_reads_a_round_reads_it_afterwards(directory: Path) -> None:
    erase_from_round(directory, ERASED)
    spec = read_spec(directory)
    assert ([task.task_id for task in spec.train], [task.task_id for task in spec.held_out]) == (
        [STAYS],
        [STAYS_HELD_OUT],
    )
    assert (set(spec.left_out), [each.content for each in spec.shared.results.values()]) == (
        {STAYS},
        [TEXTS[STAYS], TEXTS[STAYS_HELD_OUT]],
    )
    assert spec.pool is not None
    assert set(spec.pool.candidates) == {STAYS, STAYS_HELD_OUT}
    result = RoundResult.model_validate_json((directory / "result.json").read_bytes())
    assert result.sampling is not None and result.comparison is not None and result.probe is not None
    # One is of the rollouts, one of the prompts of the tasks, and one says that there was none.
    assert [each.text for each in result.sampling.system_prompts] == [
        f"You talk to a person who said {TEXTS[STAYS]}",
        "Be brief.",
        "",
    ]
    assert (result.reason, result.released, result.without_gradient) == (ERASED_SENTENCE, [STAYS], [STAYS])
    assert [each.task_id for each in result.comparison.scores] == [STAYS, STAYS_HELD_OUT]
    assert (result.probe.tasks, result.probe.places) == ([STAYS_HELD_OUT], [(0, 1), (0, 2), (0, 3), (0, 4)])
    assert (result.probe.first.adapter, result.probe.second.base) == ([-1.0, -3.0, -5.0, -7.0], [-1.0] * 4)
    assert set(prompts_of(directory)) == {STAYS, STAYS_HELD_OUT}
    answers = read_answers(directory / "evaluation.jsonl", {GONE_HELD_OUT, STAYS_HELD_OUT})
    assert {answer["task_id"] for answer in answers or ()} == {STAYS_HELD_OUT}


def test_groups_are_those_of_the_rollouts_that_are_left(directory: Path) -> None:
    erase_from_round(directory, ERASED)
    found = list(groups(directory))
    assert [(group.step, group.group, group.task_id) for group in found] == [(1, 1, STAYS), (2, 0, STAYS)]
    read = [rollout_of(group, place) for group in found for place in range(2)]
    assert read == list(rollouts(directory))
    assert read == [rollout(STAYS, step, group, seed) for step, group in ((1, 1), (2, 0)) for seed in (0, 1)]


def test_a_round_with_the_rollouts_of_all_steps_in_one_file(tmp_path: Path) -> None:
    """Of an earlier version, whose index named tasks, too."""
    directory = shutil.copytree(IN_ONE_FILE, tmp_path / "r0001")
    before = list(rollouts(directory))
    assert erase_from_round(directory, {"t-1"}) >= 4
    assert list(rollouts(directory)) == [each for each in before if each["task_id"] == "t-2"]
    assert [(group.step, group.task_id) for group in groups(directory)] == [(1, "t-2"), (2, "t-2")]
    assert not [name for name, data in contents(directory).items() if b"t-1" in data or b"3 plus 4" in data]
    assert erase_from_round(directory, {"t-1"}, used=True) == 0


def test_files_keep_their_permissions(directory: Path) -> None:
    names = ("spec.json", "rollouts/0001.jsonl", "worker.log")
    for name in names:
        (directory / name).chmod(0o600)
    (directory / "result.json").chmod(0o640)
    erase_from_round(directory, ERASED)
    assert {stat.S_IMODE((directory / name).stat().st_mode) for name in names} == {0o600}
    assert stat.S_IMODE((directory / "result.json").stat().st_mode) == 0o640


def marks(directory: Path) -> dict[Path, tuple[int, int, int]]:
    """By which a file is recognised that was written again: inode, size, and time of the last change."""
    found = {path: path.stat() for path in directory.rglob("*")}
    return {path: (each.st_ino, each.st_size, each.st_mtime_ns) for path, each in found.items()}


def test_a_round_that_has_no_erased_task_is_not_touched(directory: Path) -> None:
    (directory / "worker.log").write_text("as it was")
    assert erase_from_round(directory, frozenset({"t-other"})) == 1, "what a killed process left is nobody's"
    before = marks(directory)
    assert erase_from_round(directory, frozenset({"t-other"})) == 0
    assert marks(directory) == before
    assert erase_from_round(directory / "none", ERASED) == 0


def test_a_round_whose_specification_lost_its_tasks_is_known_from_the_state(directory: Path) -> None:
    """Retention has removed them, and the rollouts; the result has system prompts."""
    spec = json.loads((directory / "spec.json").read_bytes())
    write_json(directory / "spec.json", spec | {"train": [], "held_out": [], "pool": None})
    shutil.rmtree(directory / "rollouts")
    erase_from_round(directory, ERASED, used=True)
    assert_nothing_left(directory)


def test_a_worker_that_runs_is_not_disturbed(directory: Path) -> None:
    before = contents(directory)
    with (directory / "worker.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match=r"erase tasks from the files in .*: another worker is running it"):
            erase_from_round(directory, ERASED)
    assert contents(directory) == before
    erase_from_round(directory, ERASED)
    assert_nothing_left(directory)


def test_a_file_that_cannot_be_understood_is_named(directory: Path) -> None:
    (directory / "result.json").write_text(TEXTS[GONE])
    with pytest.raises(StoreError, match=r"erase tasks from .*result\.json: it is not JSON.*Remove it"):
        erase_from_round(directory, ERASED)
    assert any(form in (directory / "spec.json").read_bytes() for form in forms("Amélie")), "it is still to do"
    (directory / "result.json").unlink()
    (directory / "usage.jsonl").write_text(f"{TEXTS[GONE]}\n" + '{"calls": NaN}\n')
    erase_from_round(directory, ERASED)
    assert_nothing_left(directory)
    assert (directory / "usage.jsonl").read_text() == '{"calls": NaN}\n'


class Died(BaseException):
    """What stands for the end of the process."""


@contextmanager
def dying(after: int) -> Iterator[None]:
    """No renaming and no removal of a file happens after so many of them."""
    done = itertools.count()

    def trapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(self: Path, *arguments: Any, **options: Any) -> Any:
            if next(done) >= after:
                raise Died
            return call(self, *arguments, **options)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink"):
            patch.setattr(Path, name, trapped(getattr(Path, name)))
        yield


@pytest.mark.parametrize(("removed", "places"), [((), 14), (("stages", "selection.jsonl", "result.json"), 8)])
def test_an_end_at_any_renaming_and_removal_leaves_what_is_done_when_it_is_run_again(
    tmp_path: Path, removed: Sequence[str], places: int
) -> None:
    """Also of a directory with few files: those that are left to do must be found again. `tests/cli/test_forget.py`
    kills processes there."""

    def put(directory: Path) -> None:
        put_erasable_round(directory, is_over=False)
        for name in removed:
            shutil.rmtree(path) if (path := directory / name).is_dir() else path.unlink()

    whole = tmp_path / "whole"
    put(whole)
    readable = contents(whole)
    erase_from_round(whole, ERASED)
    for place in itertools.count():
        directory = tmp_path / str(place)
        put(directory)
        try:
            with dying(place):
                erase_from_round(directory, ERASED)
        except Died:
            pass
        else:
            break
        # What the rounds page reads is whole at every time.
        assert [group.task_id for group in groups(directory)].count(STAYS) == 2
        assert {name for name in contents(directory) if not Path(name).name.startswith(".")} <= readable.keys()
        erase_from_round(directory, ERASED)
        assert contents(directory) == contents(whole)
    assert place >= places, "it ended nowhere"


def test_stored_answers_of_an_evaluation(tmp_path: Path) -> None:
    tasks = [round_task(task, TEXTS[task]) for task in (GONE_HELD_OUT, STAYS_HELD_OUT)]
    spec = round_spec(train=[], held_out=tasks, evaluates=True)
    write_json(tmp_path / "spec.json", spec.model_dump(mode="json"))
    result = RoundResult(round_id="evaluation", outcome="evaluated", left_out={GONE: TEXTS[GONE], STAYS: "long"})
    write_json(tmp_path / "result.json", result.model_dump(mode="json"))
    lines = [rollout(task.task_id, 0, number, 1) for number, task in enumerate(tasks)]
    (tmp_path / "answers.jsonl").write_bytes(b"".join(map(json_line, lines)))
    assert erase_from_round(tmp_path, ERASED) == 3
    assert_nothing_left(tmp_path)
    answers = answers_in(tmp_path)
    assert (set(answers.by_task), answers.left_out) == ({STAYS_HELD_OUT}, {STAYS: "long"})
    assert [answer.line for answer in answers.every] == [lines[1]]
    assert erase_from_round(tmp_path, ERASED) == 0


@pytest.mark.slow
def test_all_rounds_and_evaluations_of_a_state(tmp_path: Path) -> None:
    """Those that name the tasks, and those that the state says had one."""
    named, debug, known = (tmp_path / "rounds" / name for name in ("r0001", "debug", "r0003"))
    evaluation, elsewhere = tmp_path / "evaluations" / "0123", tmp_path / "moved" / "r0004"
    for each in (named, debug, evaluation, elsewhere):
        put_erasable_round(each)
    known.mkdir()
    (known / "worker.log").write_text(TEXTS[GONE])
    (tmp_path / "evaluations" / "held-out.jsonl").write_text("{}\n")
    (decisions := tmp_path / "tracking" / "r0003").mkdir(parents=True)
    write_json(decisions / "decision.json", {"outcome": "failed", "reason": TEXTS[GONE]})
    (decisions / "wandb.log").write_text("as it was")
    assert erase_from_files(tmp_path, ERASED, [known, elsewhere]) > 40
    assert_nothing_left(tmp_path)
    assert json.loads((decisions / "decision.json").read_bytes()) == {"outcome": "failed", "reason": ERASED_SENTENCE}
    assert (decisions / "wandb.log").read_text() == "as it was"
    assert erase_from_files(tmp_path, ERASED, [known, elsewhere]) == 0
    assert erase_from_files(tmp_path / "none", ERASED, []) == 0
