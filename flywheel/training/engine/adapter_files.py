"""Adapters on their way between nodes: the bytes of their files, which Ray's object store carries. No file system is
shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flywheel.errors import TrainError
from flywheel.serving.adapter_files import FILES


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of an adapter by name, and their SHA-256."""

    contents: Mapping[str, bytes]
    sha256: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> Self:
        contents = {name: (folder / name).read_bytes() for name in FILES}
        return cls(contents, {name: _sha256(data) for name, data in contents.items()})

    def write(self, folder: Path) -> None:
        """Make the folder. Raises TrainError if they are not what was read."""
        attempted = f"write an adapter to {folder}"
        if changed := [name for name, data in self.contents.items() if _sha256(data) != self.sha256[name]]:
            hint = "The round can be started again; check the memory of that node."
            raise TrainError(attempted, f"{', '.join(changed)} arrived changed", hint, retryable=True)
        try:
            folder.mkdir()
            for name, data in self.contents.items():
                (folder / name).write_bytes(data)
        except OSError as error:
            hint = f"Free space in {folder.parent} on that node."
            raise TrainError(attempted, error.strerror or str(error), hint, retryable=True) from error

    @contextlib.contextmanager
    def written(self, temporary: Path | None = None) -> Iterator[Path]:
        """A folder with them, in a folder for `temporary` ones. Raises TrainError."""
        with tempfile.TemporaryDirectory(prefix="fw-adapter-", dir=temporary) as parent:
            folder = Path(parent) / "adapter"
            self.write(folder)
            yield folder


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
