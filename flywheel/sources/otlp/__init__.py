"""The OTLP receiver: an OTLP/HTTP endpoint that stores spans in an inbox, which the Studio reader reads.

It must not know replies or tasks: `studio/` interprets spans. The web server and the protobuf messages are imported
when a receiver starts.
"""

from __future__ import annotations

from flywheel.sources.otlp.inbox import inbox_path, prune
from flywheel.sources.otlp.receiver import Receiver

__all__ = ["Receiver", "inbox_path", "prune"]
