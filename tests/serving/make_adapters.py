"""Makes adapters as a round leaves them, with random weights: `python -m tests.serving.make_adapters POLICY OUT`.

Writes `good`, `other` (another draw), `wide` (of a rank that the tests' server refuses) and `small` (of rank 4), and
in `probes.json` what transformers and peft measure for each, in the form of `flywheel.round.Probe`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

ANSWER = "The answer is \\boxed{12}."


def logprobs(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].float()  # (T, V)
    rows = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def main(policy: str, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    question = [{"role": "user", "content": "What is 5 plus 7?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    tokens = tokenizer.encode(ANSWER, add_special_tokens=False)
    probes = {}
    for seed, (name, rank) in enumerate([("good", 8), ("other", 8), ("wide", 16), ("small", 4)]):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        before = logprobs(base, prompt, tokens)
        settings = LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(base, settings)
        for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
            torch.nn.init.normal_(parameter, std=1.0)
        model.eval()
        probes[name] = {
            "prompt_token_ids": prompt,
            "token_ids": tokens,
            "adapter_logprobs": logprobs(model, prompt, tokens),
            "base_logprobs": before,
        }
        model.save_pretrained(out / name)
    (out / "probes.json").write_text(json.dumps(probes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
