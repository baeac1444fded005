"""`flywheel init`: a configuration from four answers, with rubrics and filters to edit."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from flywheel import files
from flywheel.cli.app import app, run_async
from flywheel.errors import ExportError
from flywheel.terminal import quantity

STUDIO: Final = Path("~/AgentScope-Studio/database.sqlite")
JUDGE: Final = "https://api.openai.com/v1 gpt-4o-mini"
BASE: Final = "Qwen/Qwen3-4B"
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null"})
"""Plain scalars of YAML that are no text."""
SERVER: Final = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Answers:
    """`source` is `otlp`, `calls` or a path; `judge` is a URL, or a URL and the name of a model."""

    source: str
    judge: str
    base: str
    server: str


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR")] = Path(),
    source: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Path of a Studio database or of a .jsonl file, `otlp`, or `calls` of the server."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="'URL [MODEL]'", help="The judge's endpoint, and its model."),
    ] = None,
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="Base model: a hub name or a directory.")] = None,
    server: Annotated[str | None, typer.Option(metavar="URL", help="The vLLM server of your agents.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take what is found, or the default.")] = False,
    systemd: Annotated[bool, typer.Option("--systemd", help="Also write systemd units.")] = False,
) -> None:
    """Write flywheel.yaml, rubrics and filters to edit, and check the installation.

    On a terminal, it asks for what no option says. Existing files are not changed.
    """
    config = directory / "flywheel.yaml"
    given = {"source": source, "judge": judge, "base": base, "server": server}
    if config.exists():
        if any(given.values()):
            raise ExportError(f"write {config}", "it exists", "Edit it, or name another directory.")
        answers = None
    else:
        answers = _answers(given, asks=not yes and sys.stdin.isatty())
    _write(directory, answers, systemd=systemd)
    _check(config)
    if config.resolve() != Path("flywheel.yaml").resolve():
        typer.echo("To let every command find it:")
        typer.echo(f"export FLYWHEEL_CONFIG={shlex.quote(str(config.absolute()))}")


def _answers(given: dict[str, str | None], *, asks: bool) -> Answers:
    found = str(STUDIO) if STUDIO.expanduser().exists() else "otlp"
    questions = {
        "source": ("Replies come from (a Studio database, a .jsonl file, otlp, calls)", found),
        "judge": ("Judge (endpoint and model)", JUDGE),
        "base": ("Base model (a hub name or a directory)", BASE),
        "server": ("vLLM server of your agents", SERVER),
    }
    answers: dict[str, str] = {}
    for name, (question, default) in questions.items():
        answer = given[name]
        if answer is None:
            answer = typer.prompt(question, default=default) if asks else default
        answers[name] = answer.strip()
    return Answers(**answers)


def _write(directory: Path, answers: Answers | None, *, systemd: bool) -> None:
    """Write what is not there. Raises ExportError."""
    written = 0
    try:
        for target, text in _files_to_write(answers, systemd=systemd):
            file = directory / target
            if file.exists():
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            typer.echo(f"wrote {file}")
            written += 1
    except OSError as error:
        raise ExportError(
            f"set up {directory}", error.strerror or str(error), "Choose a directory that you can write to."
        ) from error
    typer.echo(f"{quantity(written, 'file')}.")


def _files_to_write(answers: Answers | None, *, systemd: bool) -> Iterator[tuple[Path, str]]:
    """The path below the directory and the text of each file."""
    shipped = files.shipped_folder()
    if answers is not None:
        # The shipped configuration is one folder deeper; its paths are relative to its own folder.
        text = (shipped / "configs" / "flywheel.yaml").read_text().replace("../", "")
        yield Path("flywheel.yaml"), configured(text, answers)
    yield Path("flywheel.schema.json"), (shipped / "configs" / "flywheel.schema.json").read_text()
    for name in ("filters", "rubrics", *(("systemd",) if systemd else ())):
        for source in sorted((shipped / name).iterdir()):
            if source.is_file() and not source.name.startswith("__"):
                yield Path(name, source.name), source.read_text()


def configured(text: str, answers: Answers) -> str:
    """The shipped configuration with these answers in place of its values; its comments stay."""
    url, _, model = answers.judge.partition(" ")
    model = model.strip() or JUDGE.partition(" ")[2]
    replaced = {
        r"^(  - )path: .*$": _source(answers.source),
        r"^(  base_url: ).*$": _scalar(url),
        r"^(  model: ).*$": _scalar(model),
        r"^(  base: )\S+": _scalar(answers.base),
    }
    for pattern, value in replaced.items():
        found = re.search(pattern, text, re.MULTILINE)
        assert found is not None, pattern
        text = text[: found.end(1)] + value + text[found.end() :]
    if answers.server != SERVER:
        text += f"\nserving:\n  urls: [{_scalar(answers.server)}] # replicas, with the same key\n"
    return text


def _source(answer: str) -> str:
    if answer == "otlp":
        return "type: otlp # agents send their spans to http://127.0.0.1:4318/v1/traces"
    if answer == "calls":
        return "type: calls # replies are found in what `flywheel serve` records"
    if answer.endswith(".jsonl"):
        return f"{{type: jsonl, path: {_scalar(answer)}}} # a task file of another program"
    return f"path: {_scalar(answer)} # Studio's database; opened read-only"


def _scalar(value: str) -> str:
    """A text as YAML: as it is where nobody takes it for something else, otherwise quoted."""
    is_plain = re.fullmatch(r"[A-Za-z~./][\w~./:@-]*[\w/]", value) and value.lower() not in _WORDS
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _check(config: Path) -> None:
    """Print what the doctor finds. What is missing at first, such as a server, is no failure of this command."""
    from flywheel.cli.doctor import examined, show

    findings = run_async(examined(config, ask_judge=False))
    counts = Counter(finding.result.value for finding in findings)
    typer.echo("")
    show([each for each in findings if each.result.value in ("warning", "failed")], counts)
    typer.echo(f"Edit {config}; `flywheel doctor` checks again, and `flywheel run` starts the daemon.")
