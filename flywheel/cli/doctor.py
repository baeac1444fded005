"""`flywheel doctor`: check whether this installation works, and what it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flywheel import __version__
from flywheel.cli.app import ConfigOption, JsonOption, app, find_config, load_config, print_json, run_async
from flywheel.cli.tables import estimated, forecast_text, print_facts, short_path
from flywheel.errors import EXIT_CONFIG, EXIT_FAILED
from flywheel.system.terminal import byte_size, escape_terminal, quantity

if TYPE_CHECKING:
    from flywheel.daemon.checkup import Finding
    from flywheel.daemon.resource_plan import Memory

COLOURS: Final = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}
UNKNOWN: Final = "not known"


@app.command()
def doctor(
    config: ConfigOption = None,
    ask_judge: Annotated[
        bool,
        typer.Option(
            "--ask-judge", help="Also ask each judge a short question (some 100 tokens, which may cost money)."
        ),
    ] = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Instead, estimate the GPU memory of server and rounds, and the tokens and cost of judging.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the installation and report problems. Nothing is changed.

    Checks packages, configuration, state, sources, rubric, judge, model, servers and machine. Exit 1 when something
    failed, 78 when configuration, rubric or filter file is wrong.
    """
    path = find_config(config)
    if plan:
        show_plan(path, as_json=as_json)
        return
    findings = look(path, ask_judge=ask_judge)
    counts = Counter(finding.result.value for finding in findings)
    if as_json:
        print_json(
            {
                "version": __version__,
                "config": None if path is None else str(path.absolute()),
                "well": not counts["failed"],
                **{result: counts[result] for result in COLOURS},
                "forecast": next((each.forecast.as_json() for each in findings if each.forecast), None),
                "checks": [_as_json(finding) for finding in findings],
            }
        )
    else:
        show(findings, counts)
    if any(finding.is_file and finding.result == "failed" for finding in findings):
        raise typer.Exit(EXIT_CONFIG)
    if counts["failed"]:
        raise typer.Exit(EXIT_FAILED)


def look(path: Path | None, *, ask_judge: bool = False) -> list[Finding]:
    """Every finding about the configuration at `path`."""
    from flywheel.daemon.checkup import examined

    return run_async(examined(partial(load_config, path), path, ask_judge=ask_judge))


def show(findings: Sequence[Finding], counts: Counter[str]) -> None:
    """Print findings, and how many there are of each result."""
    width = max(map(len, COLOURS))
    rows = [(f"{finding.result.value:<{width}}", finding.name, _text(finding)) for finding in findings]
    print_facts(rows, {f"{result:<{width}}": colour for result, colour in COLOURS.items()})
    typer.echo("\n" + ", ".join(f"{counts[result]} {result}" for result in COLOURS if counts[result]))


def show_plan(path: Path | None, *, as_json: bool) -> None:
    """Print the memory and the judging that the configuration at `path` needs."""
    from flywheel.daemon.checkup import LESS_FOR_SERVER
    from flywheel.daemon.resource_plan import plan_of

    config = load_config(path)
    found = run_async(plan_of(config))
    if as_json:
        print_json(found.as_json())
        return
    model, gpus = found.model, found.gpus
    adapter = None if model.adapter_weights is None else model.adapter_weights * config.training.lora.r
    about = (
        f"weights {_bytes(model.weight_bytes)}; cache of a token {_bytes(model.cache_bytes)};"
        f" adapter of rank {config.training.lora.r} {UNKNOWN if adapter is None else f'{adapter:,} weights'}"
    )
    if model.weight_bytes is None:
        about += (
            f"\nits files are not on this machine: `hf download {config.model.base}`, or set model.base to a folder"
        )
    elif None in (model.cache_bytes, model.adapter_weights):
        about += f"\nwhat is {UNKNOWN} does not follow from the config.json of this kind of model"
    there = ", ".join(f"{gpu.name}, {byte_size(gpu.memory)}" for gpu in gpus) or "none is used here"
    if found.conflict:
        there += f"\n{found.conflict}\n→ {LESS_FOR_SERVER}"
    rows: list[tuple[str, ...]] = [("model", config.model.base, about), ("gpu", "", there)]
    for name, memory in (("server", found.server), ("engine", found.engine), ("trainer", found.trainer)):
        rows.append((name, _bytes(memory.total), _memory_text(memory)))
    if not found.judging:
        rows.append(("judging", UNKNOWN, "the state has no verdict of a judge yet; see `flywheel filter --estimate`"))
    for name, used in found.judging.items():
        answers = f"a {name}, at most {quantity(used['answers'], 'answer')}" if name == "round" else "1,000 tasks"
        text = f"{answers}: {estimated(used)}, as in the last {quantity(used['learned_from'], 'call')}"
        rows.append(("judging", "", text + ("" if used["cost"] else f"; cost {UNKNOWN} without judge.prices")))
    print_facts(rows)


def _bytes(count: int | None) -> str:
    return UNKNOWN if count is None else byte_size(count)


def _memory_text(memory: Memory) -> str:
    """The parts, and what the GPUs have."""
    parts = [f"{name.replace('_', ' ')} {_bytes(count)}" for name, count in memory.parts.items()]
    if memory.tokens is not None:
        parts[-1] += f" for {quantity(memory.tokens, 'token')}"
    lines = [", ".join(parts)]
    if memory.available is not None:
        fits = "" if memory.total is None or memory.total <= memory.available else ", which is too little"
        lines.append(f"{byte_size(memory.available)} are there{fits}")
    if memory.cache_tokens is not None:
        lines.append(f"the cache then holds {quantity(memory.cache_tokens, 'token')}")
    return "\n".join(lines)


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.name,
        "subject": finding.subject,
        "result": finding.result,
        "found": finding.text if finding.forecast is None else forecast_text(finding.forecast),
        "do": finding.remedy,
        "figures": dict(finding.figures),
    }


def _text(finding: Finding) -> str:
    """The subject, the text, and what to do."""
    shown: dict[str, Any] = escape_terminal(_as_json(finding), one_line=True)
    subject = short_path(shown["subject"]) if shown["subject"].startswith("/") else shown["subject"]
    remedy = f"→ {shown['do']}" if shown["do"] and finding.result not in ("ok", "skipped") else ""
    return "\n".join(filter(None, (subject, shown["found"], remedy)))
