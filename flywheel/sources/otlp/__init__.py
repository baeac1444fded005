"""The OpenTelemetry receiver: spans that agents send themselves, kept in a file that the Studio reader reads.

It owns the OTLP/HTTP endpoint and its inbox, and must not know of replies, traces or tasks: what a span means is said
in `studio/`. The web server and the protobuf messages are imported when a receiver starts, not before.
"""

from __future__ import annotations

from flywheel.sources.otlp.inbox import inbox_path, prune
from flywheel.sources.otlp.receiver import Receiver

__all__ = ["Receiver", "inbox_path", "prune"]
