"""The arithmetic of `flywheel doctor --plan`, against values that are known from elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flywheel.cli.doctor import show_plan
from flywheel.config.file import Config, parse
from flywheel.daemon import resource_plan
from flywheel.daemon.checkup import Gpu
from flywheel.daemon.forecast import forecast
from flywheel.daemon.resource_plan import ResourcePlan, answers_of_round, model_sizes, plan_of
from flywheel.errors import TrainError
from flywheel.store.verdicts import usage_of_newest
from tests.factories.documented_json import compare, documented

GB = 10**9
QWEN3_4B = {
    "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 9728, "torch_dtype": "bfloat16", "max_position_embeddings": 40_960,
}  # fmt: skip
QWEN3_06B = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 3072, "torch_dtype": "bfloat16",
}  # fmt: skip
TRACED = {"rollout": {"max_model_len": 4096}, "training": {"micro_batch_tokens": 20_000}}


def config_of(folder: Path, raw: dict[str, Any], weights: int = 0, **sections: Any) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if weights:
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(weights)  # takes no space
    given = {"state": {"dir": str(folder / "state")}, "model": {"base": str(folder)}, **TRACED, **sections}
    return parse(given, "a test", folder)


async def planned(monkeypatch: pytest.MonkeyPatch, config: Config, *gpus: Gpu) -> ResourcePlan:
    monkeypatch.setattr(resource_plan, "_gpus", lambda: [*gpus])
    return await plan_of(config)


async def test_a_model_of_4b_on_one_gpu_of_80_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-4B has 4.02 billion weights, and 33 million of an adapter of rank 16 (PEFT)."""
    away = {"serving": {"urls": ["http://10.0.0.11:8000"]}}
    config = config_of(tmp_path / "m", QWEN3_4B, 8_045_000_000, **away)
    found = await planned(monkeypatch, config, Gpu("H100", 80 * GB))
    assert found.model.cache_bytes == 147_456
    assert found.model.adapter_weights == 33_030_144 / 16
    assert found.engine.available == 36 * GB  # 0.45, beside the trainer
    assert found.engine.cache_tokens == pytest.approx(175_000, rel=0.01)
    assert found.trainer.parts["adapter_and_optimizer"] == pytest.approx(0.53 * GB, rel=0.01)
    # The hidden sizes of 36 layers, and 12 widths of 2560 + 4096 + 9728, for 20,000 tokens in bfloat16.
    assert found.trainer.parts["activations"] == (36 * 2560 + 12 * 16_384) * 20_000 * 2
    assert 19 * GB < (found.trainer.total or 0) < 22 * GB
    assert found.trainer.available == 44 * GB
    # Four adapters of rank 64, in bfloat16.
    assert found.server.parts["adapters"] == pytest.approx(4 * 4 * 33.03e6 * 2, rel=0.001)
    assert (found.server.tokens, found.server.available) == (40_960, 72 * GB)
    assert found.server.parts["cache"] == pytest.approx(6.04 * GB, rel=0.001)


QWEN3 = {  # hidden size, layers, heads, inner size, GB of weights
    "Qwen3-0.6B": (1024, 28, 16, 3072, 1.5),
    "Qwen3-1.7B": (2048, 28, 16, 6144, 4.06),
    "Qwen3-4B": (2560, 36, 32, 9728, 8.045),
    "Qwen3-8B": (4096, 36, 32, 12_288, 16.4),
    "Qwen3-14B": (5120, 40, 40, 17_408, 29.5),
    "Qwen3-32B": (5120, 64, 64, 25_600, 65.5),
}


@pytest.mark.parametrize("name", QWEN3)
async def test_the_page_says_which_gpu_a_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    hidden, layers, heads, inner, weights = QWEN3[name]
    raw = {**QWEN3_4B, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    cells = list[float]()
    for tokens in (4096, 16_384):
        sections = {"rollout": {"max_model_len": tokens}, "training": {"micro_batch_tokens": tokens}}
        config = config_of(tmp_path / "m", {**raw, "intermediate_size": inner}, int(weights * GB), **sections)
        found = await planned(monkeypatch, config)
        server, engine, trainer = found.server.total, found.engine.total, found.trainer.total
        assert server and engine and trainer
        cells = cells or [server / 0.9]
        cells += [max(engine / 0.45, trainer / 0.55), max(engine / 0.9, trainer)]
    page = (Path(__file__).parents[2] / "docs" / "train" / "tune.md").read_text()
    assert f"| {name} | {' | '.join(str(math.ceil(cell / GB)) for cell in cells)} |\n" in page


async def test_what_a_trainer_on_an_h100_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/results/gpu.md: 2.9 GiB at most, in passes of 10,240 tokens."""
    training = {"training": {"micro_batch_tokens": 10_240}}
    found = await planned(monkeypatch, config_of(tmp_path / "m", QWEN3_06B, 1_192_000_000, **training))
    assert 2.9 <= (found.trainer.total or 0) / 2**30 <= 2.9 * 1.25
    assert (found.gpus, found.trainer.available, found.engine.cache_tokens) == ([], None, None)


async def test_what_does_not_follow_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = await planned(monkeypatch, config_of(tmp_path / "m", {}))
    assert (nothing.engine.total, nothing.server.total, nothing.trainer.total) == (None, None, None)
    assert nothing.judging == {}
    experts = model_sizes(config_of(tmp_path / "m", {**QWEN3_4B, "num_experts": 128}))
    assert (experts.cache_bytes, experts.adapter_weights) == (147_456, None)
    latent = model_sizes(config_of(tmp_path / "m", {**QWEN3_4B, "kv_lora_rank": 512}))
    assert (latent.cache_bytes, latent.adapter_weights) == (None, None)
    for other in (
        {"layer_types": ["linear_attention", "full_attention"]},
        {"sliding_window": 4096},
        {"full_attn_idxs": [2]},
    ):
        mixed = model_sizes(config_of(tmp_path / "m", {**QWEN3_4B, **other}))
        assert (mixed.cache_bytes, mixed.adapter_weights, mixed.activation_numbers) == (None, None, None)
    alike = {"layer_types": ["full_attention"] * 36, "sliding_window": 4096, "use_sliding_window": False}
    assert model_sizes(config_of(tmp_path / "m", {**QWEN3_4B, **alike})).cache_bytes == 147_456
    fused = model_sizes(config_of(tmp_path / "m", {**QWEN3_4B, "model_type": "phi3"}))
    assert (fused.cache_bytes, fused.adapter_weights) == (147_456, None)
    quantized = config_of(tmp_path / "m", QWEN3_4B, 8 * GB, model={"base": "/m", "trainer_quantization": "4bit"})
    assert (await planned(monkeypatch, quantized, Gpu("L4", 24 * GB))).trainer.total is None


@pytest.mark.parametrize(
    ("raw", "cache_bytes"),
    [
        # As Gemma 3n has it: a width for each layer.
        ({"text_config": {**QWEN3_4B, "intermediate_size": [9728] * 36}}, 147_456),
        ({**QWEN3_4B, "num_key_value_heads": [8] * 36}, None),
        ({**QWEN3_4B, "num_attention_heads": [32] * 36, "head_dim": None}, None),
        ({**QWEN3_4B, "hidden_size": "2560"}, None),
        ({**QWEN3_4B, "max_position_embeddings": "40960"}, None),
        ({"text_config": "Qwen3"}, None),
    ],
)
async def test_a_model_whose_layers_differ_or_whose_file_is_odd_is_planned_as_far_as_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any], cache_bytes: int | None
) -> None:
    found = await planned(monkeypatch, config_of(tmp_path / "m", raw, 1_000), Gpu("H100", 80 * GB))
    assert (found.model.cache_bytes, found.model.adapter_weights) == (cache_bytes, None)
    assert found.model.weight_bytes == 1_000


def test_the_layers_that_have_an_adapter_count(tmp_path: Path) -> None:
    lora = {"lora": {"target_modules": ["q_proj", "v_proj"]}}
    sizes = model_sizes(config_of(tmp_path / "m", QWEN3_4B, training=lora))
    assert sizes.adapter_weights == 36 * (2560 + 4096 + 2560 + 1024)
    wide = model_sizes(config_of(tmp_path / "m", {"text_config": QWEN3_4B, "dtype": "float32"}))
    assert wide.cache_bytes == 2 * 147_456


async def test_a_model_that_several_gpus_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = {"rollout": {"tensor_parallel": 2}, "serving": {"extra_args": ["--tensor-parallel-size", "2"]}}
    config = config_of(tmp_path / "m", QWEN3_4B, 8 * GB, **parallel)
    found = await planned(monkeypatch, config, *[Gpu("L4", 24 * GB)] * 3)
    for part in (found.server, found.engine):
        assert (part.available, part.parts["work"]) == (2 * 21_600_000_000, 4 * GB)
    assert found.trainer.available == 24 * GB


async def test_a_trainer_of_wider_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        tmp_path / "m", QWEN3_4B, 8 * GB, training={"precision": "float32", "micro_batch_tokens": 1000}
    )
    found = await planned(monkeypatch, config)
    assert (found.trainer.parts["weights"], found.engine.parts["weights"]) == (16 * GB, 8 * GB)
    assert found.trainer.parts["activations"] == (36 * 2560 + 12 * 16_384) * 1000 * 4


async def test_a_server_and_a_round_that_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu = Gpu("H100", 80 * GB)
    both = await planned(monkeypatch, config_of(tmp_path / "m", QWEN3_4B), gpu)
    assert "the server uses 0.9 of it and a rollout engine 0.45" in both.conflict
    less: dict[str, Any] = {"serving": {"extra_args": ["--gpu-memory-utilization", "0.4"]}}
    fits = await planned(monkeypatch, config_of(tmp_path / "m", QWEN3_4B, **less), gpu)
    assert not fits.conflict
    assert fits.trainer.available == pytest.approx(0.15 * 80 * GB)  # what server and engine leave


async def test_a_round_that_cannot_be_placed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path / "m", QWEN3_4B, rollout={"tensor_parallel": 2})
    with pytest.raises(TrainError, match="3 in all"):
        await planned(monkeypatch, config, Gpu("L4", 24 * GB))
    cluster = config_of(tmp_path / "m", QWEN3_4B, rollout={"tensor_parallel": 2}, ray={"address": "10.0.0.10:6379"})
    found = await planned(monkeypatch, cluster, Gpu("L4", 24 * GB))
    assert (found.engine.available, found.trainer.available) == (None, None)
    assert found.server.available == 0.9 * 24 * GB


@pytest.mark.parametrize(
    ("sections", "held_out", "answers"),
    [
        # 50 steps of 8 prompts in groups of 8, and 200 tasks with three answers of each side.
        ({"training": {"steps": 50, "prompts_per_step": 8, "group_size": 8}}, 0, 3200 + 1200),
        ({"training": {"steps": 50, "prompts_per_step": 8, "group_size": 8}}, 50, 3200 + 2 * 50 * 8),
        ({"training": {"stages": ["sft"]}, "gate": {"samples": 2}}, 40, 160),
        ({"training": {"stages": [{"dpo": {"samples": 100}}], "group_size": 4}, "gate": {"samples": 1}}, 40, 480),
    ],
)
def test_answers_that_a_round_has_graded(sections: dict[str, Any], held_out: int, answers: int) -> None:
    assert answers_of_round(parse(sections, "a test", Path("/")), held_out) == answers


async def test_without_a_gpu_nothing_is_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await planned(monkeypatch, config_of(tmp_path / "m", QWEN3_4B, 8 * GB, rollout={"tensor_parallel": 2}))
    assert (found.engine.available, found.trainer.available) == (None, None)
    assert (found.engine.total or 0) > 10 * GB


def test_the_page_shows_the_plan_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "hub" / "models--Qwen--Qwen3-4B"
    config_of(repository / "snapshots" / "s", QWEN3_4B, 8_045_000_000)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("s")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(resource_plan, "_gpus", lambda: [Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984)])
    monkeypatch.setattr(resource_plan, "found_version", lambda _: 1)
    of_state = {
        usage_of_newest: (200, 204, 412_000, 26_500),
        forecast: SimpleNamespace(held_out=120),
    }

    async def read_once(_: Path, function: Any, *__: Any) -> Any:
        return of_state[function]

    monkeypatch.setattr(resource_plan, "read_once", read_once)
    prices = {"input_per_million": 0.15, "output_per_million": 0.60, "currency": "USD"}
    training = {"training": {"micro_batch_tokens": 20_000}}
    away = {"serving": {"urls": ["http://10.0.0.11:8000"]}}
    file = tmp_path / "flywheel.yaml"
    file.write_text(json.dumps({"model": {"base": "Qwen/Qwen3-4B"}, "judge": {"prices": prices}, **training, **away}))
    show_plan(file, as_json=True)
    compare(json.loads(capsys.readouterr().out), documented("doctor --plan"), "doctor --plan")
    show_plan(file, as_json=False)
    page = (Path(__file__).parents[2] / "docs" / "train" / "tune.md").read_text()
    assert f"```\n{capsys.readouterr().out}```\n" in page


def test_without_files_or_prices_the_plan_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def judged(_: Config) -> dict[str, Any]:
        used = {"calls": 1, "prompt_tokens": 2, "completion_tokens": 3, "cost": None}
        return {"tasks": {"answers": 1000, **used, "learned_from": 4, "more_calls_if_close": 0}}

    monkeypatch.setattr(resource_plan, "_judging", judged)
    file = tmp_path / "flywheel.yaml"
    file.write_text(json.dumps({"model": {"base": str(tmp_path / "nothing")}}))
    show_plan(file, as_json=False)
    told = capsys.readouterr().out
    assert "its files are not on this machine" in told
    assert "cost not known without judge.prices" in told
    config_of(tmp_path / "nothing", {**QWEN3_4B, "kv_lora_rank": 512}, GB)
    show_plan(file, as_json=False)
    assert "does not follow from the config.json of this kind of model" in capsys.readouterr().out
