"""The circles of tests, which their markers decide, and the shards into which a run can be divided.

`make test-quick` runs the circle `quick`, `make test` also `test`, `make test-extended` the circle `extended` alone,
and `make test-all` all but `gpu`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
SECONDS_FILE: Final = Path(__file__).parent / "seconds.tsv"
"""Seconds that the tests of each module took in one process, measured; `python -m scripts.test_seconds` writes it."""
SECONDS_OF_A_NEW_MODULE: Final = 2.0

CIRCLES: Final = {"gpu": ("gpu",), "long": ("long",), "extended": ("extended",), "test": ("slow", "e2e"), "quick": ()}
"""Each circle with the markers that put a test into it. The first that fits counts."""

GROUPS: Final = {
    "rounds": ("training/worker/test_round.py", "training/worker/test_killed_round.py",
               "sources/studio/test_manners.py"),
    "vllm": ("serving/server/test_vllm.py", "serving/server/test_full_table.py", "judge/test_vllm.py",
             "cli/test_evaluate_models.py", "cli/test_round_adapter.py", "training/engine/test_chat_rendering.py",
             "training/engine/test_cpu_lora.py"),
    "ray": ("training/engine/ray_session/test_collector.py", "training/engine/ray_session/test_engine.py",
            "training/engine/ray_session/test_endpoint.py", "training/engine/ray_session/test_program_engine.py",
            "training/engine/ray_session/test_recorded_engine.py", "training/engine/ray_session/test_round_stages.py",
            "training/engine/ray_session/test_engine_memory.py", "training/engine/test_two_nodes.py"),
    "small": ("training/engine/ray_session/test_small_model.py",),
    "demo": ("demo/test_demo.py",),
    "torch": ("training/data/formats/test_agentscope.py", "training/data/formats/test_read_back.py",
              "training/data/formats/test_trl.py", "training/data/formats/test_verl.py",
              "training/optim/test_grpo.py", "training/optim/test_trajectory_gradient.py",
              "training/engine/test_recorded_tokens.py", "retrieval/test_trained_encoder.py"),
}  # fmt: skip
"""Modules that share a server, a cluster or a costly import."""
GROUP_OF: Final = {f"tests/{module}": group for group, modules in GROUPS.items() for module in modules}


def circle_of(markers: Collection[str]) -> str:
    """The circle of a test with these markers."""
    return next((circle for circle, needed in CIRCLES.items() if any(each in markers for each in needed)), "quick")


def unit_of(module: str) -> str:
    """What one process runs as a whole: the group of a module (`tests/…/test_x.py`), or the module itself."""
    return GROUP_OF.get(module, module)


def seconds_of_modules() -> dict[str, float]:
    """The committed table."""
    lines = SECONDS_FILE.read_text().splitlines()
    return {module: float(seconds) for module, seconds in (line.split("\t") for line in lines)}


def seconds_of_units(modules: Iterable[str], seconds: Mapping[str, float]) -> Counter[str]:
    """How long the units of these modules take."""
    total: Counter[str] = Counter()
    for module in sorted(modules):
        total[unit_of(module)] += seconds.get(module, SECONDS_OF_A_NEW_MODULE)
    return total


def shards(modules: Iterable[str], seconds: Mapping[str, float], count: int) -> list[set[str]]:
    """`count` sets of units that take about equally long: the longest unit first, each to the shard with least."""
    parts: list[set[str]] = [set() for _ in range(count)]
    totals = [0.0] * count
    units = seconds_of_units(modules, seconds)
    for unit in sorted(units, key=lambda unit: (-units[unit], unit)):
        least = totals.index(min(totals))
        parts[least].add(unit)
        totals[least] += units[unit]
    return parts


def all_modules() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
