"""What every actor of a round can do, wherever it runs: take over the worker's environment, and look at paths."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path


class Member:
    """A base class of actors. `join` is called before anything else."""

    def join(self, environment: Mapping[str, str], paths: Sequence[str]) -> tuple[str, list[str]]:
        """Take these variables over; the name of the node, and the paths that are not there.

        Secrets come this way, and not with the actor's runtime environment: a cluster's dashboard shows that.
        """
        os.environ.update(environment)
        return socket.gethostname(), [path for path in paths if not Path(path).exists()]
