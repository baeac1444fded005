"""Telling systemd how the service is doing (`Type=notify`), by sd_notify(3)'s protocol: one datagram per message."""

from __future__ import annotations

import os
import socket


def notify(message: str) -> bool:
    """Send `READY=1`, `STOPPING=1` or `STATUS=…`; False where no service manager listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(message.encode(), address)
        except OSError:
            return False
    return True
