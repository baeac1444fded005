"""What a whole training round costs beside its unavoidable work: `python -m benchmarks.round`.

A round trains the demo's tiny policy for 12 steps of 64 rollouts; the judge takes 500 ms and has 16 slots. Each run
is a worker process of its own. Three kinds alternate: `overlap_0` and `overlap_1` (`training.overlap`), and `floor`,
which is `overlap_0` with a judge that takes no time. Every rollout is judged once, and the rewards of every group
differ, so that all runs have the same work; otherwise the benchmark ends with an error. Figures are medians.

`training_s` is from the first sync to the last update. `judge_floor_s` is judge calls × latency / slots;
`compute_floor_s` is generation and updates of the run `floor`, without its syncs and what it waited for the judge.
`floor_ratio` is the larger of both / `training_s` of `overlap_1`. `startup_s` is from the start of the process to the
first sync, `shutdown_s` from the end of the worker's last work (the gate's comparison and probe) to the end of the
process, when Ray and vLLM have ended; both of `overlap_1`. `cpu_s` is of all processes of a run.

`--trl` instead compares with TRL's GRPOTrainer, which generates with transformers, on the same base model, LoRA,
threads, numbers, sampling and judge, asked by the same client: answers of 8, 64 and 256 tokens, judges of 0 and
500 ms. Its `training_s` is from the start of the first step to the end of the last.

Ends of steps and parts of their time are those of `metrics.jsonl`, from which the first sync is known, too.
`--table` prints the tables of the documentation from the file of figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import psutil

from benchmarks import measurement
from benchmarks.round_trl import run_trl
from benchmarks.round_work import (
    HELD_OUT,
    RUBRIC,
    SAMPLES,
    SEED,
    SLOTS,
    TRAIN,
    Judge,
    Work,
    endless,
    tasks,
    with_judge,
)
from flywheel.cli.demo import judge
from flywheel.judge.usage import Purpose, UsageFile
from flywheel.records.round import (
    LOG_FILE,
    METRICS_FILE,
    RESULT_FILE,
    SPEC_FILE,
    GateTest,
    RoundResult,
    RoundSpec,
)
from flywheel.system.files import write_atomic
from flywheel.training.data import rollout_file
from flywheel.training.data.round_progress import read_steps
from flywheel.training.data.step_figures import PARTS, figures_of, times_of

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results" / "round.json"
POLICY: Final = ROOT / "demo" / "policy"
LENGTHS: Final = (8, 64, 256)
POLL_SECONDS: Final = 0.01
SEEN_SECONDS: Final = 0.5
"""How often processor seconds are read: of each process, those since then are missing."""


def run_round(work: Work, directory: Path) -> dict[str, Any]:
    """A round in a worker process of its own."""
    scripted, directory = Judge(work.latency), directory.absolute()
    directory.mkdir()
    with judge.running(complete=scripted) as url:
        spec = RoundSpec(
            round_id="r0001",
            attempt=1,
            seed=SEED,
            debug=False,
            base_model=work.model,
            parent=None,
            train=tasks("train-", 0, TRAIN),
            held_out=tasks("held-", TRAIN, work.held_out),
            rubric=RUBRIC,
            settings=with_judge(work.settings, url).model_dump(mode="json"),
            test=GateTest(epoch=1, number=1, alpha=0.0024) if work.held_out else None,
        )
        (directory / SPEC_FILE).write_text(spec.model_dump_json())
        load, began = os.getloadavg()[0], time.time()
        cpu_seconds, ended = _watch(directory)
    steps = read_steps(directory)
    result = RoundResult.model_validate_json((directory / RESULT_FILE).read_bytes())
    rollouts = list(rollout_file.rollouts(directory))
    used, _ = UsageFile(directory).read(0)
    calls = Counter({purpose: sum(each.calls for each in used if each.purpose is purpose) for purpose in Purpose})
    gate_calls = 2 * SAMPLES * work.held_out
    found = len(steps), len(rollouts), calls[Purpose.ROUNDS], calls[Purpose.GATES], scripted.calls
    wanted = work.steps, work.rollouts, work.rollouts, gate_calls, work.rollouts + gate_calls
    trained = [sum(figure["trained_tokens"] for figure in steps), sum(map(answer_tokens, rollouts))]
    if found != wanted or result.outcome != "trained" or len(set(trained)) > 1:
        raise SystemExit(f"not the work of {work}: {found} and not {wanted}, {result.reason}, {trained} tokens")
    lines = [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]
    phases = {line["phase"]: _at(line) for line in lines if line["event"] == "phase"}
    phase, part = ("evaluating", "evaluate") if work.held_out else ("training", "train")
    times = times_of(figures_of(steps))
    assert times is not None
    first_sync = first_sync_of(steps)
    training = _at(steps[-1]) - first_sync
    return {
        "training_s": training,
        "compute_s": training - times.parts["sync"] - times.parts["grade"],
        **{f"{part}_s": times.parts[part] for part in PARTS},
        "startup_s": first_sync - began,
        "shutdown_s": ended - phases[phase] - result.seconds[part],
        "gate_s": result.seconds.get("evaluate", 0.0),
        "cpu_s": cpu_seconds,
        "load": load,
        "mean_tokens": fmean(map(answer_tokens, rollouts)),
        "rollouts": len(rollouts),
        "judge_calls": calls[Purpose.ROUNDS],
    }


def answer_tokens(rollout: Mapping[str, Any]) -> int:
    return sum(sum(sample["loss_mask"]) for sample in rollout["samples"])


def _at(line: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(line["at"]).timestamp()


def first_sync_of(steps: Sequence[Mapping[str, Any]]) -> float:
    """When the first step's adapter went to the engines (seconds of the clock)."""
    return _at(steps[0]) - float(sum(steps[0]["seconds"].values()))


def _watch(directory: Path) -> tuple[float, float]:
    """Run the worker of a round. Returns its processor seconds with those of its processes, and when it ended
    (seconds of the clock)."""
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "flywheel.training.worker", str(directory)]
    seen = 0.0
    spent: dict[psutil.Process, float] = {}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        # Not by `measurement.measure`: reading all processes' memory so often takes time from a round on two cores.
        while process.poll() is None:
            if time.monotonic() > seen + SEEN_SECONDS:
                spent |= processor_seconds(process.pid)
                seen = time.monotonic()
            time.sleep(POLL_SECONDS)
        ended = time.time()
    finally:
        if process.returncode is None:
            process.terminate()
            process.wait()
    if process.returncode:
        log = (directory / LOG_FILE).read_text()[-3000:] if (directory / LOG_FILE).is_file() else ""
        raise SystemExit(f"{log}\nthe worker of {directory.name} ended with {process.returncode}")
    return sum(spent.values()), ended


def processor_seconds(pid: int) -> dict[psutil.Process, float]:
    """Of a process and of all below it, so far. The system's sums for children lack those that Ray does not wait for,
    a quarter to a half of a round."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for one in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                found[one] = times.user + times.system
    return found


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure over the runs of one kind. Those of the same work are equal."""
    return {name: round(median(each[name] for each in runs), 3) for name in runs[0]}


def check_lengths(found: Mapping[str, Mapping[str, Any]]) -> None:
    """End with an error unless answers of all kinds of runs are equally long, within 10 %."""
    lengths = {kind: each["mean_tokens"] for kind, each in found.items()}
    if max(lengths.values()) > 1.1 * min(lengths.values()):
        raise SystemExit(f"not the same work: {lengths} tokens of an answer")


def alternate(kinds: Mapping[str, Callable[[Path], dict[str, Any]]], scratch: Path, runs: int) -> dict[str, Any]:
    """The medians of each kind of run. Kinds alternate, so that what else the machine does hits all of them."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for number in range(runs):
        for kind, run in kinds.items():
            found[kind].append(run(scratch / f"{kind}-{number}"))
    middle = {kind: medians(each) for kind, each in found.items()}
    check_lengths(middle)
    return middle


def rounds(work: Work, scratch: Path, runs: int) -> dict[str, Any]:
    """The first table."""
    works = {f"overlap_{overlap}": replace(work, overlap=overlap) for overlap in (0, 1)}
    works["floor"] = replace(work, latency=0.0)
    found = alternate({kind: partial(run_round, each) for kind, each in works.items()}, scratch, runs)
    judged = found["overlap_1"]["judge_calls"] * work.latency / SLOTS
    floor = max(judged, found["floor"]["compute_s"])
    return {
        "floor_ratio": round(floor / found["overlap_1"]["training_s"], 3),
        "floor_ratio_overlap_0": round(floor / found["overlap_0"]["training_s"], 3),
        "judge_floor_s": round(judged, 3),
        "compute_floor_s": found["floor"]["compute_s"],
        "startup_s": found["overlap_1"]["startup_s"],
        "shutdown_s": found["overlap_1"]["shutdown_s"],
        "work": asdict(work) | {"model": Path(work.model).name},
        "runs": runs,
        "kinds": found,
    }


def beside_trl(
    work: Work,
    scratch: Path,
    runs: int,
    lengths: Sequence[int],
    latencies: Sequence[float],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The second table: a row for each length of answers and latency of the judge. `keep` gets it after each row."""
    model, rows = endless(Path(work.model), scratch / "model"), list[dict[str, Any]]()
    found = {"work": {"model": Path(work.model).name, "steps": work.steps}, "runs": runs, "rows": rows}
    for tokens in lengths:
        for latency in latencies:
            each = replace(work, model=model, tokens=tokens, latency=latency, held_out=0)
            folder = scratch / f"{tokens}-{latency}"
            folder.mkdir()
            kinds = {f"overlap_{number}": partial(run_round, replace(each, overlap=number)) for number in (0, 1)}
            kinds["trl"] = partial(run_trl, each)
            rows.append({"tokens": tokens, "latency": latency, "kinds": alternate(kinds, folder, runs)})
            keep(found)
    return found


def read(results: Path) -> dict[str, Any]:
    """The figures of both tables, as far as they were measured."""
    return json.loads(results.read_text()) if results.is_file() else {}


def table(results: Mapping[str, Any]) -> str:
    """The tables of the documentation, as Markdown."""
    texts = {"round": _round_table, "trl": _trl_table, "trl_model": _trl_table}
    return "\n\n".join(text(results[name]) for name, text in texts.items() if name in results)


def _round_table(found: Mapping[str, Any]) -> str:
    names = {"overlap_0": "`overlap: 0`", "overlap_1": "`overlap: 1`", "floor": "`overlap: 0`, judge of 0 ms"}
    columns = ("training_s", *(f"{part}_s" for part in ("sync", "generate", "grade")), "gate_s")
    rows = [(name, *(f"{found['kinds'][kind][column]:.1f}" for column in columns)) for kind, name in names.items()]
    waits = ("waits for sync", "for engines", "for the judge")
    first = measurement.markdown(("run", "first sync to last update", *waits, "gate"), rows)
    values = [
        ("judge calls × latency / slots", f"{found['judge_floor_s']:.1f} s"),
        ("generation and updates alone", f"{found['compute_floor_s']:.1f} s"),
        ("the larger / first sync to last update, `overlap: 1`", f"{found['floor_ratio']:.2f}"),
        ("the same, `overlap: 0`", f"{found['floor_ratio_overlap_0']:.2f}"),
        ("start of the process to the first sync", f"{found['startup_s']:.1f} s"),
        ("end of its work to the end of the process", f"{found['shutdown_s']:.1f} s"),
    ]
    return f"{first}\n\n{measurement.markdown(('figure', 'value'), values)}"


def _trl_table(found: Mapping[str, Any]) -> str:
    kinds, rows = ("overlap_0", "overlap_1", "trl"), []
    for row in found["rows"]:
        training, start = (
            [f"{row['kinds'][kind][figure]:.1f}" for kind in kinds] for figure in ("training_s", "startup_s")
        )
        rows.append((row["tokens"], f"{1000 * row['latency']:.0f} ms", *training, *start[1:]))
    heads = ("tokens", "judge", "`overlap: 0`", "`overlap: 1`", "TRL", "start", "TRL's start")
    return measurement.markdown(heads, rows)


def main() -> None:
    parser = measurement.parser("round", __doc__)
    parser.add_argument("--trl", action="store_true", help="compare with TRL's trainer instead")
    parser.add_argument("--model", type=Path, default=POLICY, help="directory of the base model")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind (3)")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (12)")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="with --trl: lengths of answers")
    parser.add_argument("--results", type=Path, help=f"write them there, too; of --table: {RESULTS.name}")
    parser.add_argument("--table", action="store_true", help="print the tables from the file of figures, and end")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.results or RESULTS)))
        return
    steps, latency, runs = (2, 0.05, 1) if options.quick else (options.steps, 0.5, options.runs)
    lengths, held_out = (options.tokens[:1], 8) if options.quick else (options.tokens, HELD_OUT)
    work, before = Work(str(options.model.absolute()), steps, latency, held_out=held_out), measurement.machine()

    def keep(found: dict[str, Any]) -> None:
        if options.results:
            name = "round" if not options.trl else "trl" if options.model.name == POLICY.name else "trl_model"
            known = read(options.results) | {name: found | {"machine": before}}
            write_atomic(options.results, f"{json.dumps(known, indent=1)}\n".encode())

    with measurement.folders(options.dir) as (_, scratch):
        if options.trl:
            latencies = (latency,) if options.quick else (0.0, latency)
            found = beside_trl(work, scratch, runs, lengths, latencies, keep)
        else:
            found = rounds(work, scratch, runs)
            keep(found)
    measurement.report(found, before, as_json=options.json)


if __name__ == "__main__":
    main()
