"""What a round does on one NVIDIA GPU: `python -m benchmarks.gpu`. `make gpu-check` also writes the documentation.

`turn_random` and `turn_small` are whole turns: a round in its worker process, and its adapter swapped into a server.
They are measured where vLLM is installed. Everything else is the trainer alone, without Ray, engines and judge.

The model has the sizes of Qwen3-0.6B and random weights, in bfloat16. A step has 64 samples, a prompt of 512 random
tokens and a completion of 256 to 768 each: SFT as replies, DPO as 32 pairs, GRPO as rollouts whose log-probabilities
are those of the unquantised model. Settings are Flywheel's defaults. `grpo_4bit` and `grpo_8bit` are
`model.trainer_quantization`, if bitsandbytes is installed.

`step_s` is the median over the steps after the first, `tokens_per_s` are tokens of prompts and completions without
padding, each counted once, `held_gib` is memory before the first step, `peak_gib` the most (both of torch's tensors).
`logprobs` are mean absolute differences of log-probabilities, in nats. `small_model` is SFT of a genuine model, whose
folder is `--model` (`make model` prints it), on the support desk of `make demo-real`: negative log-likelihoods of
held-out replies, in nats a token, before and after, and after with the adapter on the unquantised base. `memory` is a
step that runs out of memory and is repeated in smaller micro-batches, with the gradient's difference from that of
small micro-batches.

A part that fails says so, and the program ends with 1. `--quick` uses a tiny model, on the CPU if there is no GPU.
`--table` prints the tables of the documentation from the file of figures, `--page` writes them into its page.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks import measurement
from flywheel.system.files import write_atomic

RESULTS: Final = Path(__file__).parent / "results" / "gpu.json"
PAGE: Final = RESULTS.with_suffix(".md")
PLACE: Final = "<!-- table: {} -->"
"""Where the page has a table, which begins in the line after."""
SIZES: Final = {
    "vocab_size": (151_936, 512),
    "hidden_size": (1024, 64),
    "intermediate_size": (3072, 128),
    "num_hidden_layers": (28, 2),
    "num_attention_heads": (16, 4),
    "num_key_value_heads": (8, 2),
    "head_dim": (128, 32),
}
"""Of Qwen3-0.6B, and of a quick run's model."""
PACKAGES: Final = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes")
CASES: Final = {
    "sft": "SFT",
    "dpo": "DPO",
    "grpo": "GRPO",
    "grpo_4bit": "GRPO, `trainer_quantization: 4bit`",
    "grpo_8bit": "GRPO, `trainer_quantization: 8bit`",
}


TURNS: Final = {"random": "Qwen3-0.6B, random weights", "small": "SmolLM2-135M-Instruct"}
TURN_FIGURES: Final = {
    "tokens a second, rollouts": "rollout_tokens_per_s",
    "tokens a second, update": "update_tokens_per_s",
    "`logprob_gap` of the first step": "logprob_gap",
    "GiB at most": "peak_gib",
    "seconds to the first step": "startup_s",
    "of a sync": "sync_s",
    "of the gate": "gate_s",
    "of the round": "round_s",
    "to serve": "serve_s",
    "of a swap": "swap_s",
    "of a rollback": "rollback_s",
}


def parts(scratch: Path, model_dir: str | None, *, quick: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is measured, by name. All rollouts need what the first part measures."""
    from benchmarks import gpu_small_model
    from benchmarks import gpu_training as training

    model = {name: values[quick] for name, values in SIZES.items()}
    size = training.Size(model, 16, (8, 24), 2, 3) if quick else training.Size(model, 512, (256, 768), 8, 6)
    base, samples = training.make_model(size, scratch / "model"), training.make_samples(size)
    quantizations = ("4bit", "8bit") if training.DEVICE == "cuda" and find_spec("bitsandbytes") else ()
    unquantised: list[list[float]] = []

    def logprobs() -> dict[str, Any]:
        of = partial(training.logprobs_of, base, samples=samples)
        exact = of(size.settings(precision="float32"))
        unquantised[:] = of(size.settings())
        differences = {"unquantised": {"from_float32": training.gap(unquantised, exact)}}
        for each in quantizations:
            values = of(size.settings(trainer_quantization=each))
            both = {"from_float32": exact, "from_unquantised": unquantised}
            differences[each] = {name: training.gap(values, other) for name, other in both.items()}
        return differences

    def case(name: str) -> dict[str, Any]:
        stage, _, quantization = name.partition("_")
        rows = training.rollouts(samples, unquantised) if stage == "grpo" else samples
        settings = size.settings(trainer_quantization=quantization or None)
        return training.Run(stage, settings, base, rows).train()

    def memory() -> dict[str, Any]:
        # Two groups show it as well as all of them.
        rows = training.rollouts(samples, unquantised)[: 2 * training.GROUP]
        return training.memory_shortage(size, base, rows, limited=not quick)

    def small_model() -> dict[str, Any]:
        folder = str(training.POLICY) if quick else str(model_dir)
        return gpu_small_model.learn(folder, scratch, quantizations, quick=quick)

    def turn(name: str) -> dict[str, Any]:
        from benchmarks import gpu_round

        return gpu_round.turn(
            base if name == "random" or quick else str(model_dir), scratch / f"turn-{name}", quick=quick
        )

    has_engine = find_spec("vllm") is not None
    turns = [name for name in ("random", "small") if has_engine and (name == "random" or (model_dir and not quick))]
    cases = [name for name in CASES if "_" not in name or name.partition("_")[2] in quantizations]
    own = {"small_model": small_model} if quick or model_dir else {}
    return {
        # Processes of their own, before this one takes memory of the GPU.
        **{f"turn_{name}": partial(turn, name) for name in turns},
        "logprobs": logprobs,
        **{name: partial(case, name) for name in cases},
        **own,
        "memory": memory,
    }


def machine() -> dict[str, str]:
    """Besides what all benchmarks say: the GPU and the versions of packages."""
    import torch

    found = {name: version(name) for name in PACKAGES if find_spec(name)}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"}
    return measurement.machine() | found


def read(results: Path) -> dict[str, Any]:
    """The figures, if there are any."""
    return json.loads(results.read_text()) if results.is_file() else {}


def table(found: Mapping[str, Any]) -> str:
    """The tables of the documentation, as Markdown."""
    return "\n\n".join(tables(found).values())


def written_page(page: str, found: Mapping[str, Any]) -> str:
    """The page with these tables in their places."""
    for name, text in tables(found).items():
        place = PLACE.format(name)
        before, _, after = page.partition(f"{place}\n")
        old = re.match(r"(?:\n(?:\|.*\n)+)?", after)
        assert old is not None
        page = f"{before}{place}\n\n{text}\n{after[old.end() :]}"
    return page


def tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables by name, as Markdown. A part that failed is left out."""
    good = {name: each for name, each in found.items() if "failed" not in each}
    rows: list[tuple[object, ...]] = []
    for name, title in CASES.items():
        if name not in good:
            continue
        each = good[name]
        memory = [_number(each[of], ".1f") for of in ("held_gib", "peak_gib")]
        changed = f"{each['tensors_changed']} of {each['tensors']}"
        speed = f"{each['step_s']:.2f}", f"{each['tokens_per_s']:,}", *memory
        rows.append((title, *speed, each["base"], each["autocast"], each["adapter"], changed))
    heads = ("stage", "seconds a step", "tokens a second", "GiB before", "GiB at most")
    made: dict[str, str] = {}
    if turns := [(title, good[f"turn_{name}"]) for name, title in TURNS.items() if f"turn_{name}" in good]:
        made["turns"] = measurement.markdown(
            ("model", *TURN_FIGURES),
            [(title, *map(_figure, map(each.get, TURN_FIGURES.values()))) for title, each in turns],
        )
    made["steps"] = measurement.markdown((*heads, "frozen weights", "autocast", "adapter", "tensors changed"), rows)
    if "logprobs" in good:
        against = ("from_float32", "from_unquantised")
        gaps = []
        for name, each in good["logprobs"].items():
            run = good.get("grpo" if name == "unquantised" else f"grpo_{name}", {})
            values = (*map(each.get, against), run.get("logprob_gap"))
            gaps.append((name, *(_number(value, ".4f") for value in values)))
        heads = ("base", "from float32, nats", "from unquantised, nats", "`logprob_gap` of the first step")
        made["logprobs"] = measurement.markdown(heads, gaps)
    if "small_model" in good:
        figures = ("from_float32", "from_unquantised", "nll_before", "nll_after", "nll_served")
        small = [
            (name, *(_number(each[of], ".4f") for of in figures), f"{each['step_s']:.2f}")
            for name, each in good["small_model"].items()
        ]
        heads = ("base", "from float32, nats", "from unquantised, nats", "NLL before", "NLL after", "NLL as served")
        made["small_model"] = measurement.markdown((*heads, "seconds a step"), small)
    if "memory" in good:
        each = good["memory"]
        values = [
            ("limit of memory, GiB", _number(each["limit_gib"], ".1f")),
            ("tokens of the pass that was asked for", f"{each['asked_tokens']:,}"),
            ("passes that were repeated, tokens", ", ".join(f"{tokens:,}" for tokens in each["repeated_tokens"])),
            ("tokens that sufficed", f"{each['sufficed_tokens']:,}"),
            ("difference of its gradient from that of small micro-batches", f"{each['gradient_difference']:.1e}"),
            ("the same, without a shortage", f"{each['gradient_difference_undisturbed']:.1e}"),
        ]
        made["memory"] = measurement.markdown(("figure", "value"), values)
    return made


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main() -> None:
    parser = measurement.parser("gpu", __doc__)
    parser.add_argument("--results", type=Path, help=f"write them there, too; of --table: {RESULTS.name}")
    parser.add_argument("--only", nargs="+", metavar="PART", help="measure these parts, and keep the others' figures")
    parser.add_argument("--model", metavar="DIR", help="the genuine model of `small_model`; without it, not measured")
    parser.add_argument("--table", action="store_true", help="print the tables from the file of figures, and end")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} from {RESULTS.name}, and end")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.results or RESULTS)))
        return
    if options.page:
        write_atomic(PAGE, written_page(PAGE.read_text(encoding="utf-8"), read(RESULTS)).encode())
        return
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import torch

    if not options.quick and not torch.cuda.is_available():
        raise SystemExit("there is no GPU; --quick runs on a CPU")
    before, found = machine(), read(options.results) if options.only and options.results else {}
    before = found.pop("machine", {}) | before
    with measurement.folders(options.dir) as (_, scratch):
        for name, part in parts(scratch, options.model, quick=options.quick).items():
            is_asked = not options.only or name in options.only
            if not is_asked and name != "logprobs":
                continue
            try:
                figures = part()
                if is_asked or name not in found:
                    found[name] = figures
            except Exception as error:
                # The other parts are measured all the same: a GPU may be there only once.
                traceback.print_exc()
                found[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            if options.results:
                write_atomic(options.results, f"{json.dumps(found | {'machine': before}, indent=1)}\n".encode())
    measurement.report(found, before, as_json=options.json)
    if failed := [name for name, each in found.items() if "failed" in each]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
