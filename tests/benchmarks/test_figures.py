"""The page of limits and figures has what benchmarks keep as JSON, and a command for the rest."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from benchmarks import gpu, loss_selection, overlap, real_model, swap, tool_retrieval
from benchmarks import round as whole_round
from benchmarks.real_model import values_of
from demo.checks import mean_gain

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "limits-and-figures.md"
FOLDER = ROOT / "benchmarks" / "results"


def rows() -> list[tuple[str, str, str, str]]:
    """What was measured, the figures, the command and the date."""
    table = PAGE.read_text().split("| what | measured | command | date |\n")[1].split("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    return [(what, measured, command, date) for what, measured, command, date in cells]


def figures() -> dict[str, set[str]]:
    """The figures as the page should have them, by command."""
    found: dict[str, set[str]] = {}
    for _, measured, command, _ in rows():
        found.setdefault(command.strip("`").removeprefix("python -m benchmarks."), set()).add(measured)
    return found


def kept(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def expected() -> dict[str, set[str]]:
    """The same, of the benchmarks that keep their figures."""
    fields = {
        (row["stages"], row["replies"]): f"{row['fields'][0]:.2f}"
        for row in real_model.rows_of(real_model.read(real_model.RESULTS))
    }
    seeds = [each for name, each in kept(loss_selection.RESULTS).items() if name.isdigit()]
    loss = mean_gain([(values_of(each["loss_topk"], 1), values_of(each["random"], 1)) for each in seeds])
    last = overlap.compared(kept(overlap.RESULTS), overlap.ROUNDS - 1)
    whole, step = whole_round.read(whole_round.RESULTS)["round"], gpu.read(gpu.RESULTS)["grpo"]
    swaps, search = kept(swap.RESULTS), kept(tool_retrieval.RESULTS)["search"]
    rollbacks = ", ".join(f"{swaps['rollback_ms'][name] / 1000:.2f}" for name in swap.CONDITIONS)
    medians = " and ".join(f"{search[f'{method}_full_ms']['median']:.1f}" for method in ("bm25", "fusion"))
    return {
        "real_model": {
            ", ".join(fields["sft", replies] for replies in (32, 128, 672)),
            ", ".join(fields["sft, grpo", replies] for replies in (32, 128)),
        },
        "loss_selection": {f"{loss.mean:+.2f} ({loss.lower:+.2f} to {loss.upper:+.2f})"},
        "round": {f"{whole['floor_ratio']:.2f} and {whole['floor_ratio_overlap_0']:.2f}"},
        "overlap": {f"{last['difference']:+.3f} ({last['interval'][0]:+.3f} to {last['interval'][1]:+.3f})"},
        "gpu": {f"{step['step_s']:.2f} s, {step['tokens_per_s']:,} tokens/s"},
        "swap": {f"{swaps['failed']}, {swaps['wrong_version']}, {swaps['p99_ratio']:.2f}", f"{rollbacks} s"},
        "tool_retrieval": {f"{medians} ms"},
    }


def test_figures_that_a_benchmark_keeps_are_those_of_its_file() -> None:
    on_page, measured = figures(), expected()
    assert {path.stem.replace("-", "_") for path in FOLDER.glob("*.json")} == measured.keys()
    assert {name: on_page.get(name) for name in measured} == measured


def test_every_figure_names_a_command_that_exists_and_its_date() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for what, measured, command, date in rows():
        name = command.strip("`").split()[-1]
        exists = name in targets if command.startswith("`make ") else importlib.util.find_spec(name) is not None
        assert exists, f"{what}: {command}"
        assert re.search(r"\d", measured) and re.fullmatch(r"20\d\d-\d\d-\d\d", date), what
