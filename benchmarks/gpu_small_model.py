"""SFT of a genuine small model on a base with and without quantisation, for `benchmarks.gpu`.

The model learns the support desk of `make demo-real` from right replies, with the settings of its configuration. An
engine serves the adapter on the unquantised base, whatever it was trained on.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any, Final

import yaml
from transformers import AutoTokenizer

from benchmarks import gpu_training as training
from demo.support_desk.messages import DESK, HELD_OUT, Kind, Message
from flywheel.config.file import Config
from flywheel.records.round import AdapterRef
from flywheel.training.data.samples import Sample
from tests.factories.policy import save_adapter

CONFIGURATION: Final = Path(__file__).parent.parent / "configs" / "demo-real.yaml"
REPLIES: Final = 128
HELD_OUT_REPLIES: Final = 96


def settings(quantization: str | None = None, **training_changes: Any) -> Config:
    """Those of the demo's first turn."""
    values = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
    changed = {**values["training"], **training_changes}
    model = {"trainer_quantization": quantization}
    return Config.model_validate({"model": model, "training": changed, "rollout": values["rollout"]})


def sample_of(base: str, message: Message, reply: str) -> Sample:
    """A message with a reply, by the model's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt = tokenizer.apply_chat_template(message.chat, add_generation_prompt=True, return_dict=False)
    ids = (*prompt, *tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id)
    return Sample(ids, tuple(place >= len(prompt) for place in range(len(ids))))


def replies(base: str, kind: Kind, count: int) -> list[Sample]:
    """Messages of the desk with their right replies."""
    return [sample_of(base, message, message.ticket.as_json()) for message in kind.draw(count, training.SEED)]


def learn(base: str, scratch: Path, quantizations: tuple[str, ...], *, quick: bool) -> dict[str, Any]:
    """By quantisation: differences of log-probabilities of held-out replies before training, their mean negative
    log-likelihood in nats before and after, and after it with the adapter on the unquantised base."""
    taught = replies(base, DESK, 8 if quick else REPLIES)
    asked = replies(base, HELD_OUT, 4 if quick else HELD_OUT_REPLIES)
    exact = training.logprobs_of(base, settings(precision="float32"), asked)
    unquantised: list[list[float]] = []
    found = {}
    for name in (None, *quantizations):
        own, folder = settings(name), scratch / f"small-{name}"
        before = training.logprobs_of(base, own, asked)
        unquantised = unquantised or before
        folder.mkdir()
        run = training.Run("sft", own, base, taught)
        steps = run.train()
        save_adapter(run.model, folder / "adapter")
        after = training.logprobs(run.model, run.compute, asked)
        del run
        adapter = AdapterRef(name="trained", path=str(folder / "adapter"), sha256="")
        served = training.logprobs(*training.load(base, settings(), adapter), asked)
        found[name or "unquantised"] = {
            "from_float32": training.gap(before, exact),
            "from_unquantised": training.gap(before, unquantised) if name else None,
            "nll_before": _nll(before),
            "nll_after": _nll(after),
            "nll_served": _nll(served),
            "step_s": steps["step_s"],
            "peak_gib": steps["peak_gib"],
        }
    return found


def _nll(logprobs: list[list[float]]) -> float:
    return -fmean(value for each in logprobs for value in each)
