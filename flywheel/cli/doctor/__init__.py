"""`flywheel doctor`: check whether this installation works, and what it lacks. The checks read and change nothing.

torch, vLLM and Ray are never imported here: versions come from package metadata, GPUs from a separate process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from flywheel import __version__
from flywheel.cli.app import ConfigOption, JsonOption, app, find_config, load_config, print_json, run_async
from flywheel.cli.tables import print_facts, short_path
from flywheel.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, FlywheelError
from flywheel.system.terminal import escape_terminal

if TYPE_CHECKING:
    from flywheel.daemon.forecast import Forecast


class Result(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """`name` is the check; `subject` is the source or server, where there are several; `remedy` says what to do.

    `figures` are numbers for programs, with their units in their names. `is_file` is set when a file that users write
    is wrong: configuration, rubric or filter chain. `forecast` is that of the check of this name.
    """

    name: str
    result: Result
    text: str
    remedy: str = ""
    subject: str = ""
    figures: Mapping[str, int] = field(default_factory=dict)
    is_file: bool = False
    forecast: Forecast | None = None

    @classmethod
    def from_error(cls, name: str, error: FlywheelError, *, subject: str = "") -> Self:
        """An error as a failed check."""
        why = f"cannot {error.attempted}: {error.why.rstrip('.')}"
        return cls(name, Result.FAILED, why, error.hint, subject, is_file=isinstance(error, ConfigError))

    def as_json(self) -> dict[str, Any]:
        shown = {"name": self.name, "subject": self.subject, "result": self.result, "found": self.text}
        return {**shown, "do": self.remedy, "figures": dict(self.figures)}


COLOURS: Final = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


@app.command()
def doctor(
    config: ConfigOption = None,
    ask_judge: Annotated[
        bool,
        typer.Option(
            "--ask-judge",
            help="Also ask each judge a short question in each response format (some 300 tokens, which may cost"
            " money).",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the installation and report problems. Nothing is changed.

    Checks packages, configuration, state, sources, rubric, judge, model, servers and machine. Exit 1 when something
    failed, 78 when configuration, rubric or filter file is wrong.
    """
    path = find_config(config)
    findings = run_async(examined(path, ask_judge))
    counts = Counter(finding.result.value for finding in findings)
    if as_json:
        print_json(
            {
                "version": __version__,
                "config": None if path is None else str(path.absolute()),
                "well": not counts["failed"],
                **{result: counts[result] for result in COLOURS},
                "forecast": next((each.forecast.as_json() for each in findings if each.forecast), None),
                "checks": [finding.as_json() for finding in findings],
            }
        )
    else:
        show(findings, counts)
    if any(finding.is_file and finding.result == "failed" for finding in findings):
        raise typer.Exit(EXIT_CONFIG)
    if counts["failed"]:
        raise typer.Exit(EXIT_FAILED)


async def examined(path: Path | None, ask_judge: bool) -> list[Finding]:
    """Every finding about the configuration at `path`."""
    return [finding async for finding in _checks(path, ask_judge)]


async def _checks(path: Path | None, ask_judge: bool) -> AsyncIterator[Finding]:
    """All checks, in the order in which people fix things. Most need a configuration that can be read."""
    from flywheel.cli.doctor import data, judge, machine, serving

    yield machine.check_extra()
    try:
        config = load_config(path)
    except ConfigError as error:
        yield Finding.from_error("configuration", error)
        yield machine.check_unit(None, path)
        return
    yield _configuration(path)
    for finding in (*data.check_state(config), *data.check_sources(config)):
        yield finding
    yield await data.check_forecast(config)
    yield await data.check_recordings(config)
    yield data.check_rounds(config)
    for finding in judge.check_judge(config, ask=ask_judge):
        yield finding
    base = serving.base_of(config.model.base)
    yield serving.check_model(config, base)
    yield serving.check_serve(config)
    async for finding in serving.check_servers(config):
        yield finding
    yield machine.check_gpu(config, base)
    for finding in (
        *machine.check_trackers(config),
        *machine.check_notify(config),
        *machine.check_export(config),
    ):
        yield finding
    yield machine.check_unit(config, path)


def _configuration(path: Path | None) -> Finding:
    if path is None:
        remedy = "Name one with -c, $FLYWHEEL_CONFIG or ./flywheel.yaml; `flywheel init` writes one."
        return Finding("configuration", Result.WARNING, "none: the defaults apply", remedy)
    return Finding("configuration", Result.OK, str(path.absolute()))


def show(findings: Sequence[Finding], counts: Counter[str]) -> None:
    """Print findings, and how many there are of each result."""
    width = max(map(len, COLOURS))
    rows = [(f"{finding.result.value:<{width}}", finding.name, _text(finding)) for finding in findings]
    print_facts(rows, {f"{result:<{width}}": colour for result, colour in COLOURS.items()})
    typer.echo("\n" + ", ".join(f"{counts[result]} {result}" for result in COLOURS if counts[result]))


def _text(finding: Finding) -> str:
    """The subject, the text, and what to do."""
    shown: dict[str, Any] = escape_terminal(finding.as_json(), one_line=True)
    subject = short_path(shown["subject"]) if shown["subject"].startswith("/") else shown["subject"]
    remedy = f"→ {shown['do']}" if shown["do"] and finding.result not in ("ok", "skipped") else ""
    return "\n".join(filter(None, (subject, shown["found"], remedy)))
