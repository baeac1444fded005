"""The work of `benchmarks.gpu`: a model with random weights, rows of random tokens, and the trainer's steps on them.

The trainers are those of a round, built as its actor builds them, without Ray, engines and judge.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from flywheel.config.file import Config
from flywheel.records.round import AdapterRef
from flywheel.training.data.groups import group_advantages
from flywheel.training.data.samples import Pair, RecordedReply, Sample, TrainingRow, minibatches, rows_of
from flywheel.training.engine.policy import trainer_dtypes
from flywheel.training.optim.losses import made_loss
from flywheel.training.optim.policy_step import PolicyStep
from flywheel.training.worker.processes import refuse_not_finite
from flywheel.training.worker.stage import stage_settings
from tests.factories.policy import load_policy

POLICY: Final = Path(__file__).parent.parent / "demo" / "policy"
DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
SEED: Final = 7
GROUP: Final = 8
GIB: Final = 2**30
EFFECT: Final = 0.01
"""Standard deviation of an adapter's second matrices where it shall have an effect; those of a new one are 0."""
Stage = Literal["sft", "dpo", "grpo"]


@dataclass(frozen=True, slots=True)
class Size:
    """Of a run: the model, tokens of each prompt, the range of those of completions, groups and steps."""

    model: Mapping[str, int]
    prompt: int
    completion: tuple[int, int]
    groups: int
    steps: int

    @property
    def longest(self) -> int:
        return self.prompt + self.completion[1]

    def settings(self, **changes: Any) -> Config:
        """Flywheel's defaults, but for sizes. `changes` are of the section training, but for `trainer_quantization`.

        A step has all samples: SFT as replies, DPO as pairs, GRPO as rollouts.
        """
        samples, model = self.groups * GROUP, {"trainer_quantization": changes.pop("trainer_quantization", None)}
        sizes = {"steps": self.steps, "prompts_per_step": self.groups, "group_size": GROUP}
        sft, dpo = ({"batch_size": size, "epochs": self.steps} for size in (samples, samples // 2))
        rollout = {"max_completion_tokens": self.completion[1], "max_model_len": self.longest, "temperature": 1.0}
        training = {**sizes, "sft": sft, "dpo": dpo, **changes}
        return Config.model_validate({"model": model, "training": training, "rollout": rollout})


def make_model(size: Size, folder: Path) -> str:
    """Write a model with random weights in bfloat16, and the tokenizer of the demo's policy, which knows the first of
    its tokens."""
    torch.manual_seed(SEED)
    with torch.device(DEVICE):
        model = Qwen3ForCausalLM(Qwen3Config(**size.model, max_position_embeddings=40960, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(POLICY).save_pretrained(folder)
    return str(folder)


def make_samples(size: Size) -> list[Sample]:
    """Prompts and completions of random tokens; those of a group have the same prompt."""
    draw, made = random.Random(SEED), []
    for _ in range(size.groups):
        prompt = draw.choices(range(size.model["vocab_size"]), k=size.prompt)
        for _ in range(GROUP):
            completion = draw.choices(range(size.model["vocab_size"]), k=draw.randint(*size.completion))
            mask = (*[False] * len(prompt), *[True] * len(completion))
            made.append(Sample((*prompt, *completion), mask))
    return made


def rollouts(samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> list[TrainingRow]:
    """The rows of a step of GRPO, with the log-probabilities of an engine and random rewards."""
    draw = random.Random(SEED)
    groups = [place // GROUP for place in range(len(samples))]
    advantages = group_advantages(groups, [draw.random() for _ in samples])
    context = [[None] * sample.loss_mask.count(False) for sample in samples]
    return [
        TrainingRow(place, Sample(sample.token_ids, sample.loss_mask, (*context[place], *logprobs[place])), advantage)
        for place, (sample, advantage) in enumerate(zip(samples, advantages, strict=True))
        if advantage is not None
    ]


def load(base: str, settings: Config, parent: AdapterRef | None = None, seed: int = SEED) -> tuple[Any, torch.dtype]:
    """The policy, and in what it computes, as a round's trainer has them, on the GPU if there is one. Policies that
    were dropped are freed."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    dtype, compute = trainer_dtypes(base, settings.training.precision)
    quantization = settings.model.trainer_quantization
    model = load_policy(base, parent, settings.training.lora, seed, dtype=dtype, quantization=quantization)
    if quantization is None:
        model.to(DEVICE)
    return model, model.dtype if compute == "auto" else getattr(torch, compute)


def logprobs_of(base: str, settings: Config, samples: Sequence[Sample]) -> list[list[float]]:
    """Log-probabilities of the completions by the model as the trainer holds it before its first step."""
    model, compute = load(base, settings)
    return logprobs(model, compute, samples)


def logprobs(model: Any, compute: torch.dtype, samples: Sequence[Sample]) -> list[list[float]]:
    """Log-probabilities of the completions, from the model's whole logits."""
    model.eval()
    found = []
    with torch.no_grad(), torch.autocast(DEVICE, dtype=compute, enabled=compute != torch.float32):
        for sample in samples:
            ids = torch.tensor([sample.token_ids], device=DEVICE)
            logits = model(input_ids=ids).logits[0, :-1].float()  # (T - 1, V)
            values = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            found.append(values[sample.loss_mask.count(False) - 1 :].tolist())
    return found


def gap(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference over all tokens, in nats."""
    pairs = (pair for both in zip(one, other, strict=True) for pair in zip(*both, strict=True))
    return fmean(abs(a - b) for a, b in pairs)


class Run:
    """Steps of one stage, and what they show."""

    def __init__(
        self,
        stage: Stage,
        settings: Config,
        base: str,
        samples: Sequence[Sample | TrainingRow],
        seed: int = SEED,
    ) -> None:
        """`samples` are rows for GRPO. Raises TrainError."""
        self.ends: list[float] = []
        self.logs: list[Mapping[str, float]] = []
        self.passes: list[int] = []
        """Tokens of each forward pass, with padding."""
        self.gradient: dict[str, torch.Tensor] = {}
        """Of the first step."""
        self.autocast = "none"
        self.model, self.compute = load(base, settings, seed=seed)
        items: Any = samples
        if stage == "sft":
            items = [RecordedReply(f"t{place}", (sample,)) for place, sample in enumerate(samples)]
        elif stage == "dpo":
            items = [Pair(f"t{place}", *samples[place : place + 2]) for place in range(0, len(samples), 2)]
        self.tokens = sum(map(len, (getattr(each, "sample", each).token_ids for each in samples)))
        order = [list(range(len(items)))] * settings.training.steps
        if stage != "grpo":
            own = settings.training.sft if stage == "sft" else settings.training.dpo
            settings = stage_settings(settings, stage, len(items))
            order = minibatches(len(items), own.batch_size, own.epochs, seed)
        steps = [[items[place] for place in places] for places in order]
        self._steps = [rows_of(each) for each in steps] if stage == "sft" else steps
        loss = made_loss(
            stage,
            self.model,
            settings,
            AutoTokenizer.from_pretrained(base),
            seed=seed,
            compute_dtype=self.compute,
            longest=settings.rollout.max_completion_tokens or settings.rollout.max_model_len,
        )
        self.policy = PolicyStep(loss, settings, settings.training.steps)
        self.model.get_input_embeddings().register_forward_pre_hook(self._pass)

    def _pass(self, _: Any, arguments: tuple[torch.Tensor]) -> None:
        self.passes.append(arguments[0].numel())
        self.autocast = _name(torch.get_autocast_dtype(DEVICE)) if torch.is_autocast_enabled(DEVICE) else "none"

    def _see(self, *_: Any) -> None:
        if not self.gradient:
            self.gradient = {
                name: p.grad.cpu()
                for name, p in self.model.named_parameters()
                if p.requires_grad and p.grad is not None
            }

    def train(self) -> dict[str, Any]:
        """Train, and return the figures. Those of memory are None without a GPU."""
        before = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}
        # With DPO also its reference, a copy of the adapter.
        frozen = {_name(p.dtype) for p in self.model.parameters() if not p.requires_grad}
        gpu, held = DEVICE == "cuda", None
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            held = round(torch.cuda.memory_allocated() / GIB, 2)
        hook = register_optimizer_step_pre_hook(self._see)
        try:
            for number, items in enumerate(self._steps, 1):
                figures = self.policy.step(items)
                refuse_not_finite(number, figures)
                if gpu:
                    torch.cuda.synchronize()
                self.ends.append(time.perf_counter())
                self.logs.append(figures)
        finally:
            hook.remove()
        after = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        seconds = median(later - earlier for earlier, later in pairwise(self.ends))
        return {
            "step_s": round(seconds, 4),
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / seconds),
            "passes": len(self.passes) / len(self.logs),
            "held_gib": held,
            "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if gpu else None,
            "base": " and ".join(sorted(frozen)),
            "adapter": " and ".join(sorted({_name(p.dtype) for p in after.values()})),
            "autocast": self.autocast,
            "loss_finite": all(math.isfinite(logs["loss"]) for logs in self.logs),
            "tensors": len(after),
            "tensors_changed": sum(not torch.equal(before[name], p) for name, p in after.items()),
            "logprob_gap": self.logs[0].get("logprob_gap"),
        }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def short_of_memory(model: Any, limit: int | None, most: int) -> Iterator[None]:
    """With at most `limit` bytes of the GPU's memory, torch runs out of it by itself. Without a limit, a pass of more
    than `most` tokens asks for more than any machine has."""

    def refuse(_: Any, arguments: tuple[torch.Tensor]) -> None:
        if arguments[0].numel() > most:
            torch.empty(2**58, dtype=torch.uint8)

    if limit is None:
        model.get_input_embeddings().register_forward_pre_hook(refuse)
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def memory_shortage(size: Size, base: str, rows: Sequence[TrainingRow], *, limited: bool) -> dict[str, Any]:
    """Two steps of GRPO with too little memory for all rows in one pass, beside steps with two rows a pass.

    If it is `limited`, it is what these steps need, four times over, besides what the model takes.
    """

    def run(tokens: int) -> Run:
        # Gradients as they are, not clipped.
        made = Run("grpo", size.settings(steps=2, micro_batch_tokens=tokens, max_grad_norm=1e9), base, rows)
        torch.manual_seed(SEED)
        for name, weight in made.model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=EFFECT)
        return made

    asked, small = len(rows) * size.longest, run(2 * size.longest)
    figures = small.train()
    gradient, limit = small.gradient, None
    if limited:
        limit = int((4 * figures["peak_gib"] - 3 * figures["held_gib"]) * GIB)
    del small
    short = run(asked)
    with short_of_memory(short.model, limit, 4 * size.longest):
        short.train()
    sufficed, found = short.policy.max_tokens, short.gradient
    repeated = [tokens for tokens in short.passes if tokens > sufficed]
    if not repeated:
        raise RuntimeError(f"the steps fitted into {limit} bytes, so nothing was repeated")
    del short
    undisturbed = run(sufficed)
    undisturbed.train()
    return {
        "limit_gib": None if limit is None else round(limit / GIB, 2),
        "asked_tokens": asked,
        "repeated_tokens": repeated,
        "sufficed_tokens": sufficed,
        "gradient_difference": difference(found, gradient),
        "gradient_difference_undisturbed": difference(undisturbed.gradient, gradient),
    }


def difference(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The norm of the difference of two gradients by the norm of the second."""
    squares = [
        ((found[name] - each).square().sum().item(), each.square().sum().item()) for name, each in wanted.items()
    ]
    return math.sqrt(sum(one for one, _ in squares) / sum(one for _, one in squares))
