"""`flywheel run`: the daemon."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from flywheel.cli.app import ConfigOption, app, find_config, given_settings, load_config, open_state, run_async
from flywheel.config.file import Config
from flywheel.daemon.rounds.by_hand import left_of_round
from flywheel.daemon.service import Service
from flywheel.errors import FlywheelError
from flywheel.system.process import tune_process
from flywheel.system.signals import Stop

log = logging.getLogger(__name__)

WEB_STOP_SECONDS: Final = 10


@app.command()
def run(
    config: ConfigOption = None,
    once: Annotated[bool, typer.Option("--once", help="Do all due work, then exit.")] = False,
    max_rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Exit after this many finished rounds.")
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Also start `flywheel web`, and stop it with the daemon.")
    ] = False,
    web_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the web UI; 0 chooses a free port.")
    ] = 4400,
) -> None:
    """Run the daemon: read sources, judge replies, train and deploy adapters, until it is stopped."""
    tune_process()
    # After a crash in a library, or when a service manager aborts the process, all stacks are on stderr.
    with contextlib.suppress(OSError, ValueError):  # it is no file
        faulthandler.enable()
    settings = load_config(config)
    if web and web_port:
        from flywheel.system.web_server import bound_socket

        # Else the daemon would start without its pages, whose process finds the port taken.
        bound_socket(f"serve the pages at 127.0.0.1:{web_port}", "127.0.0.1", web_port, "--web-port").close()
    pages = partial(_pages, find_config(config), web_port) if web else contextlib.nullcontext
    if (error := run_async(_run(settings, once, max_rounds, pages))) is not None:
        raise typer.Exit(error.exit_code)


@contextlib.contextmanager
def _pages(config: Path | None, port: int) -> Iterator[None]:
    """`flywheel web` in a process of its own, whose end does not end the daemon."""
    named = [] if config is None else ["-c", str(config)]
    named += [f"--set={text}" for text in given_settings()]
    process = subprocess.Popen([sys.executable, "-m", "flywheel", *named, "web", "--port", str(port)])
    try:
        yield
    finally:
        if process.poll() is not None:
            log.error("flywheel web ended early, with exit code %d", process.returncode)
        process.terminate()
        try:
            process.wait(WEB_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _run(
    config: Config, once: bool, max_rounds: int | None, pages: Callable[[], AbstractContextManager[None]]
) -> FlywheelError | None:

    async with open_state(config, lock=True) as store:
        stop = Stop(config.daemon.drain_seconds)
        service = Service(config, store, stop)
        if once:
            error = await stop.during(service.once(max_rounds))
            if stop.by is not None:
                raise stop.error("do all that is due", await store.read(left_of_round))
            return error
        # Objects that exist now live as long as the process. Without this each full garbage collection would stop all
        # threads for a tenth of a second, also during a read of a source.
        gc.freeze()
        with pages():
            await service.run(max_rounds)
        return None
