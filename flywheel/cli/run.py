"""`flywheel run`: the daemon."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
from typing import TYPE_CHECKING, Annotated

import typer

from flywheel.cli.app import ConfigOption, app, load_config, open_state, run_async
from flywheel.errors import EXIT_FAILED
from flywheel.process_tuning import tune_process

if TYPE_CHECKING:
    from flywheel.config import Config


@app.command()
def run(
    config: ConfigOption = None,
    once: Annotated[bool, typer.Option("--once", help="Do what is due now, then exit.")] = False,
    max_rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Exit after this many finished rounds.")
    ] = None,
) -> None:
    """Run the daemon: read sources, judge, train and swap until it is stopped."""
    tune_process()
    # After a crash in a library, or when a service manager aborts the process, all stacks are on stderr.
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is no stderr
        faulthandler.enable()
    if not run_async(_run(load_config(config), once, max_rounds)):
        raise typer.Exit(EXIT_FAILED)


async def _run(config: Config, once: bool, max_rounds: int | None) -> bool:
    from flywheel.cli.rounds import left_of_round
    from flywheel.daemon.service import Service
    from flywheel.daemon.signals import StopSignals

    async with open_state(config, lock=True) as store:
        service = Service(config, store)
        if once:
            interruption = StopSignals(config.daemon.drain_seconds)
            error = await interruption.during(service.once(max_rounds), service.halt)
            if interruption.by is not None:
                raise interruption.error("do all that is due", await store.read(left_of_round))
            return error is None
        # Objects that exist now live as long as the process. Without this each full garbage collection would stop all
        # threads for a tenth of a second, also during a read of a source.
        gc.freeze()
        await service.run(max_rounds)
        return True
