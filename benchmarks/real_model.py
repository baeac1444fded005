"""What each stage adds on a genuine small model: `python -m benchmarks.real_model`, about five hours on two cores.

SmolLM2-135M-Instruct learns the support desk of `make demo-real` by `flywheel train`, from a large model's recorded
replies that a judge accepted (both are scripts), or from rollouts that the judge scores. Each cell is a list of
stages, a number of recorded replies and a seed. What it is worth is measured on held-out messages at temperature 1,
by exact checks. Settings are committed: those of `configs/demo-real.yaml`, which were chosen with seeds 0 and 1 on
other messages, and `DPO` below, which nobody tuned.

A cell whose figures are in the file of `--results` is not measured again: the benchmark can be stopped at any time
and goes on where it was. `--table` prints the tables of the documentation from that file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import yaml

from benchmarks import measurement
from demo import small_model
from demo.checks import Share, mean_gain, share
from demo.parts import adopt_orphans, end_descendants
from demo.support_desk.desk import MAX_TOKENS
from demo.support_desk.fields import right_fields
from demo.support_desk.messages import DESK, DEVELOPMENT, HELD_OUT, TEACHER, Message
from demo.support_desk.models import Models
from flywheel.cli.demo import judge
from flywheel.system.files import write_atomic

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results" / "real-model.json"
SEEDS: Final = (11, 12, 13)
REPLIES: Final = (32, 128)
PROMPTS: Final = 80
"""Messages of which DPO and GRPO make rollouts: ten steps of eight."""
ROLLOUTS: Final = 8
HELD_OUT_MESSAGES: Final = 96
SAMPLES: Final = 2
"""Answers to each held-out message."""
COMPARED: Final = 16
"""Development messages on which a round compares, which is not what is reported: as few as the gate takes."""
DPO: Final[Mapping[str, Any]] = {"epochs": 2, "learning_rate": 5e-5}
RATE_PROMPTS: Final = 32
PATIENCE_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of a table. `replies` are the accepted recorded replies of SFT, 0 where no stage uses them."""

    stages: tuple[str, ...]
    replies: int
    seed: int

    @property
    def name(self) -> str:
        return "-".join(
            (*(self.stages or ("base",)), *([str(self.replies)] if self.replies else []), f"s{self.seed}")
        )

    @property
    def parent(self) -> Cell | None:
        """The cell whose adapter the last stage starts from; None for the base model."""
        before = self.stages[:-1]
        return Cell(before, self.replies if "sft" in before else 0, self.seed) if before else None

    @property
    def judge_calls(self) -> int:
        """How many replies were judged, with those of the stages before."""
        return (self.replies if "sft" in self.stages else 0) + PROMPTS * ROLLOUTS * (
            "grpo" in self.stages or "dpo" in self.stages
        )


def cells(seeds: Sequence[int] = SEEDS) -> list[Cell]:
    """All, each after the one that it starts from, seed by seed: one that was stopped has every kind of cell."""
    found = []
    for seed in seeds:
        for replies in REPLIES:
            found += [Cell((), 0, seed), Cell(("sft",), replies, seed), Cell(("sft", "grpo"), replies, seed)]
            found += [Cell(("sft", "dpo"), replies, seed), Cell(("grpo",), 0, seed), Cell(("dpo",), 0, seed)]
        # As many judge calls as [sft, grpo] with the fewest replies has.
        found.append(Cell(("sft",), Cell(("sft", "grpo"), REPLIES[0], seed).judge_calls, seed))
    return list(dict.fromkeys(found))


def compared(seed: int) -> list[tuple[Cell, Cell]]:
    """Cells with what they are compared with: what a stage adds on equal replies, then with equal judge calls."""
    found = []
    for replies in REPLIES:
        taught = Cell(("sft",), replies, seed)
        found.append((taught, Cell((), 0, seed)))
        found += [(Cell(("sft", stage), replies, seed), taught) for stage in ("grpo", "dpo")]
    further = [Cell(("sft", stage), REPLIES[0], seed) for stage in ("grpo", "dpo")]
    return found + [(cell, Cell(("sft",), cell.judge_calls, seed)) for cell in further]


class Bench:
    """Trains and measures cells in `folder`, where adapters are kept."""

    def __init__(self, folder: Path, judge_url: str, base: Path) -> None:
        self._folder = folder
        self._judge_url = judge_url
        self._base = base

    def run(self, cell: Cell) -> dict[str, Any]:
        """Train and measure a cell. One without an adapter is measured as what it started from."""
        figures: dict[str, Any] = asdict(cell) | {"judge_calls": cell.judge_calls}
        trained = self._train(cell) if cell.stages else {}
        adapter = self._adapter(cell) if trained.get("adapter") else None
        if cell.stages and adapter is None and cell.parent is not None and cell.parent.stages:
            adapter = self._adapter(cell.parent)
        measured = measurement.measure(_answers, self._base, adapter, cell.seed)
        return figures | {"training": trained, **measured.value}

    def _adapter(self, cell: Cell) -> Path:
        return self._folder / "adapters" / cell.name

    def _train(self, cell: Cell) -> dict[str, Any]:
        """Train the cell's last stage, after the stages before it if their adapters are not there."""
        output, report = self._adapter(cell), self._folder / f"{cell.name}.json"
        if report.is_file():
            kept: dict[str, Any] = json.loads(report.read_text())
            return kept
        parent, stage = cell.parent, cell.stages[-1]
        if parent is not None:
            self._train(parent)
        arguments = ["--data", self._data(cell, stage), "--output", output, "-c", self._config(cell, stage), "--json"]
        if parent is not None:
            arguments += ["--sft-model", self._adapter(parent)]
        if stage != "sft":
            arguments += ["--eval-data", self._rows("compared", DEVELOPMENT.draw(COMPARED, cell.seed))]
            arguments += ["--rubric", ROOT / "demo" / "support_desk" / "rubric.yaml"]
        command = [sys.executable, "-m", "flywheel", "train", stage, *map(str, arguments)]
        log = self._folder / f"{cell.name}.log"
        measured = measurement.measure(_command, command, log)
        if not measured.value:
            raise SystemExit(f"{cell.name}: `flywheel train {stage}` printed no report. See {log}.")
        made = json.loads(measured.value)
        figures = {
            "adapter": made["adapter"] is not None,
            "reason": made["reason"],
            "minutes": round(measured.seconds / 60, 2),
            "peak_gib": round(measured.growth_mb / 1024, 2),
            "rewards": made["rewards"],
            **_rates(Path(made["directory"])),
        }
        write_atomic(report, json.dumps(figures).encode())
        return figures

    def _data(self, cell: Cell, stage: str) -> Path:
        if stage != "sft":
            return self._rows(f"prompts-s{cell.seed}", DESK.draw(PROMPTS, cell.seed))
        # More than enough: of the large model's replies 15 % are wrong, and the judge rejects some right ones.
        messages = TEACHER.draw(2 * cell.replies, cell.seed)
        models = Models(messages, cell.seed)
        replies = {message.text: models.taught(message.text) for message in messages}
        accepted = [each for each in messages if all(models.findings(each.text, replies[each.text]).values())]
        return self._rows(f"replies-{cell.replies}-s{cell.seed}", accepted[: cell.replies], replies)

    def _rows(self, name: str, messages: Sequence[Message], replies: Mapping[str, str] | None = None) -> Path:
        """A file of conversations, with replies where the assistant has answered."""
        path = self._folder / f"{name}.jsonl"
        rows = []
        for message in messages:
            said = [{"role": "assistant", "content": replies[message.text]}] if replies else []
            rows.append(json.dumps({"messages": message.chat + said}))
        path.write_text("\n".join(rows) + "\n")
        return path

    def _config(self, cell: Cell, stage: str) -> Path:
        """The demo's settings of training, for a round on files."""
        settings = yaml.safe_load((ROOT / "configs" / "demo-real.yaml").read_text())
        chosen: dict[str, Any] = {name: settings[name] for name in ("training", "rollout", "judge")}
        chosen["judge"]["base_url"] = self._judge_url
        chosen["training"] |= {"seed": cell.seed, "dpo": dict(DPO), "group_size": ROLLOUTS}
        chosen["model"] = {"base": str(self._base)}
        # The gate's answers have the server's limits, and the base model writes on until it is stopped.
        chosen["serving"] = {"max_model_len": settings["serving"]["max_model_len"]}
        chosen["gate"] = settings["gate"] | {"samples": 1, "max_tasks": COMPARED, "min_tasks": COMPARED}
        path = self._folder / f"{cell.name}-{stage}.yaml"
        path.write_text(yaml.safe_dump(chosen))
        return path


def _command(begin: Any, command: list[str], log: Path) -> bytes:
    """What the command prints. Runs in a process of its own, for `measure`."""
    adopt_orphans()
    begin()
    with log.open("wb") as errors:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, check=False)
    return done.stdout


def _rates(directory: Path) -> dict[str, Any]:
    """Seconds of a step and of its parts, means over the steps of a round."""
    lines = (json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line.get("event") == "step"]
    named = sorted({name for step in steps for name in step if "seconds" in name or name == "tokens_per_second"})

    def mean(name: str) -> Any:
        values = [step[name] for step in steps if step.get(name) is not None]
        if not values or isinstance(values[0], dict):
            return {part: round(fmean(each.get(part, 0.0) for each in values), 2) for part in (values or [{}])[0]}
        return round(fmean(values), 2)

    return {"steps": len(steps), **{name: mean(name) for name in named}}


def _answers(begin: Any, base: Path, adapter: Path | None, seed: int) -> dict[str, Any]:
    """The held-out messages, answered by the model with the adapter, and the rates of generation with and without."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from flywheel.serving.environment_variables import CPU_LORA_VARIABLE

    os.environ[CPU_LORA_VARIABLE] = "1"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_lora_rank": 16} if adapter is not None else {}
    llm = LLM(str(base), max_model_len=256, max_num_seqs=64, seed=seed, enforce_eager=True, **lora)
    loaded = LoRARequest(adapter.name, 1, str(adapter)) if adapter is not None else None
    messages = HELD_OUT.draw(HELD_OUT_MESSAGES, seed)
    begin()

    def ask(parameters: Any, request: Any, asked: Sequence[Message]) -> list[Any]:
        found: list[Any] = llm.chat([each.chat for each in asked], parameters, use_tqdm=False, lora_request=request)
        return found

    sampled = ask(SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=MAX_TOKENS), loaded, messages)
    greedy = ask(SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), loaded, messages)
    fixed = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    rates = {}
    for name, request in {"base": None, "adapter": loaded}.items():
        began = time.perf_counter()
        ask(fixed, request, messages[:RATE_PROMPTS])
        rates[name] = round(RATE_PROMPTS * MAX_TOKENS / (time.perf_counter() - began), 1)
    generation = rates if adapter is not None else {"base": rates["base"]}
    by_phrase, figures = _checked(messages, sampled)
    return {
        "sampled": figures,
        "greedy": _checked(messages, greedy)[1],
        "generation": generation,
        "by_phrase": by_phrase,
    }


def _checked(messages: Sequence[Message], outputs: Sequence[Any]) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The shares of exact answers and of right fields, for each phrase and over all."""
    found: dict[str, list[tuple[float, float]]] = {}
    for message, output in zip(messages, outputs, strict=True):
        for answer in output.outputs:
            right = right_fields(answer.text.strip(), message.ticket).values()
            found.setdefault(message.phrase, []).append((float(all(right)), fmean(right)))
    by_phrase = {phrase: [round(fmean(of), 4) for of in zip(*each, strict=True)] for phrase, each in found.items()}
    exact, fields = (share([(phrase, values[of]) for phrase, values in by_phrase.items()]) for of in (0, 1))
    answers = sum(map(len, found.values()))
    return by_phrase, {
        "exact": exact.as_json(),
        "fields": fields.as_json(),
        "answers": answers,
        "phrases": len(found),
    }


def read(results: Path) -> dict[str, Any]:
    """The figures of the cells that were measured, by name."""
    return json.loads(results.read_text()) if results.is_file() else {}


def write(results: Path, figures: Mapping[str, Any]) -> None:
    """A line for each cell."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in figures.items())
    write_atomic(results, f"{{\n{lines}\n}}\n".encode())


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each list of stages and number of replies: means over the seeds that were measured."""
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells():
        if cell.name in results:
            rows.setdefault((", ".join(cell.stages) or "base", cell.replies), []).append(results[cell.name])
    found = []
    for (stages, replies), each in rows.items():
        row: dict[str, Any] = {"stages": stages, "replies": replies, "seeds": len(each)}
        row["judge_calls"] = each[0]["judge_calls"]
        for name in ("exact", "fields"):
            values = [figures["sampled"][name]["mean"] for figures in each]
            row[name] = fmean(values), min(values), max(values)
        trained = [figures["training"] for figures in each if figures["training"]]
        row["minutes"] = fmean(figures["minutes"] for figures in trained) if trained else None
        row["peak_gib"] = max(figures["peak_gib"] for figures in trained) if trained else None
        row["no_adapter"] = sum(not figures["adapter"] for figures in trained)
        found.append(row)
    return found


def gain(results: Mapping[str, Any], pairs: Iterable[tuple[Cell, Cell]], of: int) -> Any:
    """By how much the first cells are better than the second, by exact answers (`of` 0) or right fields (1): the mean
    over pairs, one for each seed, of each phrase's difference, with its interval over phrases. None where no pair was
    measured."""
    measured = [
        (values_of(results[cell.name], of), values_of(results[over.name], of))
        for cell, over in pairs
        if cell.name in results and over.name in results
    ]
    return mean_gain(measured) if measured else None


def values_of(figures: Mapping[str, Any], of: int) -> dict[str, float]:
    """By phrase the share of exact answers (`of` 0) or of right fields (1)."""
    return {phrase: values[of] for phrase, values in figures["by_phrase"].items()}


def table(results: Mapping[str, Any]) -> str:
    """The tables of the documentation, as Markdown."""
    lines = [
        "| stages | recorded replies | replies judged | all fields right | fields right | minutes | GiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows_of(results):
        shares = [f"{row[name][0]:.2f} ({row[name][1]:.2f} to {row[name][2]:.2f})" for name in ("exact", "fields")]
        cost = [f"{row[name]:.1f}" if row[name] is not None else "" for name in ("minutes", "peak_gib")]
        stages = f"`[{row['stages']}]`" if row["stages"] != "base" else "base model"
        stages += f" (no adapter: {row['no_adapter']} of {row['seeds']})" if row["no_adapter"] else ""
        stages += f", {row['seeds']} of {len(SEEDS)} seeds" if row["seeds"] < len(SEEDS) else ""
        lines.append(_line(stages, row["replies"] or "", row["judge_calls"], *shares, *cost))
    lines += ["", "| compared | all fields right | fields right |", "|---|---:|---:|"]
    for pairs in zip(*map(compared, SEEDS), strict=True):
        found = [gain(results, pairs, of) for of in (0, 1)]
        if all(found):
            lines.append(_line(" over ".join(map(_described, pairs[0])), *map(_signed, found)))
    return "\n".join(lines)


def _described(cell: Cell) -> str:
    return f"`[{', '.join(cell.stages)}]` on {cell.replies} replies" if cell.stages else "the base model"


def _line(*values: object) -> str:
    return f"| {' | '.join(map(str, values))} |"


def _signed(found: Share) -> str:
    return f"{found.mean:+.2f} ({found.lower:+.2f} to {found.upper:+.2f})"


def main() -> None:
    parser = measurement.parser("real_model", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of figures (benchmarks/results)")
    parser.add_argument("--only", nargs="+", metavar="CELL", help="measure these alone, such as sft-grpo-32-s12")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell later than this")
    parser.add_argument("--table", action="store_true", help="print the tables from the file of figures, and end")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.results)))
        return
    folder = (options.dir or measurement.KEPT / "real-model").absolute()
    (folder / "adapters").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    adopt_orphans()
    ends = time.monotonic() + 60 * options.minutes
    base = small_model.for_this_machine()
    measured = {}
    try:
        chosen = [cell for cell in cells() if options.only is None or cell.name in options.only]
        for cell in [Cell(("sft",), 8, SEEDS[0])] if options.quick else chosen:
            known = read(options.results)
            if cell.name not in known and time.monotonic() < ends:
                asked = [*DESK.draw(PROMPTS, cell.seed), *DEVELOPMENT.draw(COMPARED, cell.seed)]
                with judge.running(complete=Models(asked, cell.seed).judge) as judge_url:
                    before = measurement.machine()
                    figures = Bench(folder, judge_url, base).run(cell)
                known = read(options.results) | {cell.name: figures | {"machine": before}}
                write(options.results, known)
                if not options.json:
                    print(cell.name, figures["sampled"], flush=True)
            if cell.name in known:
                measured[cell.name] = known[cell.name]
    finally:
        end_descendants(PATIENCE_SECONDS)
    if options.json:
        print(json.dumps(measured))


if __name__ == "__main__":
    main()
