"""What rollouts that are one update old cost: `python -m benchmarks.overlap`, about 25 minutes on two cores.

For each seed, two rounds in a row train the demo's policy on sums, once with `training.overlap: 0` and once with 1,
with equally many rollouts of the same prompts. The second round starts from the first one's adapter. What it reaches
is its reward on held-out questions, from an exact judge. Results are kept by seed: a run that was stopped goes on.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import yaml

from benchmarks import measurement
from demo.checks import interval
from flywheel.cli.demo import judge
from flywheel.cli.demo.questions import SYSTEM_PROMPT, questions
from flywheel.system.files import write_atomic

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results" / "overlap.json"
SEEDS: Final = (21, 22, 23, 24, 25)
ROUNDS: Final = 2
HELD_OUT: Final = 64
TRAINED: Final = 96


def _rows(path: Path, first: int, count: int) -> Path:
    """Questions as conversations, the same order in every run."""
    every = questions()
    random.Random(1).shuffle(every)
    rows = [
        json.dumps(
            {
                "messages": [
                    {"role": "system", "content": SYSTEM_PROMPT},
                    {"role": "user", "content": question.text},
                    {"role": "assistant", "content": f"\\boxed{{{question.answer}}}"},
                ]
            }
        )
        for question in every[first : first + count]
    ]
    path.write_text("\n".join(rows) + "\n")
    return path


def _run(folder: Path, judge_url: str, seed: int, overlap: int, *, steps: int) -> dict[str, Any]:
    """The held-out score of each task after each round, and what the rounds took."""
    settings = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    chosen: dict[str, Any] = {name: settings[name] for name in ("training", "rollout", "judge", "gate")}
    chosen["judge"]["base_url"] = judge_url
    chosen["model"] = {"base": str(ROOT / "demo" / "policy")}
    chosen["rollout"] = {"max_completion_tokens": 16, "max_model_len": 128}
    chosen["training"] |= {"seed": seed, "overlap": overlap, "steps": steps}
    chosen["gate"] |= {"min_tasks": 8, "max_tasks": HELD_OUT}
    config = folder / f"s{seed}-{overlap}.yaml"
    config.write_text(yaml.safe_dump(chosen))
    held_out, adapter, found = _rows(folder / "held-out.jsonl", 0, HELD_OUT), None, []
    for number in range(ROUNDS):
        output = folder / f"s{seed}-{overlap}-{number + 1}"
        data = _rows(folder / f"train-{number}.jsonl", HELD_OUT + number * TRAINED, TRAINED)
        arguments = ["--data", data, "--eval-data", held_out, "--output", output, "-c", config, "--json"]
        arguments += ["--rubric", ROOT / "rubrics" / "math-boxed.yaml"]
        arguments += ["--sft-model", adapter] if adapter is not None else []
        command = [sys.executable, "-m", "flywheel", "train", "grpo", *map(str, arguments)]
        with output.with_suffix(".log").open("wb") as log:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, check=False)
        if not done.stdout:
            raise SystemExit(f"seed {seed}, overlap {overlap}: no report. See {output.with_suffix('.log')}.")
        made = json.loads(done.stdout)
        if made["adapter"] is None:
            raise SystemExit(f"seed {seed}, overlap {overlap}: no adapter: {made['reason']}")
        result = json.loads((Path(made["directory"]) / "result.json").read_text())
        scores = {each["task_id"]: each["candidate"] for each in result["comparison"]["scores"]}
        found.append(
            {"scores": scores, "rollouts": result["usage"]["rollouts"], "train_seconds": result["seconds"]["train"]}
        )
        adapter = output
    return {"rounds": found}


def compared(results: dict[str, Any], number: int) -> dict[str, Any]:
    """The mean scores after a round, and the mean over seeds of the difference with Student's 95 % interval."""
    means: dict[int, list[float]] = {0: [], 1: []}
    for figures in results.values():
        for overlap, own in means.items():
            own.append(fmean(figures[str(overlap)]["rounds"][number]["scores"].values()))
    gains = [one - zero for zero, one in zip(means[0], means[1], strict=True)]
    found = interval(gains) if len(gains) > 1 else None
    seconds = {
        overlap: fmean(figures[str(overlap)]["rounds"][number]["train_seconds"] for figures in results.values())
        for overlap in means
    }
    return {
        "round": number + 1,
        "seeds": len(gains),
        "overlap_0": fmean(means[0]),
        "overlap_1": fmean(means[1]),
        "difference": fmean(gains),
        "interval": [found.lower, found.upper] if found is not None else None,
        "train_seconds": [seconds[0], seconds[1]],
    }


def table(results: dict[str, Any]) -> str:
    """The table of the documentation, as Markdown."""
    lines = [
        "| after round | seeds | overlap 0 | overlap 1 | difference (95 %) | seconds of training |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for number in range(ROUNDS):
        row = compared(results, number)
        reach = " to ".join(f"{value:+.3f}" for value in row["interval"] or ())
        took = " and ".join(f"{value:.0f}" for value in row["train_seconds"])
        lines.append(
            f"| {row['round']} | {row['seeds']} | {row['overlap_0']:.3f} | {row['overlap_1']:.3f}"
            f" | {row['difference']:+.3f} ({reach}) | {took} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = measurement.parser("overlap", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of figures (benchmarks/results)")
    parser.add_argument("--table", action="store_true", help="print the table from the file of figures, and end")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.is_file() else {}
    if options.table:
        print(table(results))
        return
    folder = (options.dir or measurement.KEPT / "overlap").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with judge.running() as judge_url:
        for seed in SEEDS[:1] if options.quick else SEEDS:
            if str(seed) not in results:
                before = measurement.machine()
                steps = 2 if options.quick else 12
                own = {str(overlap): _run(folder, judge_url, seed, overlap, steps=steps) for overlap in (0, 1)}
                results[str(seed)] = {**own, "machine": before}
                if not options.quick:
                    write_atomic(options.results, (json.dumps(results, indent=1) + "\n").encode())
    found = [compared(results, number) for number in range(ROUNDS)]
    print(json.dumps(found) if options.json else table(results))


if __name__ == "__main__":
    main()
