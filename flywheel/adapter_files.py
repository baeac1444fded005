"""The files of a LoRA adapter: which of them may be loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PICKLED: Final = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
"""Endings of weights in Python's pickle format, which can run code when they are loaded."""


def unsafe_weights(folder: Path) -> str:
    """Why the weights in `folder` must not be loaded, or nothing: only safetensors cannot hold code.

    Raises OSError when the folder cannot be read.
    """
    for place, _, names in os.walk(folder, onerror=_raise):
        for name in sorted(names):
            if Path(name).suffix.lower() in PICKLED:
                return f"{Path(place, name)} can hold code that runs when it is loaded: only safetensors are"
    return ""


def _raise(error: OSError) -> None:
    raise error
