"""`flywheel init`: the files that Flywheel ships, to edit."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from flywheel.cli.app import app
from flywheel.errors import ExportError
from flywheel.system import files
from flywheel.system.http_client import is_http_url
from flywheel.system.terminal import quantity

STUDIO: Final = Path("~/AgentScope-Studio/database.sqlite")
JUDGE: Final = "https://api.openai.com/v1 gpt-4o-mini"
BASE: Final = "Qwen/Qwen3-4B"
SOURCES: Final = """Where do the replies of your agents come from?
  PATH   an AgentScope Studio database, or a .jsonl file with a question and an answer in each line
  otlp   spans that the agents send to Flywheel by OpenTelemetry, at http://127.0.0.1:4318/v1/traces
  calls  the call log of `flywheel serve`, which records the agents' requests: they need no tracing"""
SQLITE: Final = b"SQLite format 3\0"
STATE: Final = Path("/var/lib/flywheel")
"""The `StateDirectory` of the shipped units."""
UNITS_CONFIG: Final = Path("/etc/flywheel")
"""Where the shipped units read the configuration; those of several instances in folders of their names."""
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null"})
"""Plain scalars of YAML that are no text."""
SERVER: Final = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class InitAnswers:
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
            metavar="SOURCE", help="A Studio database, a .jsonl file, `otlp`, or `calls` (the server's call log)."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="'URL [MODEL]'", help="Endpoint and model of the judge."),
    ] = None,
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="Base model: a hub name or a directory.")] = None,
    server: Annotated[str | None, typer.Option(metavar="URL", help="The vLLM server of your agents.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing: use what is detected, otherwise the defaults.")
    ] = False,
    systemd: Annotated[bool, typer.Option("--systemd", help="Also write systemd units.")] = False,
) -> None:
    """Write flywheel.yaml, rubrics and filters to edit, and check the installation.

    On a terminal, it asks for settings that are not given as options. Existing files are not changed.
    """
    config = directory / "flywheel.yaml"
    options = {"source": source, "judge": judge, "base": base, "server": server}
    if config.exists():
        if any(options.values()):
            raise ExportError(f"write {config}", "it exists", "Edit it, or name another directory.")
        answers = None
    else:
        is_terminal = sys.stdin is not None and sys.stdin.isatty()
        answers = _answers(options, directory, asks=not yes and is_terminal)
    _write(directory, answers, systemd=systemd)
    _check(config)
    if config.resolve() != Path("flywheel.yaml").resolve():
        typer.echo("To let every command find it:")
        typer.echo(f"export FLYWHEEL_CONFIG={shlex.quote(str(config.absolute()))}")


def _answers(options: dict[str, str | None], directory: Path, *, asks: bool) -> InitAnswers:
    """Raises BadParameter for an option that cannot be used; a question is asked again."""
    detected = str(STUDIO) if STUDIO.expanduser().exists() else "otlp"
    questions = {
        "source": (f"{SOURCES}\nSource", detected),
        "judge": ("Judge (endpoint and model)", JUDGE),
        "base": ("Base model (a hub name or a directory)", BASE),
        "server": ("vLLM server of your agents", SERVER),
    }
    answers = {}
    for name, (question, default) in questions.items():
        checked, given = partial(_checked, name, directory), options[name]
        if given is not None or not asks:
            answers[name] = checked(given or default)
            continue
        answer, kept = typer.prompt(question, default=default, value_proc=checked), ""
        while name == "judge" and answer != kept and _lacks_model(answer):
            doubt = f"no model after the URL: {JUDGE.partition(' ')[2]} would be used"
            typer.echo(f"{doubt}. Press Enter to keep it, or give another answer.")
            kept, answer = answer, typer.prompt(question, default=answer, value_proc=checked)
        answers[name] = answer
    return InitAnswers(**answers)


def _lacks_model(judge: str) -> bool:
    """Whether the default model is hardly meant: it is that of another URL."""
    return " " not in judge and judge != JUDGE.partition(" ")[0]


def _checked(name: str, directory: Path, answer: str) -> str:
    """An answer without blanks around it. Raises BadParameter for what cannot be used."""
    answer, wrong = answer.strip(), ""
    url, _, model = answer.partition(" ")
    if name in ("judge", "server") and not is_http_url(url):
        wrong = f"{url} is no URL: it begins with http:// or https://"
    elif name in ("judge", "server") and len(model.split()) > (name == "judge"):
        wrong = f"{answer} is not {'a URL and the name of a model' if name == 'judge' else 'one URL'}"
    elif name == "base" and not re.fullmatch(r"[/.~].*|[\w.-]+(/[\w.-]+)?", answer):
        wrong = f"{answer} is neither a hub name such as {BASE} nor the path of a directory"
    elif name == "source" and answer not in ("otlp", "calls"):
        wrong = _wrong_file(directory / Path(answer).expanduser())
    if wrong:
        raise typer.BadParameter(wrong, param_hint=f"--{name}")
    return answer


def _wrong_file(path: Path) -> str:
    """Why a file can be no source; empty if it can, or is not there yet."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(SQLITE))
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} is no file that can be read: {error.strerror}"
    if begin not in (b"", SQLITE) and not files.holds_lines(path):
        return f"{path} is no Studio database (SQLite), and its name ends with neither .jsonl nor .ndjson"
    return ""


def _write(directory: Path, answers: InitAnswers | None, *, systemd: bool) -> None:
    """Write what is not there. Raises ExportError."""
    written = 0
    try:
        for target, text in _files_to_write(directory.absolute(), answers, systemd=systemd):
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


def _files_to_write(directory: Path, answers: InitAnswers | None, *, systemd: bool) -> Iterator[tuple[Path, str]]:
    """The path below the directory and the text of each file."""
    shipped = files.shipped_folder()
    if answers is not None:
        # The shipped configuration is one folder deeper; its paths are relative to its own folder.
        text = (shipped / "configs" / "flywheel.yaml").read_text().replace("../", "")
        state = STATE if systemd else Path("state")
        if systemd and directory.is_relative_to(UNITS_CONFIG):
            state /= directory.relative_to(UNITS_CONFIG)
        yield Path("flywheel.yaml"), configured(text, answers, state)
    yield Path("flywheel.schema.json"), (shipped / "configs" / "flywheel.schema.json").read_text()
    for name in ("filters", "rubrics", *(("systemd",) if systemd else ())):
        for source in sorted((shipped / name).iterdir()):
            if source.is_file() and not source.name.startswith("__"):
                yield Path(name, source.name), source.read_text()


def configured(text: str, answers: InitAnswers, state: Path) -> str:
    """The shipped configuration with these values in place of its own; its comments stay."""
    url, _, model = answers.judge.partition(" ")
    model = model.strip() or JUDGE.partition(" ")[2]
    replaced = {
        r"^()# state: .*$": f"state: {{dir: {_scalar(str(state))}}} # what Flywheel has read, judged and trained",
        r"^(  - )path: .*$": _source(answers.source),
        r"^(  base_url: ).*$": _scalar(url),
        r"^(  model: ).*$": _scalar(model),
        r"^(  base: )\S+": _scalar(answers.base),
    }
    for pattern, value in replaced.items():
        match = re.search(pattern, text, re.MULTILINE)
        assert match is not None, pattern
        text = text[: match.end(1)] + value + text[match.end() :]
    if answers.server != SERVER:
        text += f"\nserving:\n  urls: [{_scalar(answers.server)}] # replicas, with the same key\n"
    return text


def _source(answer: str) -> str:
    if answer == "otlp":
        return "type: otlp # agents send their spans to http://127.0.0.1:4318/v1/traces"
    if answer == "calls":
        return "type: calls # replies are found in what `flywheel serve` records"
    if files.holds_lines(Path(answer)):
        return f"{{type: jsonl, path: {_scalar(answer)}}} # a task file of another program"
    return f"path: {_scalar(answer)} # Studio's database; opened read-only"


def _scalar(value: str) -> str:
    """A text as YAML: as it is where nobody takes it for something else, otherwise quoted."""
    is_plain = re.fullmatch(r"[A-Za-z~./][\w~./:@-]*[\w/]", value) and value.lower() not in _WORDS
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _check(config: Path) -> None:
    """Print what the doctor finds. What is missing at first, such as a server, is no failure of this command."""
    from flywheel.cli.doctor import look, show

    findings = look(config)
    counts = Counter(finding.result.value for finding in findings)
    typer.echo("")
    show([each for each in findings if each.result.value in ("warning", "failed")], counts)
    typer.echo(f"Edit {config}; `flywheel doctor` checks again, and `flywheel run` starts the daemon.")
