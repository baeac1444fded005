"""`python -m flywheel.training.worker ROUND_DIR`."""

from __future__ import annotations

import os

from flywheel.training import worker

if __name__ == "__main__":
    # Files of a round contain users' texts, and libraries write most of them.
    os.umask(0o077)
    # Threads that wait for the judge's answer would delay an ordinary exit.
    os._exit(worker.main())
