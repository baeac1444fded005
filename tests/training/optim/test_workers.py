"""Two processes of a trainer (`training.workers`) on a Ray cluster of two nodes: their steps are those of one."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from flywheel.config import Config
from flywheel.errors import TrainError
from flywheel.training.data.round_directory import go_on_from
from flywheel.training.data.samples import RecordedReply, TrainingRow, divided
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.adapter_files import AdapterFiles
from flywheel.training.engine.gpu_placement import place_on_gpus
from flywheel.training.optim.ranks import open_store
from flywheel.training.optim.trainer import Trainer
from tests.factories.round import POLICY, round_spec
from tests.training.optim.test_dpo import PAIRS
from tests.training.optim.test_grpo import LONGEST, TEMPERATURE, TRAINING, OutOfMemory, gradients, policy, rows

pytestmark = [
    pytest.mark.training,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20}


@contextlib.contextmanager
def two_nodes() -> Iterator[None]:
    """A session on two nodes, which have room for one process each."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        nodes.add_node(**NODE)
        nodes.wait_for_nodes()
        with ray_cluster.session(Config.model_validate({"ray": {"address": nodes.address}})):
            yield
    finally:
        nodes.shutdown()


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    """An adapter that has an effect."""
    from flywheel.training.engine.policy import save_adapter

    directory = tmp_path_factory.mktemp("parent") / "adapter"
    save_adapter(policy(), directory)
    return AdapterFiles.read(directory)


class Observed(Trainer):
    """A process of the trainer that remembers what it did, and trains on rows without engines."""

    def load(self, parent: AdapterFiles | None) -> None:
        """The policy in float64: in float32, matrix products of other shapes differ by more than what is compared."""
        super().load(parent)
        self._model.double()

    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def _common(self, *arguments: Any) -> Any:
        from transformers import TrainerCallback

        observed = self
        self.found: list[dict[str, Any]] = []
        self.logs: list[dict[str, float]] = []

        class Observing(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                observed.found.append(gradients(observed._model))

            def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
                if "loss" in logs:
                    observed.logs.append(dict(logs))

        common = super()._common(*arguments)
        return {**common, "callbacks": [Observing(), *common["callbacks"]]}

    def reinforce(self, steps: Sequence[Sequence[TrainingRow]], adapter: Path, fails: str = "") -> None:
        """Train on the rows of each step. Rank 0 fails, or goes on no more (`late: …`), where `fails` says."""

        def fail(where: str) -> None:
            if fails == where:
                raise TrainError("learn", f"it has failed at the {where}", "")
            if fails == f"late: {where}":
                (self._directory / "late").touch()
                time.sleep(600)

        def roll_out(step: int) -> Sequence[TrainingRow]:
            fail(f"rows of step {step + 1}")
            return steps[step]

        arguments = self._settings, roll_out, lambda step, _: fail(f"report of step {step}"), LONGEST, adapter
        trainer = self._trainer(*arguments)
        if self._ranks.is_first:
            self._run(trainer, lambda: go_on_from(adapter.parent))
        else:
            self._follow(trainer)

    def exhaust(self, rank: int, half: str, at: int = -1, most: int | None = None) -> None:
        """Let passes of this rank run out of memory."""
        if self._ranks.rank == rank:
            OutOfMemory(self._model, half, at=at, most=most)

    def _run(self, trainer: Any, begin: Any) -> None:
        self.trainer = trainer
        super()._run(trainer, begin)

    def observed(self) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
        return self.found, self.logs

    def budget(self) -> int:
        return int(self.trainer._micro_batch_tokens)

    def weights(self) -> dict[str, Any]:
        return {
            name: weight.detach().clone() for name, weight in self._model.named_parameters() if weight.requires_grad
        }


def settings(workers: int, **training: Any) -> dict[str, Any]:
    made = {
        "training": {**TRAINING, "precision": "float32", "micro_batch_tokens": 30, **training, "workers": workers},
        "rollout": {"max_completion_tokens": LONGEST, "max_model_len": 64, "temperature": TEMPERATURE},
    }
    return Config.model_validate(made).model_dump(mode="json")


class Processes:
    """Those of a trainer, each on a node of its own, or the only one, which is this process."""

    def __init__(self, directory: Path, workers: int, parent: AdapterFiles) -> None:
        self.workers, self.parent, self._folders = workers, parent, count()
        self.directory = directory
        arguments = round_spec(seed=3, base_model=str(POLICY), settings=settings(workers)), str(directory), 1
        self.members: list[Any] = []
        if workers == 1:
            self.alone = Observed(*arguments)
            self.alone.start(parent)
            return
        places = ray_cluster.Places(place_on_gpus(workers, 0, trainers=0), 60)
        for rank, share in enumerate(place_on_gpus(workers, 0, trainers=0).engines):
            within = places.at(share)
            self.members.append(ray_cluster.start(Observed, *arguments, rank, gpus=0, within=within))
        meeting = ray_cluster.on_all(self.members[:1], "meet")
        ray_cluster.on_all(self.members, "start", parent, meeting)

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """What a method returns in each."""
        if self.workers == 1:
            return [getattr(self.alone, method)(*arguments)]
        return ray_cluster.wait([getattr(member, method).remote(*arguments) for member in self.members])

    def prepare(self, **training: Any) -> Path:
        """Load the policy anew. Returns where its adapter will be."""
        self.each("use_settings", settings(self.workers, **training))
        self.each("load", self.parent)
        folder = self.directory / f"stage-{next(self._folders)}"
        folder.mkdir(parents=True)
        return folder / "adapter"

    def step(self, stage: str, items: Any, **training: Any) -> tuple[dict[str, Any], dict[str, float]]:
        """The gradient and the figures of the first step, which are the same in each."""
        return self.step_on(stage, items, self.prepare(**training))

    def step_on(self, stage: str, items: Any, adapter: Path) -> tuple[dict[str, Any], dict[str, float]]:
        self.each(*{
            "grpo": ("reinforce", [items], adapter),
            "sft": ("imitate", items, items, adapter, 0),
            "dpo": ("prefer", items, adapter, 0),
        }[stage])  # fmt: skip
        (found, logs), *others = self.each("observed")
        for their_gradients, their_logs in others:
            assert furthest(found[0], their_gradients[0]) == 0
            assert [their_logs[0][name] for name in ("loss", "grad_norm")] == [
                logs[0][name] for name in ("loss", "grad_norm")
            ]
        weights, *other_weights = self.each("weights")
        assert all(furthest(weights, each) == 0 for each in other_weights)
        return found[0], logs[0]


def furthest(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest distance of a gradient, relative to the largest value of all."""
    assert found.keys() == wanted.keys()
    scale = max(float(value.abs().max()) for value in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / scale


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, parent: AdapterFiles) -> Processes:
    return Processes(tmp_path_factory.mktemp("one"), 1, parent)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, parent: AdapterFiles) -> Iterator[Processes]:
    with two_nodes():
        yield Processes(tmp_path_factory.mktemp("two"), 2, parent)


REPLIES = [
    RecordedReply(f"t-{number}", tuple(replace(row.sample, logprobs=()) for row in rows() if row.rollout == number))
    for number in (0, 1, 2, 3)
]
ONE_ROLLOUT = [row for row in rows() if row.rollout == 3]


@pytest.mark.parametrize(
    ("stage", "items", "training"),
    [
        *(("grpo", rows(), {"loss_type": loss_type}) for loss_type in ("dapo", "grpo", "dr_grpo")),
        ("grpo", rows(), {"importance": "engine", "beta": 0.1}),
        ("grpo", ONE_ROLLOUT, {}),
        ("sft", REPLIES, {"sft": {"batch_size": 4, "epochs": 1}}),
        ("sft", REPLIES[2:3], {"sft": {"batch_size": 4, "epochs": 1}}),
        ("dpo", PAIRS, {"dpo": {"batch_size": 3, "epochs": 1}}),
        ("dpo", PAIRS[1:2], {"dpo": {"batch_size": 3, "epochs": 1}}),
    ],
    ids=["dapo", "grpo", "dr_grpo", "kl", "one rollout", "sft", "one reply", "dpo", "one pair"],
)
def test_two_processes_have_the_loss_and_the_gradient_of_one(
    one: Processes, two: Processes, stage: str, items: Any, training: dict[str, Any]
) -> None:
    """Rollouts have different lengths. A single rollout, reply or pair leaves the second process without one."""
    wanted, of_one = one.step(stage, items, **training)
    found, of_two = two.step(stage, items, **training)
    assert furthest(found, wanted) < 1e-6
    assert of_two["loss"] == pytest.approx(of_one["loss"], rel=1e-6, abs=1e-7)
    assert of_two["grad_norm"] == pytest.approx(of_one["grad_norm"], rel=1e-6)
    figures = [name for name in of_one if name.startswith(("rows/", "rewards/")) and "micro_batches" not in name]
    assert len(figures) >= 4
    assert [of_two[name] for name in figures] == pytest.approx([of_one[name] for name in figures], rel=1e-5, abs=1e-6)


def test_the_first_process_alone_measures_losses(one: Processes, two: Processes) -> None:
    adapter = two.prepare()
    one.prepare()
    found = ray_cluster.on_all(two.members[:1], "losses", REPLIES, adapter)
    assert found == pytest.approx(one.alone.losses(REPLIES, adapter), rel=1e-6)
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
    adapter = two.prepare(steps=2)
    two.each("reinforce", [rows(), []], adapter)
    [after_both, _] = two.each("weights")
    adapter = two.prepare(steps=1)
    two.each("reinforce", [rows()], adapter)
    [after_one, _] = two.each("weights")
    # The learning rate of the first of two steps is that of the only one.
    assert furthest(after_both, after_one) == 0


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize(("rank", "stage"), [(0, "grpo"), (1, "grpo"), (1, "dpo")])
def test_a_step_for_which_one_process_lacks_memory_is_repeated_by_all(
    one: Processes, two: Processes, rank: int, stage: str, half: str
) -> None:
    items: Any = rows() if stage == "grpo" else PAIRS * 2
    training = {"micro_batch_tokens": 40, "dpo": {"batch_size": 6, "epochs": 1}}
    wanted, calm = one.step(stage, items, **training)
    adapter = two.prepare(**training)
    two.each("exhaust", rank, half, 0)
    found, logs = two.step_on(stage, items, adapter)
    assert furthest(found, wanted) < 1e-6
    figures = ["loss", "grad_norm", *(name for name in calm if name.startswith(("rows/", "rewards/")))]
    figures.remove("rows/micro_batches") if stage == "grpo" else None
    assert [logs[name] for name in figures] == pytest.approx([calm[name] for name in figures], rel=1e-5, abs=1e-6)
    budgets = two.each("budget")
    assert budgets[0] == budgets[1] < 40


def test_a_row_for_which_one_process_lacks_memory_ends_all_with_its_length(two: Processes) -> None:
    adapter = two.prepare()
    in_second = max(row.tokens for row in divided(rows(), 2)[1])
    two.each("exhaust", 1, "forward", -1, in_second - 1)
    for why in ended(two, "reinforce", [rows()], adapter):
        assert isinstance(why, TrainError)
        assert f"cannot train on a sample of {in_second} tokens" in str(why)


def ended(processes: Processes, method: str, *arguments: Any) -> list[Any]:
    """What each call returned or raised."""
    found: list[Any] = []
    for reference in [getattr(member, method).remote(*arguments) for member in processes.members]:
        try:
            found += ray_cluster.wait([reference])
        except TrainError as error:
            found.append(error)
    return found


@pytest.mark.parametrize("where", ["rows of step 1", "rows of step 2", "report of step 1", "report of step 2"])
def test_the_others_end_where_the_first_process_goes_no_further(two: Processes, where: str) -> None:
    """And can go on with what follows, such as the next stage. The checkpoint of a step that was not reported is not
    written."""
    adapter = two.prepare(steps=2, save_steps=1)
    first, second = ended(two, "reinforce", [rows(), rows()], adapter, where)
    assert isinstance(first, TrainError)
    assert f"it has failed at the {where}" in first.why
    assert second is None
    saved = {path.name for path in (adapter.parent / "checkpoints").glob("*")}
    assert saved == ({"checkpoint-1"} if where.endswith("step 2") else set())
    two.step("grpo", rows())


def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_ended(tmp_path: Path, two: Processes) -> None:
    """With dropout: the random numbers of each process go on, too."""
    from flywheel.training.engine.policy import save_adapter

    adapter = policy()
    for config in adapter.peft_config.values():
        config.lora_dropout = 0.5
    save_adapter(adapter, tmp_path / "dropout")
    two.parent, known = AdapterFiles.read(tmp_path / "dropout"), two.parent
    try:
        steps, training = [rows()] * 5, {"steps": 5, "save_steps": 2, "learning_rate": 1e-3}
        two.each("reinforce", steps, two.prepare(**training))
        whole, _ = two.each("weights")
        folder = two.prepare(**training)
        ended(two, "reinforce", steps, folder, "rows of step 4")
        assert {path.name for path in (folder.parent / "checkpoints").glob("*")} == {"checkpoint-2"}
        assert sorted(path.name for path in (folder.parent / "checkpoints").glob("*/rng*")) == [
            "rng_state_0.pth",
            "rng_state_1.pth",
        ]
        two.prepare(**training)
        two.each("reinforce", steps, folder)
        for found in two.each("weights"):
            assert furthest(found, whole) == 0
    finally:
        two.parent = known
