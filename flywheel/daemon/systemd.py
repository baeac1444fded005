"""Telling systemd how the service is doing (`Type=notify`), by sd_notify(3)'s protocol: one datagram per message."""

from __future__ import annotations

import asyncio
import os
import socket


def notify(message: str) -> bool:
    """Send `READY=1`, `STOPPING=1` or `STATUS=…`, several on lines of their own; False where no service manager
    listens."""
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


async def beat() -> None:
    """Tell a service manager that wants to know (`WatchdogSec=`) that the loop goes on, until this is cancelled."""
    if (seconds := _watched_seconds()) is None:
        return
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(seconds / 2)


def _watched_seconds() -> float | None:
    """How long the service manager waits for a sign of life; None where it waits for none of this process."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not (microseconds.isdecimal() and int(microseconds)) or pid not in ("", str(os.getpid())):
        return None
    return int(microseconds) / 1e6
