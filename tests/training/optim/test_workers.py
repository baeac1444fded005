"""Two processes of a trainer (`training.workers`) on a Ray cluster of two nodes: their steps are those of one. Where
one is killed, the other ends with it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from flywheel.config.training import Stage
from flywheel.errors import TrainError
from flywheel.training.data.samples import RecordedReply, StepSize, TrainingRow, divided, rows_of
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.optim.trainer_actor import open_store
from tests.factories.pair import PAIRS
from tests.factories.policy_training import policy, rows
from tests.factories.trainer_processes import Processes, furthest, two_nodes
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.training,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


def undivided(figures: Mapping[str, float]) -> list[str]:
    """Figures that the division of a step does not change. DPO's entropy is a mean over micro-batches."""
    return sorted(set(figures) - {"micro_batches", *(["entropy"] if "pairs" in figures else [])})


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    """An adapter that has an effect."""
    from tests.factories.policy import save_adapter

    directory = tmp_path_factory.mktemp("parent") / "adapter"
    save_adapter(policy(), directory)
    return AdapterFiles.read(directory)


@pytest.fixture(scope="module")
def one(parent: AdapterFiles) -> Processes:
    return Processes(1, parent)


@pytest.fixture(scope="module")
def two(parent: AdapterFiles) -> Iterator[Processes]:
    with two_nodes():
        yield Processes(2, parent)


def replies(numbers: Sequence[int] = (0, 1, 2, 3)) -> list[RecordedReply]:
    return [
        RecordedReply(f"t-{each}", tuple(replace(row.sample, logprobs=()) for row in rows() if row.rollout == each))
        for each in numbers
    ]


def one_rollout() -> list[TrainingRow]:
    return [row for row in rows() if row.rollout == 3]


def assert_all_end(processes: Processes, mark: Path, *, killed: int) -> None:
    """Kill one in a step in which the other waits for it: the attempt ends with the reason. On a cluster, the end of
    the session, which this is, ends the other."""
    pids = [pid for _, pid in processes.each("where")]
    dies, other = psutil.Process(pids[killed]), psutil.Process(pids[1 - killed])
    processes.begin(steps=2)
    processes.train(rows())
    processes.each("be_late", killed, mark)
    with ThreadPoolExecutor() as waiting:
        attempt = waiting.submit(processes.train, rows())
        wait_for(mark.exists, "the second step")
        dies.kill()
        why = attempt.exception(timeout=60)
    assert isinstance(why, TrainError)
    assert "a process of it died" in why.why
    assert why.retryable
    ray.shutdown()
    wait_for(lambda: not other.is_running(), "the end of the other process", seconds=60)


@pytest.mark.extended
def test_the_second_process_ends_when_the_first_is_killed(tmp_path: Path, parent: AdapterFiles) -> None:
    """Before the other tests of this module, which share a session."""
    with two_nodes():
        assert_all_end(Processes(2, parent), tmp_path / "late", killed=0)


@pytest.mark.parametrize(
    ("stage", "items", "training"),
    [
        pytest.param("grpo", rows, {"loss_type": "dapo"}, id="dapo"),
        pytest.param("grpo", rows, {"loss_type": "grpo"}, id="grpo", marks=pytest.mark.extended),
        pytest.param("grpo", rows, {"loss_type": "dr_grpo"}, id="dr_grpo", marks=pytest.mark.extended),
        pytest.param("grpo", rows, {"importance": "engine", "beta": 0.1}, id="kl"),
        pytest.param("grpo", one_rollout, {}, id="one rollout"),
        pytest.param("sft", replies, {"sft": {"batch_size": 4, "epochs": 1}}, id="sft"),
        pytest.param("sft", lambda: replies([2]), {"sft": {"batch_size": 4, "epochs": 1}}, id="one reply"),
        pytest.param("dpo", lambda: PAIRS, {"dpo": {"batch_size": 3, "epochs": 1}}, id="dpo"),
        pytest.param("dpo", lambda: PAIRS[1:2], {"dpo": {"batch_size": 3, "epochs": 1}}, id="one pair"),
    ],
)
def test_two_processes_have_the_loss_and_the_gradient_of_one(
    one: Processes, two: Processes, stage: Stage, items: Callable[[], Any], training: dict[str, Any]
) -> None:
    """Rollouts have different lengths. A single rollout, reply or pair leaves the second process without one."""
    wanted, of_one = one.step(stage, items(), **training)
    found, of_two = two.step(stage, items(), **training)
    assert furthest(found, wanted) < 1e-6
    assert of_two["loss"] == pytest.approx(of_one["loss"], rel=1e-6, abs=1e-7)
    assert of_two["grad_norm"] == pytest.approx(of_one["grad_norm"], rel=1e-6)
    figures = undivided(of_one)
    assert len(figures) >= 7
    assert [of_two[name] for name in figures] == pytest.approx([of_one[name] for name in figures], rel=1e-5, abs=1e-6)


def test_the_first_process_alone_measures_losses(one: Processes, two: Processes) -> None:
    each = [rows_of([reply]) for reply in replies()]
    for processes in (one, two):
        processes.begin("sft", len(each))
    assert two.trainers.nll(each) == pytest.approx(one.alone.nll(each), rel=1e-6)
    two.step("grpo", rows())


def test_processes_meet_on_the_nodes_address_alone() -> None:
    before = {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}
    store = open_store("127.0.0.1", 2)
    after = {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}
    assert [tuple(each) for each in after - before] == [("127.0.0.1", store.port)]


def test_each_process_has_a_node_of_its_own(two: Processes) -> None:
    assert len({node for node, _ in two.each("where")}) == 2


def test_a_step_without_rows_leaves_the_weights_as_they_are(two: Processes) -> None:
    """The first one has a gradient, of which the optimizer keeps a mean."""
    two.begin(steps=2)
    two.train(rows())
    assert "trained_tokens" not in two.train([])
    [after_both, _] = two.each("weights")
    two.begin(steps=1)
    two.train(rows())
    [after_one, _] = two.each("weights")
    # The learning rate of the first of two steps is that of the only one.
    assert furthest(after_both, after_one) == 0


@pytest.mark.parametrize(
    ("rank", "stage", "half"),
    [
        (0, "grpo", "backward"),
        (1, "dpo", "forward"),
        pytest.param(0, "grpo", "forward", marks=pytest.mark.extended),
        pytest.param(1, "grpo", "forward", marks=pytest.mark.extended),
        pytest.param(1, "grpo", "backward", marks=pytest.mark.extended),
        pytest.param(1, "dpo", "backward", marks=pytest.mark.extended),
    ],
)
def test_a_step_for_which_one_process_lacks_memory_is_repeated_by_all(
    one: Processes, two: Processes, rank: int, stage: Stage, half: str
) -> None:
    items: Any = rows() if stage == "grpo" else PAIRS * 2
    training = {"micro_batch_tokens": 40, "dpo": {"batch_size": 6, "epochs": 1}}
    wanted, calm = one.step(stage, items, **training)
    two.begin(stage, len(items), **training)
    two.each("exhaust", rank, half, 0)
    found, logs = two.step_on(items)
    assert furthest(found, wanted) < 1e-6
    figures = undivided(calm)
    assert [logs[name] for name in figures] == pytest.approx([calm[name] for name in figures], rel=1e-5, abs=1e-6)
    budgets = two.each("budget")
    assert budgets[0] == budgets[1] < 40


def test_a_row_for_which_one_process_lacks_memory_ends_all_with_its_length(two: Processes) -> None:
    two.begin()
    parts, size = divided(rows(), 2), StepSize.of(rows())
    in_second = max(row.tokens for row in parts[1])
    two.each("exhaust", 1, "forward", -1, in_second - 1)
    for call in [member.step.remote(part, size) for member, part in zip(two.members, parts, strict=True)]:
        with pytest.raises(TrainError, match=f"cannot train on a sample of {in_second} tokens"):
            ray_cluster.wait([call])
    # A stage that was left is no hindrance to the next one.
    two.step("grpo", rows())


def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_ended(tmp_path: Path, two: Processes) -> None:
    """With dropout: the random numbers of each process go on, too. The last two checkpoints stay."""
    from tests.factories.policy import save_adapter

    adapter = policy()
    for config in adapter.peft_config.values():
        config.lora_dropout = 0.5
    save_adapter(adapter, tmp_path / "dropout")
    two.parent, known = AdapterFiles.read(tmp_path / "dropout"), two.parent
    folder = tmp_path / "checkpoints"
    try:
        training = {"steps": 5, "learning_rate": 1e-3}
        two.begin(**training)
        for step in range(1, 6):
            two.train(rows())
            if step <= 3:
                two.trainers.save(folder, step)
        whole, _ = two.each("weights")
        assert sorted(path.name for path in folder.iterdir()) == ["step-000002.zip", "step-000003.zip"]
        second = folder / "step-000002.zip"
        assert [each for each in zipfile.ZipFile(second).namelist() if each.startswith("numbers")] == [
            "numbers-0.pt",
            "numbers-1.pt",
        ]
        two.begin(checkpoint=second, **training)
        for _ in range(3):
            two.train(rows())
        for found in two.each("weights"):
            assert furthest(found, whole) == 0
    finally:
        two.parent = known


def test_the_first_process_ends_when_the_second_is_killed(tmp_path: Path, two: Processes) -> None:
    """Behind the other tests of this module, whose session it ends."""
    assert_all_end(two, tmp_path / "late", killed=1)
