"""What it does to SFT to choose replies by their loss: `python -m benchmarks.loss_selection --model DIR`.

The model that `make model` makes learns the support desk of `make demo-real`, with the settings of its configuration,
from 32 replies that each strategy of `training.coreset` chooses from the same pool of 128: replies of the demo's
large model that its judge accepted, some of them wrong. Trainers, losses and choices are those of a round; answers
are drawn by transformers, not by vLLM: two to each of 96 held-out messages, at temperature 1, checked exactly.
`--table` prints the table of the documentation from the file of figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks import measurement
from benchmarks.real_model import HELD_OUT_MESSAGES, SAMPLES, SEEDS, values_of
from demo.checks import mean_gain
from demo.support_desk.fields import right_fields
from demo.support_desk.messages import HELD_OUT, TEACHER, Message
from demo.support_desk.models import Models
from flywheel.records.coreset import in_order
from flywheel.records.round import SampleCandidate, SamplePool
from flywheel.records.selection import Candidate, SelectionRules, select
from flywheel.system.files import write_atomic

RESULTS: Final = Path(__file__).parent / "results" / "loss-selection.json"
POOL: Final = 128
SIZE: Final = 32
STRATEGIES: Final = ("random", "diversity", "loss_topk", "hybrid")


def accepted(count: int, seed: int) -> list[tuple[Message, str]]:
    """Messages with the large model's replies that the judge accepts: it finds all fields right."""
    messages = TEACHER.draw(2 * count, seed)
    models = Models(messages, seed)
    given = [(message, models.taught(message.text)) for message in messages]
    return [(message, reply) for message, reply in given if all(models.findings(message.text, reply).values())][
        :count
    ]


def chosen(strategy: Any, texts: Sequence[str], losses: Sequence[float], size: int, seed: int) -> list[int]:
    """The places of the replies that a round takes."""
    from flywheel.training.data.loss_selection import by_loss

    rules = SelectionRules(most=size, needed=size, size=size)
    if strategy in ("random", "diversity"):
        candidates = [Candidate(place) for place in range(len(texts))]
        ordered = in_order(candidates, dict(enumerate(texts)), strategy, size, seed)
        return list(select(ordered, rules).tasks)
    names = [f"{place:04}" for place in range(len(texts))]
    candidates_by_name = {name: SampleCandidate(task=place) for place, name in enumerate(names)}
    pool = SamplePool(size=size, strategy=strategy, candidates=candidates_by_name, rules=rules)
    by_name = [dict(zip(names, values, strict=True)) for values in (losses, texts, [1] * len(texts))]
    lines = by_loss(pool, *by_name, seed)
    return [int(line["task_id"]) for line in lines if line["outcome"].startswith("chosen")]


def answers_of(model: Any, base: str, messages: Sequence[Message], seed: int) -> list[str]:
    """Answers at temperature 1, from the whole distribution."""
    import torch
    from transformers import AutoTokenizer

    from benchmarks.gpu_training import DEVICE
    from demo.support_desk.desk import MAX_TOKENS

    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    texts = [
        tokenizer.apply_chat_template(each.chat, add_generation_prompt=True, tokenize=False) for each in messages
    ]
    asked = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(DEVICE)
    torch.manual_seed(seed)
    model.eval()
    model.gradient_checkpointing_disable()
    model.config.use_cache = True
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        made = model.generate(
            **asked, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_TOKENS, use_cache=True,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    return tokenizer.batch_decode(made[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def measure(base: str, seed: int, *, quick: bool) -> dict[str, Any]:
    """The figures of each strategy with one seed: of each held-out phrase how many answers were exactly right, and
    how many fields."""
    from benchmarks import gpu_training as training
    from benchmarks.gpu_small_model import sample_of, settings

    pool = accepted(8 if quick else POOL, seed)
    samples = [sample_of(base, message, reply) for message, reply in pool]
    wrong = [reply != message.ticket.as_json() for message, reply in pool]
    texts = [message.text for message, _ in pool]
    losses = [-fmean(each) for each in training.logprobs_of(base, settings(), samples)]
    asked = HELD_OUT.draw(4 if quick else HELD_OUT_MESSAGES, seed)
    found = {}
    for strategy in STRATEGIES:
        places = chosen(strategy, texts, losses, 4 if quick else SIZE, seed)
        run = training.Run("sft", settings(seed=seed), base, [samples[place] for place in places], seed=seed)
        run.train()
        checked: dict[str, list[tuple[float, float]]] = {}
        for message, answer in zip(asked * SAMPLES, answers_of(run.model, base, asked * SAMPLES, seed), strict=True):
            right = right_fields(answer, message.ticket)
            checked.setdefault(message.phrase, []).append((float(all(right.values())), fmean(right.values())))
        found[strategy] = {
            "wrong": sum(wrong[place] for place in places),
            "loss": fmean(losses[place] for place in places),
            "by_phrase": {
                phrase: [round(fmean(column), 4) for column in zip(*values, strict=True)]
                for phrase, values in checked.items()
            },
        }
        del run
    return found


def table(found: Mapping[str, Any]) -> str:
    """The table of the documentation, as Markdown."""
    seeds = [each for name, each in found.items() if name.isdigit()]
    rows = []
    for strategy in STRATEGIES:
        own = [each[strategy] for each in seeds]
        row = [
            f"`{strategy}`",
            f"{fmean(each['wrong'] for each in own):.1f}",
            f"{fmean(each['loss'] for each in own):.2f}",
        ]
        for of in (0, 1):
            row.append(f"{fmean(fmean(values_of(each, of).values()) for each in own):.2f}")
        for of in (0, 1):
            found = mean_gain((values_of(each[strategy], of), values_of(each["random"], of)) for each in seeds)
            bounds = f"({found.lower:+.2f} to {found.upper:+.2f})"
            row.append("" if strategy == "random" else f"{found.mean:+.2f} {bounds}")
        rows.append(tuple(row))
    heads = ("strategy", "wrong replies", "loss, nats", "all fields right", "fields right")
    return measurement.markdown((*heads, "all fields, over random", "fields, over random"), rows)


def main() -> None:
    parser = measurement.parser("loss_selection", __doc__)
    parser.add_argument("--model", metavar="DIR", help="the folder of the model")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of figures (benchmarks/results)")
    parser.add_argument("--table", action="store_true", help="print the table from the file of figures, and end")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.results.read_text())))
        return
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    from benchmarks.gpu import machine
    from benchmarks.gpu_training import POLICY

    if not (options.model or options.quick):
        parser.error("--model is needed: `make model` prints it")
    found: dict[str, Any] = {}
    for seed in SEEDS[:1] if options.quick else SEEDS:
        found[str(seed)] = measure(options.model or str(POLICY), seed, quick=options.quick)
        if not options.quick:
            about = {**found, "machine": machine()}
            write_atomic(options.results, f"{json.dumps(about, indent=1)}\n".encode())
    measurement.report(found, machine(), as_json=options.json)


if __name__ == "__main__":
    main()
