"""Event files of TensorBoard: the numbers of each step, written as TensorBoard's own writer would.

The format is that of TensorFlow's `record_writer` and `event.proto`: records of a length, its checksum, a protocol
buffer message `Event` and its checksum. Nothing needs to be installed to write it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

VERSION: Final = "brain.Event:2"
_POLYNOMIAL: Final = 0x82F63B78
"""Of CRC-32C, reversed."""
log = logging.getLogger(__name__)


class TensorBoardEvents:
    """An event file of one run of TensorBoard, in its directory. If it cannot be written, one warning says so."""

    def __init__(self, directory: Path) -> None:
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.flywheel"
        self._path = directory / name
        self._has_failed = False

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        """Append the numbers of a step. Those of nested mappings are named `outer/inner`; null is left out."""
        if self._has_failed:
            return
        values = b"".join(_value(tag, number) for tag, number in _numbers(figures))
        records = _record(_event(step, _field(5, values)))
        try:
            if not self._path.exists():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # What an earlier attempt of the round wrote in this directory is replaced.
                start = _event(step, _field(7, _varint_field(1, 1)))
                records = _record(_event(0, _field(3, VERSION.encode()))) + _record(start) + records
            with self._path.open("ab") as file:
                file.write(records)
        except OSError as error:
            log.warning("cannot write %s for training.tensorboard: %s", self._path, error.strerror or error)
            self._has_failed = True


def _numbers(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float):
            yield f"{above}{name}", float(value)


def _event(step: int, content: bytes) -> bytes:
    counted = _varint_field(2, step) if step else b""
    return b"\x09" + struct.pack("<d", time.time()) + counted + content


def _value(tag: str, number: float) -> bytes:
    return _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", _float32(number)))


def _float32(number: float) -> float:
    try:
        struct.pack("<f", number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")
    return number


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_checksum(length) + data + _masked_checksum(data)


def _masked_checksum(data: bytes) -> bytes:
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    checksum ^= 0xFFFFFFFF
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


_TABLE: Final = _table()
