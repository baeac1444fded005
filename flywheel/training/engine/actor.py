"""The base class of a round's actors: take over the worker's environment, and check paths on the node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path


class RoundActor:
    """Base class of actors. Call `join` first."""

    def join(self, environment: Mapping[str, str], paths: Sequence[str]) -> tuple[str, list[str]]:
        """Set these variables. Returns the name of the node and the missing paths.

        Secrets are passed here and not in the actor's runtime environment, which a cluster's dashboard shows.
        """
        os.environ.update(environment)
        return socket.gethostname(), [path for path in paths if not Path(path).exists()]
