"""`python -m demo`: turns the wheel on a tiny policy until two rounds were promoted, and shows what came of it."""

from __future__ import annotations

import sys
from typing import Final

from demo import panel, recording
from demo.command import play
from demo.studio import StudioDatabase
from demo.traffic import Traffic
from demo.wheel import Scene
from flywheel.config.file import Config

QUESTIONS_PER_SECOND: Final = 12.0


def users(config: Config) -> Traffic:
    database = StudioDatabase(config.sources[0].path)
    return Traffic(config.serving.urls[0], config.model.alias, database, rate=QUESTIONS_PER_SECOND)


SCENE: Final = Scene("demo.yaml", users)


def main() -> int:
    return play(
        "python -m demo",
        "Turn the wheel on a tiny policy.",
        SCENE,
        lambda status, _: panel.table(status),
        recorder=recording.write,
    )


if __name__ == "__main__":
    sys.exit(main())
