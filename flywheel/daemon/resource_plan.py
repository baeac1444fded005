"""What `flywheel doctor --plan` prints: the GPU memory of the model server and of a round, and what judging takes.

Memory follows from the model's `config.json` and the settings, the judge's tokens from the verdicts in the state.
Whatever does not follow from these is None. Nothing is loaded and nobody is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from msgspec import Struct, to_builtins

from flywheel.config.file import Config
from flywheel.daemon.checkup import Gpu, is_beside_rounds, list_gpus, overbooked, server_share, version_of
from flywheel.daemon.forecast import forecast
from flywheel.daemon.judging.judging_report import cost_of
from flywheel.errors import TrainError
from flywheel.serving.server.model_parsers import config_in, folder_of, weight_bytes
from flywheel.serving.server.vllm_command import gpus_of_server
from flywheel.store.kernel.database import found_version, read_once
from flywheel.store.verdicts import usage_of_newest
from flywheel.training.engine.gpu_placement import MAX_LOADED, SPARE_SLOTS, place_on_gpus
from flywheel.training.optim.rollout_grading import has_judge

ENGINE_WORK: Final = 2_000_000_000
"""Bytes that vLLM takes for its own work, beside weights and cache."""
OPTIMIZED: Final = 16
"""Bytes of a weight of the adapter in the trainer: itself, its gradient and Adam's two moments, in float32."""
ACTIVATIONS: Final = 12
"""Activations of the layer and the loss at work, as a multiple of the widths of a layer (hidden, heads, inner). The
hidden sizes that gradient checkpointing keeps of every layer come to them. An H100 took 9.5, for a model of
Qwen3-0.6B's sizes (benchmarks/gpu.py)."""
GATED: Final = frozenset({"", "llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "olmo2", "granite"})
"""Types of models whose layers have the seven matrices that are counted; the empty one says no type."""
OTHER_LAYERS: Final = ("kv_lora_rank", "full_attn_idxs", "full_attention_interval", "hybrid_override_pattern")
"""Keys of models whose layers are not alike, or whose cache is not that of keys and values."""
TRAINED_BYTES: Final = {"float32": 4, "bfloat16": 2}
"""Bytes of a number of the trainer's base model by `training.precision`; `auto` is those of the files."""
TASKS: Final = 1000


class ModelSizes(Struct, frozen=True):
    """Bytes of the weights, of a number, and of the key-value cache of a token; weights of an adapter of rank 1;
    numbers that a pass of the trainer keeps of a token; the longest context."""

    weight_bytes: int | None
    number_bytes: int
    cache_bytes: int | None = None
    adapter_weights: int | None = None
    activation_numbers: int | None = None
    context: int | None = None


class Memory(Struct, frozen=True):
    """Bytes of each part, and of all; the cache is that of one sequence of `tokens`, activations are those of a pass
    of so many. `available` is what the GPUs have for it, and `cache_tokens` what then fits into the cache."""

    parts: dict[str, int | None]
    total: int | None
    tokens: int | None
    available: int | None
    cache_tokens: int | None = None


class ResourcePlan(Struct, frozen=True):
    """`engine` is one of a round's. `judging` are estimates of judging (`Cost.json`) with the number of `answers`: of
    so many tasks, and of a round if it asks the judge. Empty without a verdict in the state."""

    model: ModelSizes
    gpus: list[Gpu]
    server: Memory
    engine: Memory
    trainer: Memory
    judging: dict[str, dict[str, Any]]
    conflict: str
    """Why server and round do not fit one GPU together; empty if they do."""

    def as_json(self) -> dict[str, Any]:
        made: dict[str, Any] = to_builtins(self)
        return made


async def plan_of(config: Config) -> ResourcePlan:
    """The plan on the GPUs of this machine. Raises TrainError if a round cannot be placed on them."""
    sizes, gpus = model_sizes(config), _gpus()
    rollout, training, serving = config.rollout, config.training, config.serving
    memory = min((gpu.memory for gpu in gpus), default=None)
    # Rounds on a cluster have other GPUs than this machine.
    of_engine, of_trainer = _shares(config, len(gpus)) if gpus and config.ray.address is None else (None, None)
    slots = serving.max_lora_rank * config.max_adapters * sizes.number_bytes
    loaded = (MAX_LOADED + SPARE_SLOTS) * training.lora.r * sizes.number_bytes
    served = gpus_of_server(serving.extra_args)
    tokens = training.micro_batch_tokens or training.micro_batch_size * rollout.max_model_len
    trained_bytes = TRAINED_BYTES.get(training.precision, sizes.number_bytes)
    trained = {
        "weights": None
        if config.model.trainer_quantization
        else _times(sizes.weight_bytes, trained_bytes / sizes.number_bytes),
        "adapter_and_optimizer": _times(sizes.adapter_weights, training.lora.r * OPTIMIZED),
        "activations": _times(sizes.activation_numbers, trained_bytes * tokens),
    }
    return ResourcePlan(
        sizes,
        gpus,
        _engine(sizes, slots, serving.max_model_len or sizes.context, _times(memory, server_share(config)), served),
        _engine(sizes, loaded, rollout.max_model_len, _times(memory, of_engine), rollout.tensor_parallel),
        Memory(trained, _sum(trained), tokens, _times(memory, of_trainer)),
        await _judging(config),
        overbooked(config, len(gpus), of_engine) if of_engine else "",
    )


def _shares(config: Config, gpus: int) -> tuple[float, float]:
    """What a GPU of an engine, and a process of the trainer beside it, have of the memory of a GPU."""
    rollout, parallel = config.rollout, config.rollout.tensor_parallel
    placed = place_on_gpus(rollout.engines, gpus, trainers=config.training.workers, tensor_parallel=parallel)
    shares = [(engine.place, engine.memory(rollout.gpu_memory_utilization)) for engine in placed.engines]
    beside = sum(share for place, share in shares if place == placed.trainers[0].place)
    if gpus == 1 and is_beside_rounds(config):
        beside += server_share(config)
    return min(share for _, share in shares), max(0.0, 1 - beside)


def model_sizes(config: Config) -> ModelSizes:
    """What the base model's files say. The formulas are those of dense transformers whose layers are alike."""
    base, targets = config.model.base, config.training.lora.target_modules
    raw = config_in(folder) if (folder := folder_of(base)) else {}
    nested = raw.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, dict) and nested else raw
    is_wide = "float32" in (text.get("dtype"), text.get("torch_dtype"), raw.get("dtype"), raw.get("torch_dtype"))
    weights, number = weight_bytes(base) or None, 4 if is_wide else 2
    hidden, layers, heads = (text.get(name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    context, size, key_heads, inner = (
        text.get(name) for name in ("max_position_embeddings", "head_dim", "num_key_value_heads", "intermediate_size")
    )
    # Some models list what each layer has.
    if any(not isinstance(each or 0, int) for each in (hidden, layers, heads, size, key_heads, context)):
        return ModelSizes(weights, number)
    has_window = text.get("sliding_window") and text.get("use_sliding_window", True)
    is_alike = {*(text.get("layer_types") or ["full_attention"])} == {"full_attention"} and not has_window
    if not (hidden and layers and heads and is_alike) or any(key in text for key in OTHER_LAYERS):
        return ModelSizes(weights, number, context=context)
    size, key_heads = size or hidden // heads, key_heads or heads
    cache = 2 * layers * key_heads * size * number
    is_other = any("experts" in key for key in text) or (text.get("model_type") or "") not in GATED
    if not (isinstance(inner, int) and inner) or is_other:
        return ModelSizes(weights, number, cache, context=context)
    sides = dict.fromkeys(("q_proj", "o_proj"), hidden + heads * size)
    sides |= dict.fromkeys(("k_proj", "v_proj"), hidden + key_heads * size)
    sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + inner)
    named = {*sides} if targets == "all-linear" else {*targets} if isinstance(targets, list) else {targets}
    # Of a model that also sees images, all linear layers are more than those of its language.
    is_known = named <= sides.keys() and not (targets == "all-linear" and "text_config" in raw)
    adapter = layers * sum(sides[name] for name in named) if is_known else None
    kept = layers * hidden + ACTIVATIONS * (hidden + heads * size + inner)
    return ModelSizes(weights, number, cache, adapter, kept, context)


def answers_of_round(config: Config, held_out: int) -> int:
    """How many answers a round has graded, at most: rollouts, and those of both sides of the gate, without suites."""
    rollouts = 0
    for stage in config.training.planned:
        own = stage.training
        if stage.kind == "grpo":
            rollouts += own.steps * config.rollout.prompts_asked(own.prompts_per_step) * own.group_size
        elif stage.kind == "dpo":
            rollouts += (stage.samples or config.trigger.max_samples) * own.group_size
    tasks = min(held_out, config.gate.max_tasks) or config.gate.max_tasks
    return rollouts + 2 * tasks * config.gate.samples_for(tasks)


async def _judging(config: Config) -> dict[str, dict[str, Any]]:
    if not found_version(config.state_dir):
        return {}
    count, *used = await read_once(config.state_dir, usage_of_newest)
    found = await read_once(config.state_dir, forecast, config)
    answers = {"tasks": TASKS} | ({"round": answers_of_round(config, found.held_out)} if has_judge(config) else {})
    estimates = {}
    for name, number in answers.items() if count else ():
        calls, sent, received = (round(number * each / count) for each in used)
        cost = cost_of(calls, sent, received, config.judge.prices)
        estimates[name] = {"answers": number, **replace(cost, learned_from=used[0]).json()}
    return estimates


def _engine(sizes: ModelSizes, bytes_of_rank_1: int, tokens: int | None, on_one: int | None, gpus: int) -> Memory:
    """What vLLM needs on so many GPUs together, each of which has `on_one` bytes for it."""
    available = _times(on_one, gpus)
    fixed = {
        "weights": sizes.weight_bytes,
        "adapters": _times(sizes.adapter_weights, bytes_of_rank_1),
        "work": ENGINE_WORK * gpus,
    }
    parts = fixed | {"cache": _times(sizes.cache_bytes, tokens)}
    taken, fits = _sum(fixed), None
    if available is not None and taken is not None and sizes.cache_bytes:
        fits = max(0, available - taken) // sizes.cache_bytes
    return Memory(parts, _sum(parts), tokens, available, fits)


def _gpus() -> list[Gpu]:
    try:
        return list_gpus() if version_of("vllm") is not None else []
    except TrainError:  # without one, the plan says what is needed
        return []


def _times(value: int | None, factor: float | None) -> int | None:
    return None if value is None or factor is None else int(value * factor)


def _sum(parts: Mapping[str, int | None]) -> int | None:
    known = [each for each in parts.values() if each is not None]
    return sum(known) if len(known) == len(parts) else None
