"""Makes adapters as a round leaves them, with random weights: `python -m tests.serving.make_adapters POLICY OUT`.

Writes `good`, `other` (another draw), `wide` (of a rank that the server refuses), `small` (of rank 4), and `next`,
whose parent is `parent`. In `zeroed`, which does nothing, and `half` are wrong weights for `next`.

In `probes.json` is what transformers and peft record for each, in the form of `flywheel.records.round.Probe`: for
`zeroed` and `half` that of `next`, and in `shifted` that of a round whose base model was not quite that of the
server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = ["What is 5 plus 7?", "What is 9 times 3?", "Name a number.", "What is 20 minus 4?"]
TOKENS = 48
STEP = 0.02
"""The standard deviation of the `lora_B` of `parent`, and of what is added in `next`: about 0.1 nats each."""
WEIGHTS = "adapter_model.safetensors"


def logprobs(model: torch.nn.Module, texts: list[list[int]], starts: list[int]) -> list[float]:
    """Of each token from its text's start on."""
    found: list[float] = []
    for text, start in zip(texts, starts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0]  # (T, V)
        rows = torch.log_softmax(logits.double(), dim=-1)[start - 1 : -1]
        found += rows.gather(1, torch.tensor(text[start:])[:, None])[:, 0].tolist()
    return found


def main(policy: str, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]

    def base(shift: float = 0.0) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        torch.manual_seed(99)
        for parameter in model.parameters():
            parameter.data += shift * parameter.data.std() * torch.randn_like(parameter)
        return model.eval()

    def recorded(folder: Path, parent: Path | None = None, shift: float = 0.0) -> dict[str, object]:
        torch.manual_seed(7)
        adapter = PeftModel.from_pretrained(base(shift), folder).eval()
        texts = [
            adapter.generate(
                input_ids=torch.tensor([prompt]), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                min_new_tokens=TOKENS, max_new_tokens=TOKENS,
            )[0].tolist()
            for prompt in prompts
        ]  # fmt: skip
        starts = [len(prompt) for prompt in prompts]
        places = [(number, at) for number, text in enumerate(texts) for at in range(starts[number], len(text))]
        models = {"adapter": adapter, "base": base(shift)}
        if parent is not None:
            models["parent"] = PeftModel.from_pretrained(base(shift), parent).eval()
        first = {name: logprobs(model, texts, starts) for name, model in models.items()}
        second = {name: logprobs(model.double(), texts, starts) for name, model in models.items()}
        return {"texts": texts, "places": places, "first": first, "second": second}

    probes = {}
    for seed, (name, rank, std) in enumerate(
        [("good", 8, 1.0), ("other", 8, 1.0), ("wide", 16, 1.0), ("small", 4, 1.0), ("parent", 8, STEP)]
    ):
        settings = LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        policy_model = base()
        torch.manual_seed(seed)
        model = get_peft_model(policy_model, settings)
        for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
            torch.nn.init.normal_(parameter, std=std)
        model.save_pretrained(out / name)
        probes[name] = recorded(out / name)
    weights = load_file(out / "parent" / WEIGHTS)
    torch.manual_seed(5)
    step = {name: STEP * torch.randn_like(weight) * ("lora_B" in name) for name, weight in weights.items()}
    for name, scale in (("next", 1.0), ("half", 0.5), ("zeroed", 0.0)):
        (out / name).mkdir()
        (out / name / "adapter_config.json").write_bytes((out / "parent" / "adapter_config.json").read_bytes())
        made = {key: (weight + step[key]) * (scale if "lora_B" in key else 1.0) for key, weight in weights.items()}
        save_file(made, out / name / WEIGHTS, metadata={"format": "pt"})
        probes[name] = recorded(out / "next", out / "parent")
    probes["shifted"] = recorded(out / "next", out / "parent", shift=0.005)
    (out / "probes.json").write_text(json.dumps(probes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
