"""A round that dies on the way to its end: `python -m tests.daemon.rounds.killed_decision FOLDER FUNCTION`.

It is the live one of the state in the folder, and is killed where it would call the function.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from flywheel.config.file import Config
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds import rounds as rounds_module
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.records.states import RoundState
from flywheel.store import rounds
from tests.factories.gate import gate_config
from tests.factories.state import open_state


async def finish(config: Config) -> RoundState | None:
    async with open_state(config.state_dir) as store:
        return await Rounds(store, config, rubric_of(config), Deployer(store, config)).finish_live()


def main() -> None:
    folder, point = sys.argv[1:]

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(rounds if point == "finish" else rounds_module, point, die)
    asyncio.run(finish(gate_config(Path(folder))))


if __name__ == "__main__":
    main()
