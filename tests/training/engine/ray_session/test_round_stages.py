"""The order of a round's stages, with an engine on a real Ray session and a trainer that can be told what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import ray

from flywheel.config.file import Config
from flywheel.config.training import TrainingSettings
from flywheel.records.round import RoundTask, SamplePool
from flywheel.records.selection import Candidate, SelectionRules
from flywheel.records.verdict import Exchange, Verdict
from flywheel.serving.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from flywheel.training.data import rollout_file
from flywheel.training.data.loss_selection import read_selection
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest
from flywheel.training.data.round_progress import read_steps
from flywheel.training.data.samples import RecordedReply, Sample
from flywheel.training.data.stages import Training, ended_stages
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.optim.collector import Collector
from flywheel.training.worker import loop
from flywheel.training.worker.loop import Epochs, Loop, Reinforcement
from flywheel.training.worker.round import Round
from flywheel.training.worker.stage import StageWork
from tests.factories.round import round_spec
from tests.factories.task import round_task
from tests.training.data.rollouts import reply, verdict

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LIMIT = 1024
"""Of a sample, in tokens."""


class Engine:
    """Answers with the request's seed, and makes a sample of each reply that is not empty, with a token for each
    number. Of one with reasoning, this is not trained."""

    def __init__(self) -> None:
        self._loaded, self._unloaded = list[int](), list[int]()

    async def load(self, adapter: LoadedAdapter, files: AdapterFiles) -> None:
        self._loaded.append(adapter.number)

    async def unload(self, adapter: LoadedAdapter) -> None:
        self._unloaded.append(adapter.number)

    async def numbers(self) -> tuple[list[int], list[int]]:
        """Of the adapters that were loaded, and of those that were unloaded."""
        return self._loaded, self._unloaded

    async def generate(self, wanted: RolloutRequest) -> Completion:
        return reply(wanted.prompt, (wanted.seed % 100, 2), (-0.1, -0.2), str(wanted.seed % 100))

    async def recorded_replies(
        self, tasks: Sequence[RoundTask], *, empty_reasoning: bool
    ) -> tuple[list[RecordedReply], dict[str, str]]:
        good = [task for task in tasks if task.reply[-1]["content"]]
        refused = {task.task_id: "its text is empty" for task in tasks if task not in good}
        texts = [tuple(map(int, task.reply[-1]["content"].split())) for task in good]
        made = [Sample((1, *text), (False, *map(bool, text))) for text in texts]
        without = [("its reasoning",) if task.reply[-1].get("reasoning_content") else () for task in good]
        return [
            RecordedReply(task.task_id, (one,), left) for task, one, left in zip(good, made, without, strict=True)
        ], refused


class Trainer:
    """Takes the place of the trainer. Stages that are `idle` change no weight. The loss of a reply is its place."""

    def __init__(self, idle: Sequence[str]) -> None:
        self._idle = idle
        self.calls: list[Any] = []

    def begin(self, stage: str, settings: Any, steps: int, longest: int, parent: AdapterFiles | None) -> None:
        self._stage, self._has_stepped = stage, False
        self._weights = parent.contents[WEIGHTS_FILE] if parent is not None else weights(0)

    def step(self, items: Any) -> dict[str, float]:
        self._has_stepped = True
        return {"loss": 0.1, "grad_norm": 0.1}

    def nll(self, rows: Sequence[Any]) -> list[float]:
        if not self._has_stepped:
            self.calls.append(("losses", len(rows)))
        return list(map(float, range(len(rows))))

    def write_adapter(self, folder: Path) -> None:
        self.adapter().write(folder)

    def adapter(self) -> AdapterFiles:
        own = self._weights if self._stage in self._idle else weights(sum(self._stage.encode() + self._weights))
        contents = {CONFIG_FILE: self._stage.encode(), WEIGHTS_FILE: own}
        return AdapterFiles(contents, {name: sha256(data).hexdigest() for name, data in contents.items()})

    def save(self, folder: Path, step: int) -> None:
        """Nothing is gone on with."""

    def check(self) -> None:
        """It never dies."""

    def end(self) -> None:
        """There is no process."""


def loops(trainer: Trainer, refused: Sequence[str], early: str) -> tuple[type, type]:
    """GRPO that ends as it is told to, and SFT and DPO, which note what they are made for."""

    def note(work: StageWork, *call: Any) -> None:
        if trainer.calls:
            trainer.calls.append(("load", work.parent and bytes(work.parent.contents[CONFIG_FILE]).decode()))
        trainer.calls.append(call)

    class Reinforced(Reinforcement):
        def __init__(self, work: StageWork, prompts: Any, collector: Collector) -> None:
            super().__init__(work, prompts, collector)
            note(work, "grpo", len(prompts), self.before)

        def run(self) -> None:
            Loop.begin(self)
            self.trained, (steps, *rewards) = (1, (1, 0.0, 0.0)) if "grpo" in refused else (2, (5, 0.1, 0.4))
            self.work.training.rolled_out(self.work.settings.training, steps, *rewards)
            self.refusal, self.ended = ("nothing can be learned", "") if "grpo" in refused else ("", early)
            if not self.refusal:
                self.keep_adapter()

    class Noted(Epochs):
        def __init__(self, stage: Any, work: StageWork, items: Any, held_out: Any = ()) -> None:
            super().__init__(stage, work, items, held_out)
            pairs = [(each.chosen_score, each.rejected_score) for each in items if stage == "dpo"]
            note(work, stage, *((pairs,) if stage == "dpo" else (len(items), len(held_out))), self.before)

    return Reinforced, Noted


def weights(value: float) -> bytes:
    """The file of an adapter whose B has this value."""
    import numpy as np
    from safetensors.numpy import save

    shape = "base_model.model.layer.lora_{}.weight".format
    return save({shape("A"): np.ones((1, 2), np.float32), shape("B"): np.full((2, 1), value, np.float32)})


@pytest.fixture(scope="module")
def engine(shared_engine: Any) -> Iterator[Any]:
    shared_engine.end()
    made = ray_cluster.start(Engine, gpus=0)
    yield made
    ray.kill(made)


def tasks(count: int = 8, answer: str = "7") -> list[RoundTask]:
    text = ({"role": "assistant", "content": answer},)
    return [round_task(f"t-{number}", conversation=f"c-{number}", reply=text) for number in range(count)]


def run(
    engine: Any,
    directory: Path,
    training: dict[str, Any],
    *,
    some: Sequence[RoundTask] = (),
    refused: Sequence[str] = (),
    idle: Sequence[str] = (),
    ended: str = "",
    spread: bool = True,
    pool: SamplePool | None = None,
) -> tuple[Training, list[Any]]:
    """The stages on these tasks, and what the trainer was called for. With `spread`, rewards differ."""
    trainer = Trainer(idle)
    whole, prompts = round_of(engine, directory, training, trainer, some=some, spread=spread, pool=pool)
    with pytest.MonkeyPatch.context() as patch:
        for name, made in zip(("Reinforcement", "Epochs"), loops(trainer, refused, ended), strict=True):
            patch.setattr(loop, name, made)
        patch.setattr(whole.adapters, "load_saved", lambda _: None)
        whole._train(prompts, prompts[:2])
    return whole.training, trainer.calls


def round_of(
    engine: Any,
    directory: Path,
    training: dict[str, Any],
    trainer: Any,
    *,
    some: Sequence[RoundTask] = (),
    spread: bool = True,
    pool: SamplePool | None = None,
) -> tuple[Round, list[Prompt]]:
    """A round that has been started, and its prompts."""
    training = {"steps": 2, "prompts_per_step": 2, "group_size": 4, **training}
    settings = Config.model_validate({"training": training, "rollout": {"max_model_len": LIMIT}})
    spec = round_spec(train=list(some or tasks()), settings=settings.model_dump(mode="json"), pool=pool)
    prompts = [Prompt(task, (5, number), max_tokens=8) for number, task in enumerate(spec.train)]

    def grade(shown: Exchange) -> Verdict:
        return verdict(int(shown.answer) / 100 if spread else 0.0)

    whole = Round(spec, directory, settings, lambda *_: grade)
    whole.engines[:], whole.trainers = [engine], trainer
    return whole, prompts


def ends(training: Training) -> list[tuple[str, str]]:
    return [(stage.stage, stage.outcome) for stage in training.stages]


def test_a_further_worker_finds_the_stages_that_have_ended_with_all_that_they_ended_with(
    engine: Any, tmp_path: Path
) -> None:
    made, _ = run(engine, tmp_path, {"stages": ["sft", "dpo", "grpo"]}, refused=["grpo"])
    again, calls = run(engine, tmp_path, {"stages": ["sft", "dpo", "grpo"]})
    assert (again, calls) == (made, [])
    (tmp_path / "stages" / "3-grpo" / "trained.json").unlink()
    (tmp_path / "stages" / "2-dpo" / "trained.json").unlink()
    shutil.rmtree(tmp_path / "stages" / "2-dpo" / "adapter")
    third, calls = run(engine, tmp_path, {"stages": ["sft", "dpo", "grpo"]})
    assert [call[0] for call in calls] == ["dpo", "load", "grpo"]
    assert ends(third) == [("sft", "trained"), ("dpo", "trained"), ("grpo", "trained")]
    (tmp_path / "stages" / "1-sft" / "adapter" / "adapter_config.json").write_text("changed")
    planned = TrainingSettings(stages=["sft", "dpo", "grpo"]).planned
    assert ended_stages(None, planned, tmp_path).stages == []


def test_a_stage_may_occur_twice_and_the_second_is_gone_on_with_after_a_death_behind_the_first(
    engine: Any, tmp_path: Path
) -> None:
    stages = [{"sft": {"samples": 2, "epochs": 1}}, "sft", "grpo"]
    made, calls = run(engine, tmp_path, {"stages": stages, "sft": {"batch_size": 1}})
    # 3 replies in 3 epochs follow the 2 of the first stage in 1.
    assert [call for call in calls if call[0] != "load"] == [("sft", 2, 2, 0), ("sft", 3, 2, 2), ("grpo", 3, 11)]
    assert ends(made) == [("sft 1", "trained"), ("sft 2", "trained"), ("grpo", "trained")]
    assert [stage.tasks for stage in made.stages] == [2, 3, 3]
    assert [line["stage"] for line in read_steps(tmp_path)] == ["sft 1"] * 2 + ["sft 2"] * 9
    folders = [tmp_path / "stages" / name for name in ("1-sft", "2-sft", "3-grpo")]
    names = [json.loads((folder / "trained.json").read_text())["adapter"]["name"] for folder in folders]
    assert names == ["r0001-sft-1", "r0001-sft-2", "r0001-grpo"]
    for folder in folders[1:]:
        shutil.rmtree(folder)
    again, calls = run(engine, tmp_path, {"stages": stages, "sft": {"batch_size": 1}})
    assert [call for call in calls if call[0] != "load"] == [("sft", 3, 2, 2), ("grpo", 3, 11)]
    assert (ends(again), again.steps) == (ends(made), made.steps)


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_engine_never_gets_the_number_of_an_adapter_twice(tmp_path: Path, overlap: int) -> None:
    """In a round with the same stage twice, whose other adapters are there before and after them."""
    engine, trainer = ray_cluster.start(Engine, gpus=0), Trainer(())
    stages = [{"grpo": {"steps": 3, "group_size": 5}}, "grpo"]
    whole, prompts = round_of(engine, tmp_path, {"stages": stages, "overlap": overlap}, trainer)
    trainer.begin("parent", None, 1, 1, None)
    first = whole.adapters.load("parent", trainer.adapter())
    whole._train(prompts, prompts[:2])
    last = whole.adapters.load("candidate", trainer.adapter())
    loaded, unloaded = ray.get(engine.numbers.remote())
    ray.kill(engine)
    assert (loaded[0], loaded[-1]) == (first.number, last.number)
    assert len(set(loaded)) == len(loaded) == 2 + (3 - overlap) + (2 - overlap)
    assert sorted(unloaded) == sorted(loaded[1:-1])
    assert ends(whole.training) == [("grpo 1", "trained"), ("grpo 2", "trained")]
    steps = [(line["step"], line["stage"], line["rollouts"]) for line in read_steps(tmp_path)]
    assert steps == [
        *((step, "grpo 1", 2 * 5) for step in (1, 2, 3)),
        *((step, "grpo 2", 2 * 4) for step in (4, 5)),
    ]
    assert (whole.training.steps, whole.training.rollout_steps, whole.training.group_size) == (5, 5, 4)


def test_without_a_signal_after_sft_its_adapter_goes_to_the_gate(engine: Any, tmp_path: Path) -> None:
    made, _ = run(engine, tmp_path, {"stages": ["sft", "grpo"]}, refused=["grpo"])
    assert ends(made) == [("sft", "trained"), ("grpo", "skipped")]
    assert (made.refusal, made.stages[1].reason) == ("", "nothing can be learned")
    assert made.adapter is not None
    assert made.adapter.name == "r0001-sft"


def test_a_stage_that_ended_early_has_trained_and_says_why(engine: Any, tmp_path: Path) -> None:
    made, _ = run(engine, tmp_path, {}, ended="three steps had nothing to train")
    [stage] = made.stages
    assert (stage.outcome, stage.reason, stage.steps) == ("trained", "three steps had nothing to train", 2)
    assert (made.refusal, made.reason, made.steps) == ("", stage.reason, 5), "all rollouts have their numbers"
    both, _ = run(engine, tmp_path / "both", {"stages": ["sft", "grpo"]}, refused=["grpo"])
    assert both.reason == "", "a stage that was skipped is no end of the training"


def test_a_round_whose_only_stage_has_no_signal_is_refused(engine: Any, tmp_path: Path) -> None:
    made, _ = run(engine, tmp_path, {}, refused=["grpo"])
    assert (made.refusal, made.adapter) == (made.reason, None) == ("nothing can be learned", None)


def test_sft_trains_on_what_it_chose_by_loss_and_a_further_worker_does_so_too(engine: Any, tmp_path: Path) -> None:
    candidates = {task.task_id: Candidate(number) for number, task in enumerate(tasks())}
    pool = SamplePool(size=3, strategy="loss_topk", candidates=candidates, rules=SelectionRules(12, 1))
    some = [task.model_copy(update={"exchange": replace(task.exchange, query=task.task_id)}) for task in tasks()]
    made, calls = run(engine, tmp_path, {"stages": ["sft"]}, some=some, pool=pool)
    assert calls == [("losses", 8), ("load", None), ("sft", 3, 2, 0)]
    assert ends(made) == [("sft", "trained")]
    outcomes = {line["task_id"]: line["outcome"] for line in read_selection(tmp_path)}
    assert outcomes == {
        "t-7": "set aside", **dict.fromkeys(("t-6", "t-5", "t-4"), "chosen by loss"),
        **dict.fromkeys(("t-3", "t-2", "t-1", "t-0"), "released"),
    }  # fmt: skip
    shutil.rmtree(tmp_path / "stages")
    _, calls = run(engine, tmp_path, {"stages": ["sft"]}, some=some, pool=pool)
    assert calls == [("sft", 3, 2, 0)], "the losses are measured once"


def test_replies_that_cannot_be_trained_on_refuse_a_round_of_sft(engine: Any, tmp_path: Path) -> None:
    made, calls = run(engine, tmp_path, {"stages": ["sft"]}, some=tasks(3, answer=""))
    assert made.refusal == "none of 3 tasks has a reply to train on: its text is empty"
    assert calls == []


@pytest.mark.parametrize("stages", [["sft"], ["dpo"], ["sft", "grpo"]])
def test_a_sample_that_is_longer_than_the_limit_is_trained_on_by_no_stage(
    engine: Any, tmp_path: Path, stages: list[str]
) -> None:
    reply, long, longest = (
        ({"role": "assistant", "content": " ".join(["7"] * tokens)},) for tokens in (1, LIMIT, LIMIT - 1)
    )
    worse = ({"role": "assistant", "content": "9"},)
    some = [task.model_copy(update={"rejected": worse, "is_of_teacher": True}) for task in tasks(5)]
    for number, text in enumerate((long, reply, longest, long, reply)):
        some[number] = some[number].model_copy(update={"reply": text})
    some[4] = some[4].model_copy(update={"rejected": long})
    some += [
        task.model_copy(update={"task_id": f"p-{n}", "reply": (), "conversation": f"p-{n}"})
        for n, task in enumerate(tasks(2))
    ]
    some = some[: 5 if stages == ["dpo"] else 7]
    made, calls = run(engine, tmp_path, {"stages": stages}, some=some)
    why = "it has 1,025 tokens, and rollout.max_model_len is 1,024"
    if stages == ["dpo"]:
        assert calls == [("dpo", [(None, None)] * 2, 0)]
        assert made.left_out == {"t-0": why, "t-3": why, "t-4": f"its rejected reply: {why}"}
        return
    assert calls[0] == ("sft", 3, 1, 0)
    assert made.unmeasured == {"t-0": why}
    without = {} if "grpo" in stages else dict.fromkeys(("p-0", "p-1"), "it has no reply to train on")
    assert made.left_out == {"t-0": why, "t-3": why, **without}


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_a_round_whose_samples_are_all_too_long_is_refused_with_the_lengths(
    engine: Any, tmp_path: Path, stage: str
) -> None:
    worse = ({"role": "assistant", "content": "9"},)
    some = [task.model_copy(update={"rejected": worse}) for task in tasks(3, " ".join(["7"] * 1877))]
    made, calls = run(engine, tmp_path, {"stages": [stage]}, some=some)
    assert calls == []
    assert made.refusal.endswith(": it has 1,878 tokens, and rollout.max_model_len is 1,024")
    assert made.left_out.keys() == {"t-0", "t-1", "t-2"}


@pytest.mark.parametrize("stage", ["sft", "dpo", "grpo"])
def test_a_round_that_changed_no_weight_is_refused(engine: Any, tmp_path: Path, stage: str) -> None:
    made, _ = run(engine, tmp_path, {"stages": [stage]}, idle=[stage])
    assert (made.adapter, ends(made)) == (None, [(stage, "skipped")])
    assert "no step changed a weight: the learning rate is too small" in made.refusal


def test_a_stage_that_changed_no_weight_is_skipped_and_the_next_starts_where_it_did(
    engine: Any, tmp_path: Path
) -> None:
    made, calls = run(engine, tmp_path, {"stages": ["sft", "dpo", "grpo"]}, idle=["dpo"])
    assert ends(made) == [("sft", "trained"), ("dpo", "skipped"), ("grpo", "trained")]
    assert [call for call in calls if call[0] == "load"] == [("load", "sft")] * 2
    made, _ = run(engine, tmp_path / "2", {"stages": ["sft", "grpo"]}, idle=["sft"])
    assert ends(made) == [("sft", "skipped"), ("grpo", "trained")]


def test_what_of_a_reply_is_not_trained_is_kept_by_task(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    some = tasks(3)
    thought = ({"role": "assistant", "content": "7", "reasoning_content": "Seven."},)
    some[1:] = [task.model_copy(update={"reply": thought}) for task in some[1:]]
    made, calls = run(engine, tmp_path, {"stages": ["sft"]}, some=some)
    assert calls == [("sft", 3, 2, 0)]
    assert (made.partly, made.left_out) == ({"t-1": "its reasoning", "t-2": "its reasoning"}, {})
    assert "SFT does not train on all of 2 replies: its reasoning" in caplog.text


def test_dpo_pairs_the_best_with_the_worst_rollout_of_each_prompt(engine: Any, tmp_path: Path) -> None:
    made, calls = run(engine, tmp_path, {"stages": ["sft", "dpo"]})
    assert [call[0] for call in calls] == ["sft", "load", "dpo"]
    [(_, scores, before)] = calls[2:]
    # 4 prompts in 2 steps of rollouts come before the updates.
    assert (len(scores), before) == (4, 5)
    assert all(better - worse >= 0.1 for better, worse in scores)
    assert ends(made) == [("sft", "trained"), ("dpo", "trained")]
    assert (made.steps, made.rollout_steps, made.reward_last) == (6, 2, None)
    lines = [json.loads(line) for line in (tmp_path / "stages" / "2-dpo" / "pairs.jsonl").read_text().splitlines()]
    assert [(line["chosen_score"], line["rejected_score"]) for line in lines] == scores
    for line in lines:
        assert int(line["chosen"][-1]["content"]) / 100 == line["chosen_score"]
    assert {line["step"] for line in rollout_file.rollouts(tmp_path)} == {4, 5}


def test_dpo_takes_recorded_pairs_without_asking_the_policy(engine: Any, tmp_path: Path) -> None:
    worse = ({"role": "assistant", "content": "9"},)
    some = [task.model_copy(update={"rejected": worse}) for task in tasks(3)]
    made, calls = run(engine, tmp_path, {"stages": ["dpo"]}, some=some)
    assert calls == [("dpo", [(None, None)] * 3, 0)]
    assert (made.steps, made.rollout_steps, made.reward_first) == (1, 0, None)
    assert made.with_gradient == {"t-0", "t-1", "t-2"}
    assert not rollout_file.rollout_files(tmp_path)


@pytest.mark.parametrize("stages", [["dpo"], ["sft", "dpo"]])
def test_without_a_pair_dpo_is_skipped_or_the_round_refused(engine: Any, tmp_path: Path, stages: list[str]) -> None:
    made, calls = run(engine, tmp_path, {"stages": stages}, spread=False)
    assert "dpo" not in [call[0] for call in calls]
    assert made.stages[-1].outcome == "skipped"
    count = 4 if "sft" in stages else 8
    reason = f"none of {count} tasks has a better and a worse reply: the scores of the better"
    assert made.stages[-1].reason.startswith(reason)
    assert len(made.left_out) == count
    assert bool(made.refusal) == (stages == ["dpo"])
