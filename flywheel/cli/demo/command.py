"""`flywheel demo`: recorded replies and a recorded round, judged and shown, without a model, a key or a GPU."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import webbrowser
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import sqlalchemy
import typer

from flywheel.cli.app import app, open_state, run_async
from flywheel.cli.demo import judge, recorded_round
from flywheel.cli.demo.recorded_round import REPLIES_FILE, Recording
from flywheel.cli.progress_bars import of_tasks
from flywheel.cli.tables import Row, print_rows, stdout
from flywheel.config.file import Config, load
from flywheel.daemon.judging.judging import TaskJudging
from flywheel.daemon.judging.judging_report import TaskResult
from flywheel.errors import ExportError
from flywheel.records.request_id import UNRECORDED
from flywheel.records.verdict import Verdict
from flywheel.sources.ingestion import Ingestion
from flywheel.store.views import acceptance
from flywheel.store.views.acceptance import AdapterAcceptance
from flywheel.system.files import shipped_folder
from flywheel.system.process import tune_process
from flywheel.system.signals import Stop
from flywheel.system.web_server import bound_socket
from flywheel.web import server

CONFIG: Final = """# `flywheel demo`: replies of an agent, as AgentScope Studio stores them, and a round that
# `make demo` trained on them. Both are recorded; nothing is trained or served here.
state: {{dir: state}}
sources:
  - {{type: studio, path: replies.sqlite}}
model: {{base: {base}, alias: demo-agent}}
judge: {{base_url: {judge}, model: demo-judge}} # a script that checks sums; it runs while `flywheel demo` does
filter: {{rubric: math-boxed.yaml}}
trigger: {{min_samples: 64, min_held_out: 32}}
gate: {{max_tasks: 64, samples: 4, alpha: 0.05, min_power: 0}}
"""
EXAMPLES: Final = 6
"""Verdicts that are shown with their reasons, of as many kinds as there are."""
DESKTOP: Final = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Variables of which one is set where a browser can be opened."""


@app.command()
def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Keep the files in this directory, which must be new or empty."),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Exit after printing the table.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the web UI; 0 chooses a free port.")] = 0,
) -> None:
    """Read and judge recorded replies, add the round that was trained on them, and open the web UI."""
    tune_process()
    kept = tempfile.TemporaryDirectory(prefix="flywheel-demo-") if folder is None else nullcontext(str(folder))
    with kept as name, judge.running() as address:
        recording = recorded_round.shipped()
        config = _laid_out(Path(name), address, recording)
        result = run_async(_judged(config, recording))
        # The default handler would leave the temporary directory.
        signal.signal(signal.SIGTERM, _end)
        _print(result)
        if folder is not None:
            typer.echo(f"\nEverything is in {name}: try `flywheel status -c {Path(name) / 'flywheel.yaml'}`.")
        if not no_browser:
            _show(config, port)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _laid_out(folder: Path, judge_url: str, recording: Recording) -> Config:
    """Write replies, rubric and configuration. Raises ExportError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ExportError(f"lay out the demo in {folder}", "it is not empty", "Name a new directory.")
        with closing(sqlite3.connect(folder / "replies.sqlite")) as database:
            database.executescript(recording.files[REPLIES_FILE].decode())
        shutil.copy(shipped_folder() / "rubrics" / "math-boxed.yaml", folder)
        (folder / "flywheel.yaml").write_text(CONFIG.format(judge=judge_url, base=recording.round.base_model))
    except (OSError, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ExportError(f"lay out the demo in {folder}", why, "Name a directory that you can write to.") from error
    return load(folder / "flywheel.yaml")


@dataclass(frozen=True, slots=True)
class DemoResult:
    """How many replies there are, the judged tasks by id with their verdicts, and the counts of each adapter."""

    round: sqlalchemy.Row[Any]
    replies: int
    tasks: dict[str, tuple[Mapping[str, Any], Verdict]]
    by_adapter: list[AdapterAcceptance]


async def _judged(config: Config, recording: Recording) -> DemoResult:
    """Ingest and judge everything, and add the round. Raises what went wrong."""
    stop = Stop(config.daemon.drain_seconds)
    async with open_state(config, lock=True) as store:
        ingestion = Ingestion(store, config)
        try:
            [source] = await ingestion.run(final=True)
        finally:
            await ingestion.close()
        if source.error is not None:
            raise source.error
        judging = TaskJudging(store, config)
        tasks: dict[str, tuple[Mapping[str, Any], Verdict]] = {}
        with of_tasks("judging", await judging.count(), quiet=False) as step:

            def on_judged(judged: TaskResult) -> None:
                if judged.verdict is not None:
                    tasks[judged.task.key] = judged.task.line, judged.verdict
                step()

            report = await stop.during(judging.run(stop=stop, on_judged=on_judged))
        if stop.by is not None or report is None:
            raise stop.error("judge the replies of the demo", "Start it again.")
        if report.error is not None:
            raise report.error
        row = await store.write(recorded_round.store, recording.round, config)
        recorded_round.write_files(recording, Path(row.dir))
        by_adapter, _ = await store.read(acceptance.by_adapter, config.models_of(None))
        return DemoResult(row, source.counts.replies, tasks, by_adapter)


def _print(result: DemoResult) -> None:
    console = stdout()
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for _, (line, verdict) in sorted(result.tasks.items()):
        why = next((criterion.reason for criterion in verdict.results if not criterion.passed), "")
        cells = line["main_query"], line["answer"], verdict.outcome.value, ", ".join(verdict.failed) or "–", why
        kinds.setdefault((verdict.outcome, *verdict.failed), []).append(Row(cells))
    examples = [row for rows in kinds.values() for row in rows[: max(1, EXAMPLES // len(kinds))]]
    print_rows(console, ("question", "answer", "verdict", "not met", "why"), examples, wide=0, fold=("answer", "why"))
    console.print()
    rows = []
    for each in result.by_adapter:
        share = "–" if each.acceptance is None else f"{each.acceptance:.0%}"
        name = {"": "base model", UNRECORDED: "no recorded model"}.get(each.adapter, each.adapter)
        rows.append(Row((name, str(each.accepted + each.rejected), str(each.accepted), share)))
    print_rows(console, ("answered by", "judged", "accepted", "share"), rows, wide=0, fold=())
    failures = Counter(name for _, verdict in result.tasks.values() for name in verdict.failed)
    missed = ", ".join(f"{name} {number}" for name, number in failures.most_common())
    console.print(f"\n{result.replies} replies of an AgentScope Studio database; criteria not met: {missed}")
    console.print("The judge was a script that checks sums: no model was asked.")
    ended = f"{result.round.state} on {result.round.finished_at[:10]}"
    console.print(
        f"Replies and round {result.round.name} ({ended}) are recorded from `make demo`: nothing was trained."
    )


def _show(config: Config, port: int) -> None:
    """Serve the pages until Ctrl-C, and open them in a browser, if there is one."""
    listening = bound_socket("serve the pages of the demo", "127.0.0.1", port, "--port")
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/"

    def announce() -> None:
        typer.echo(f"\nThe web UI is at {address} (Ctrl-C stops them)")
        # Without a desktop, a browser for terminals would take this one.
        if any(os.environ.get(name) for name in DESKTOP):
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    # Ctrl-C is how it is meant to end.
    with suppress(KeyboardInterrupt):
        run_async(server.serve(server.application(config), listening, announce))
