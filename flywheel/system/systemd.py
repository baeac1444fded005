"""Notifications to systemd (`Type=notify`, `WatchdogSec=`) by the protocol of sd_notify(3)."""

from __future__ import annotations

import asyncio
import os
import socket


def notify(message: str) -> bool:
    """Send `READY=1`, `STOPPING=1` or `STATUS=…`, one per line; False without a service manager."""
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
    """Send watchdog notifications until cancelled, if the unit sets `WatchdogSec=`."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not (microseconds.isdecimal() and int(microseconds)) or pid not in ("", str(os.getpid())):
        return
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(int(microseconds) / 2e6)
