"""Rounds go on without engines that are lost, while one is left."""

from __future__ import annotations

import logging
from typing import Any

from flywheel.errors import ProcessLostError

log = logging.getLogger(__name__)


def leave_out(engines: list[Any], engine: Any, error: ProcessLostError) -> None:
    """Take a lost engine out of the list, whose holders all go on without it. Raises the error if it is the last."""
    # By identity: other threads may have found the loss before.
    left = [each for each in engines if each is not engine]
    if not left:
        raise error
    if len(left) < len(engines):
        log.warning("a rollout engine is lost, and %d left: %s", len(left), error.why)
        engines[:] = left
