"""`flywheel retrieval`: train and evaluate the encoder with which agents search their tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    absolute,
    command_group,
    load_config,
    open_state,
    print_json,
    require_state,
    run_async,
)
from flywheel.cli.tables import short_path
from flywheel.config.file import Config
from flywheel.errors import ConfigError
from flywheel.retrieval.evaluation import METRICS, MRR
from flywheel.retrieval.pairs import Calls, accepted_calls
from flywheel.system.terminal import escape_terminal, quantity

retrieval = command_group("retrieval", "Search among hundreds of tools: train and evaluate an encoder for it.")

TargetOption = Annotated[str | None, typer.Option("--target", metavar="NAME", help="Only tasks of this target.")]


@retrieval.command()
def train(
    base: Annotated[
        str, typer.Option(metavar="MODEL", help="The encoder to start from, a directory or a name on the Hub.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the encoder and its card go.")],
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Passes over the calls.")] = 3,
    batch_size: Annotated[int, typer.Option(min=2, metavar="N", help="Calls in a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(min=0, metavar="RATE", help="The highest learning rate.")] = 2e-5,
    negatives: Annotated[int, typer.Option(min=0, metavar="N", help="Hard negatives of a call.")] = 4,
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train an encoder on the tools that accepted conversations called; it is kept if it is better.

    It is compared on held-out conversations with its base, BM25 and their fusion, on tools that training has not
    seen. If it is not shown to be better than all three, DIR has no encoder, and BM25 answers there.
    """
    from flywheel.retrieval.encoder import EncoderOptions
    from flywheel.retrieval.trained_encoder import train_encoder

    settings = load_config(config)
    options = EncoderOptions(epochs, batch_size, learning_rate, settings.training.seed)
    made = train_encoder(run_async(_calls(settings, target)), base, absolute(out), options, negatives)
    shown = {**made, "out": str(out), "trained_tools": len(made["trained_tools"])}
    if as_json:
        print_json(shown)
        return
    print(f"{quantity(made['pairs'], 'call')} trained on, {len(made['trained_tools']):,} of {made['tools']:,} tools")
    _print_results(made["results"])
    print()
    where = escape_terminal(short_path(out))
    kept = f"The encoder is in {where}." if not made["reason"] else f"BM25 stays: {escape_terminal(made['reason'])}."
    print(kept)


@retrieval.command()
def evaluate(
    encoder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A directory with an encoder. Default: BM25 alone.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Measure this encoder, too: a directory or a name on the Hub.")
    ] = None,
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how often the called tool is found, on held-out conversations: recall at 1, 5 and 10, and MRR."""
    from flywheel.retrieval.trained_encoder import evaluate_encoder

    settings = load_config(config)
    directory = absolute(encoder) if encoder is not None else None
    results = evaluate_encoder(run_async(_calls(settings, target)), directory, settings.training.seed, base)
    if as_json:
        print_json({"encoder": str(encoder) if encoder is not None else None, "results": results})
        return
    _print_results(results)


async def _calls(config: Config, target: str | None) -> Calls:
    """The tool calls of the accepted tasks."""
    if target is not None and target not in config.targets:
        hint = f"The targets are {', '.join(config.targets)}." if config.targets else "There are no `targets`."
        raise ConfigError("read tool calls", f"there is no target {target}", hint)
    require_state(config, "read tool calls")
    async with open_state(config, "view") as store:
        return await accepted_calls(store, target)


def _print_results(results: Mapping[str, Any]) -> None:

    for name, group in results.items():
        counts = f"{quantity(group['pairs'], 'call')} of {quantity(group['tools'], 'tool')}"
        print(f"\n{name} tools: {counts} in {quantity(group['conversations'], 'conversation')}")
        if not group["pairs"]:
            continue
        width = max(map(len, group["methods"]))
        compared = "   encoder - method, mrr (95 %)" if group["differences"] else ""
        print(f"{'':{width}}  {'  '.join(f'{metric:>9}' for metric in METRICS)}{compared}")
        for method, found in group["methods"].items():
            figures = "  ".join(f"{found[metric]['mean']:9.3f}" for metric in METRICS)
            less = group["differences"].get(method, {}).get(MRR)
            reach = f"   {less['mean']:+.3f} ({less['lower']:+.3f} to {less['upper']:+.3f})" if less else ""
            print(f"{method:{width}}  {figures}{reach}")
