"""`python -m flywheel.worker ROUND_DIR`."""

from __future__ import annotations

import os

from flywheel import worker

if __name__ == "__main__":
    # What users said is in every file of a round; most of them are written by libraries.
    os.umask(0o077)
    # Threads that still wait for a judge's answer would hold an ordinary exit back.
    os._exit(worker.main())
