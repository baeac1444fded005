"""The small model in bfloat16: engine and trainer agree, SFT changes its answers, and the server proves the result.

What a round promises of a real model and the demo's policy cannot show: its weights are random, and float32. Where
the processor has no instructions for bfloat16, vLLM would take minutes for a sentence, so all of it is in float32
there, and the limits hold with room to spare.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import ray

from demo import small_model
from flywheel.config.file import Config
from flywheel.errors import ServeError
from flywheel.records.round import METRICS_FILE, AdapterRef, Probe
from flywheel.records.states import DeploymentState
from flywheel.serving.client.adapter_swap import SwapReport, swap
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.server.vllm_command import base_name
from flywheel.serving.server_keys import admin_key
from flywheel.system.files import tree_sha256
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest
from flywheel.training.data.samples import Sample, StepSize, TrainingRow
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import Engine, EngineSettings
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.worker.loop import Epochs
from flywheel.training.worker.stage import StageWork, stage_settings
from tests.conftest import serve_config, start_server, stop_server
from tests.factories.engine import share_of_an_engine
from tests.factories.round import round_spec
from tests.factories.stage_loop import TrainersHere, work
from tests.factories.task import round_task

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.extended, pytest.mark.filterwarnings("ignore")]

GREEDY_LIMIT: Final = 0.04
SAMPLED_LIMIT: Final = 0.07
"""Of the mean absolute difference of log-probabilities, in nats: at temperature 0 and at 1."""
OWN_LIMIT: Final = 0.02
"""The same for an adapter's answers in the form that it has learned, of whose tokens it is sure."""
BIAS_LIMIT: Final = 0.02
"""Of the mean difference, whose sign is kept."""
LEAST_OF_WRONG: Final = 0.1
"""The smallest mean absolute difference by which wrong weights or a wrong prompt show."""

CONTEXT: Final = 512
TOKENS: Final = 24
RANK: Final = 16
SPREAD: Final = 0.05
"""The standard deviation of the random adapter's `lora_B`: it moves a log-probability by some tenths of a nat."""
STEPS: Final = 30

ASKED: Final = (
    "What is the capital of France?",
    "Name three colours.",
    "What is 3 plus 4?",
    "Write a sentence about the sea.",
    "Who wrote Hamlet?",
    "Why is the sky blue?",
    "Give me a word that rhymes with cat.",
    "What do bees make?",
    "Ivan, 33, lives in Sofia.",
    "Jane is 24 and comes from Leeds.",
    "Kofi of Accra is 70.",
    "In Lima there is a nurse of 29 called Luz.",
    "Translate 'good morning' into German.",
    "List two fruits.",
    "What is water made of?",
    "How many days has a week?",
)
PEOPLE: Final = (
    ("Anna is 31 years old and lives in Oslo.", {"name": "Anna", "age": 31, "city": "Oslo"}),
    ("Bruno, 45, moved to Lisbon.", {"name": "Bruno", "age": 45, "city": "Lisbon"}),
    ("In Rome there lives Chiara, who is 27.", {"name": "Chiara", "age": 27, "city": "Rome"}),
    ("David from Berlin is 52.", {"name": "David", "age": 52, "city": "Berlin"}),
    ("Elif is 38 and works in Ankara.", {"name": "Elif", "age": 38, "city": "Ankara"}),
    ("A man called Farid, aged 60, lives in Cairo.", {"name": "Farid", "age": 60, "city": "Cairo"}),
    ("Grace, who is 19, studies in Dublin.", {"name": "Grace", "age": 19, "city": "Dublin"}),
    ("Hiro is a cook of 41 in Osaka.", {"name": "Hiro", "age": 41, "city": "Osaka"}),
)
"""What the model learns: a person as JSON. The last two are held out."""
WEIGHTS: Final = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Gap:
    """How far the trainer's log-probabilities are from the engine's, in nats per token."""

    tokens: int
    mean_absolute: float
    mean: float

    def is_within(self, limit: float) -> bool:
        return self.mean_absolute <= limit and abs(self.mean) <= BIAS_LIMIT


@dataclass(frozen=True, slots=True)
class Tuned:
    """The trainer after the SFT, its adapter in a folder and in the engine, and the lines of the stage's metrics."""

    trainer: Any
    path: Path
    adapter: LoadedAdapter
    lines: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Served:
    """A server of the small model and its client."""

    config: Config
    replica: Replica

    async def answer(self) -> tuple[str, str]:
        """The model that answers a question, and its text."""
        request = {
            "model": self.config.model.alias,
            "messages": [{"role": "user", "content": "Jane is 24 and comes from Leeds."}],
            "max_tokens": 40,
            "temperature": 0,
        }
        async with httpx2.AsyncClient(timeout=300) as client:
            response = await client.post(f"{self.config.serving.urls[0]}/v1/chat/completions", json=request)
        assert response.status_code == 200, response.text
        body = response.json()
        return str(body["model"]), str(body["choices"][0]["message"]["content"])

    async def deploy(self, version: str, path: Path, probe: Probe) -> SwapReport:
        async def ignore(_: DeploymentState, __: SwapReport | None = None) -> None: ...

        adapter = AdapterRef(name=version, path=str(path), sha256=tree_sha256(path))
        return await swap([self.replica], self.config.model.alias, adapter, probe, ignore)


@pytest.fixture(scope="module")
def model(small_model_path: Path) -> Path:
    """The small model in the numbers in which this machine computes quickly."""
    return small_model.for_this_machine()


@pytest.fixture(scope="module")
def engine(model: Path, shared_engine: Any) -> Iterator[Any]:
    shared_engine.end()
    settings = EngineSettings(
        model=str(model),
        max_model_len=CONTEXT,
        max_lora_rank=RANK,
        seed=1,
        gpu_memory_utilization=0.3,
        kv_cache_gib=1,
        cpu_threads=ray_cluster.cpu_threads(),
        server=("--max-model-len", str(CONTEXT)),
    )
    actor = ray_cluster.start(Engine, settings, gpus=share_of_an_engine())
    ray_cluster.wait([actor.start.remote()])
    yield actor
    ray_cluster.stop([actor])
    ray.kill(actor)


@pytest.fixture(scope="module")
def prompts(engine: Any) -> list[Prompt]:
    return encoded(engine, ASKED)


@pytest.fixture(scope="module")
def people(engine: Any) -> list[Prompt]:
    """Prompts of the kind that the SFT is about."""
    return encoded(engine, [*(text for text, _ in PEOPLE), *ASKED[8:12]])


@pytest.fixture(scope="module")
def untuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer whose adapter has random weights that are not zero."""
    import torch

    of_stage = stage_of(model, tmp_path_factory.mktemp("untuned"))
    settings = stage_settings(of_stage.settings, "sft", 2)
    trainer = of_stage.trainers
    trainer.begin("sft", settings, settings.training.steps, TOKENS, None)
    made = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in lora_b(trainer):
            weight.copy_(torch.randn(weight.shape, generator=made) * SPREAD)
    return trainer


@pytest.fixture(scope="module")
def random_adapter(engine: Any, untuned: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedAdapter:
    return loaded(engine, untuned, "random", 1, tmp_path_factory.mktemp("random") / "adapter")


@pytest.fixture(scope="module")
def tuned(engine: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """The model after the SFT stage on replies as JSON."""
    directory = tmp_path_factory.mktemp("sft")
    of_stage = stage_of(model, directory)
    tasks = [
        round_task(
            f"s-{place}",
            text,
            prompt=[{"role": "user", "content": text}],
            reply=[{"role": "assistant", "content": json.dumps(person)}],
        )
        for place, (text, person) in enumerate(PEOPLE)
    ]
    [(replies, refused)] = ray_cluster.wait([engine.recorded_replies.remote(tasks, empty_reasoning=False)])
    assert (len(replies), refused) == (len(PEOPLE), {})
    Epochs("sft", of_stage, replies[:-2], replies[-2:]).run()
    path = of_stage.adapter
    lines = [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]
    return Tuned(of_stage.trainers, path, ray_cluster.load([engine], "tuned", 2, AdapterFiles.read(path)), lines)


@pytest.fixture
async def served(model: Path, tmp_path: Path, free_port: int) -> AsyncIterator[Served]:
    """A server as `flywheel serve` starts it."""
    dtype = json.loads((model / "config.json").read_text())["dtype"]
    config = serve_config(
        tmp_path / "state",
        free_port,
        base=model,
        rank=RANK,
        max_loras=2,
        max_model_len=CONTEXT,
        extra_args=["--dtype", dtype, "--enforce-eager"],
    )
    process = start_server(config, tmp_path / "vllm.log")
    try:
        url = config.serving.urls[0]
        async with Replica(url, admin_key(config, url, "ask the tests' server"), timeout_seconds=300) as replica:
            yield Served(config, replica)
    finally:
        stop_server(process)


def stage_of(model: Path, directory: Path) -> StageWork:
    """A stage of SFT whose trainer is in this process."""
    batch = 2
    settings = Config.model_validate(
        {
            "training": {
                "stages": ["sft"],
                "lora": {"r": RANK, "alpha": 2 * RANK},
                "micro_batch_tokens": 2048,
                "sft": {
                    "batch_size": batch,
                    "epochs": STEPS * batch // (len(PEOPLE) - 2),
                    "learning_rate": 2e-4,
                    "scheduler": "constant",
                },
            },
            "rollout": {"temperature": 1.0, "max_model_len": 256},
        }
    )
    spec = round_spec(seed=3, base_model=str(model), settings=settings.model_dump(mode="json"))
    return work(spec, settings, directory, TrainersHere(spec), "sft")


def encoded(engine: Any, texts: Sequence[str]) -> list[Prompt]:
    tasks = [
        round_task(f"t-{place}", text, prompt=[{"role": "user", "content": text}]) for place, text in enumerate(texts)
    ]
    [(made, refused)] = ray_cluster.wait([engine.encode.remote(tasks)])
    assert (len(made), refused) == (len(texts), {})
    return list(made)


def lora_b(trainer: Any) -> list[Any]:
    return [weight for name, weight in trainer.model.named_parameters() if "lora_B" in name]


def loaded(engine: Any, trainer: Any, name: str, number: int, path: Path) -> LoadedAdapter:
    from tests.factories.policy import save_adapter

    save_adapter(trainer.model, path)
    return ray_cluster.load([engine], name, number, AdapterFiles.read(path))


def answers(
    engine: Any, prompts: Sequence[Prompt], adapter: LoadedAdapter | None, temperature: float
) -> list[Completion]:
    requests = [
        RolloutRequest(prompt, 0, 100 + place, temperature, TOKENS, adapter) for place, prompt in enumerate(prompts)
    ]
    return list(ray_cluster.wait([engine.generate.remote(request) for request in requests]))


def gap(trainer: Any, drawn: Sequence[Completion], change: Callable[[Sample], Sample] = lambda sample: sample) -> Gap:
    """Compare what the trainer computes for the engine's tokens, as in an update, with what the engine returned."""
    import torch

    rows = [TrainingRow(place, change(sample), 1.0) for place, each in enumerate(drawn) for sample in each.samples]
    loss = trainer.actor._policy._loss
    loss.model.eval()
    found = []
    with torch.no_grad():
        for batch in loss.batches(rows, StepSize.of(rows), trainer.actor._policy.max_tokens):
            trained = batch.tensors["tool_mask"] > 0
            found.append((loss._logps(batch.tensors) - batch.tensors["engine_logps"])[trained])
    differences = torch.cat(found).double()
    return Gap(len(differences), float(differences.abs().mean()), float(differences.mean()))


def without_first(sample: Sample) -> Sample:
    """Each token one place earlier: the prompt has lost its first one."""
    return Sample(sample.token_ids[1:], sample.loss_mask[1:], sample.logprobs[1:])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_engine_and_trainer_agree_on_log_probabilities(
    engine: Any,
    prompts: list[Prompt],
    untuned: Any,
    random_adapter: LoadedAdapter,
    temperature: float,
    has_adapter: bool,
) -> None:
    drawn = answers(engine, prompts, random_adapter if has_adapter else None, temperature)
    with nullcontext() if has_adapter else untuned.model.disable_adapter():
        found = gap(untuned, drawn)
    assert found.tokens > 100
    assert found.is_within(SAMPLED_LIMIT if temperature else GREEDY_LIMIT), found


@pytest.mark.parametrize("wrong", ["base", "zeroed", "half", "shifted"])
def test_wrong_weights_and_a_wrong_prompt_show_in_the_same_figures(
    engine: Any, prompts: list[Prompt], untuned: Any, random_adapter: LoadedAdapter, wrong: str
) -> None:
    import torch

    drawn = answers(engine, prompts, random_adapter, 1.0)
    if wrong == "base":
        with untuned.model.disable_adapter():
            found = gap(untuned, drawn)
    elif wrong == "shifted":
        found = gap(untuned, drawn, without_first)
    else:
        before = [weight.detach().clone() for weight in lora_b(untuned)]
        with torch.no_grad():
            for weight in lora_b(untuned):
                weight.mul_(0.5 if wrong == "half" else 0.0)
            found = gap(untuned, drawn)
            for weight, own in zip(lora_b(untuned), before, strict=True):
                weight.copy_(own)
    assert found.mean_absolute > LEAST_OF_WRONG, found
    assert not found.is_within(SAMPLED_LIMIT)


def test_thirty_steps_of_sft_teach_the_form_of_the_replies(engine: Any, people: list[Prompt], tuned: Tuned) -> None:
    losses = [line["loss"] for line in tuned.lines]
    held_out = [line["held_out_loss"] for line in tuned.lines if "held_out_loss" in line]
    assert len(losses) == STEPS
    assert sum(losses[-3:]) < sum(losses[:3]) / 3
    assert held_out[-1] < held_out[0] / 2
    for temperature in (0.0, 1.0):
        drawn = answers(engine, people, tuned.adapter, temperature)
        assert sum(each.text.startswith('{"name": ') for each in drawn) >= 0.9 * len(drawn)
        found = gap(tuned.trainer, drawn)
        assert found.is_within(OWN_LIMIT), found


async def test_the_server_proves_the_adapter_and_then_answers_with_it(
    engine: Any, people: list[Prompt], tuned: Tuned, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it has refused weights that do nothing under the same name."""
    from safetensors.torch import load_file, save_file

    from flywheel.training.optim import probe_measurement

    monkeypatch.setattr(probe_measurement, "TOKENS", 64)
    probe = probe_measurement.make_probe(engine, people[8:], tuned.adapter, None, max_model_len=CONTEXT)

    path, zeroed = tuned.path, tmp_path / "zeroed"
    shutil.copytree(path, zeroed)
    weights = load_file(path / WEIGHTS)
    nothing = {name: weight * 0 if "lora_B" in name else weight for name, weight in weights.items()}
    save_file(nothing, zeroed / WEIGHTS, metadata={"format": "pt"})

    base = base_name(served.config.model.base)
    by_base = await served.answer()
    assert by_base[0] == base
    with pytest.raises(ServeError, match=r"prove test-agent@r0001 .* shows 0\.0\d of the adapter's"):
        await served.deploy("r0001", zeroed, probe)
    assert await served.answer() == by_base

    report = await served.deploy("r0001", path, probe)
    figures = report.replicas[0].probe
    assert figures is not None and figures.passed
    model, text = await served.answer()
    assert model == "test-agent@r0001"
    assert text != by_base[1]
    assert json.loads(text).keys() == {"name", "age", "city"}
