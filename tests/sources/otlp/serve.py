"""A receiver in a process of its own, for tests that kill it: `python -m tests.sources.otlp.serve INBOX`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from flywheel.sources.otlp.receiver import Receiver


async def serve(inbox: Path) -> None:
    receiver = Receiver("127.0.0.1:0", inbox)
    await receiver.start()
    print(receiver.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
