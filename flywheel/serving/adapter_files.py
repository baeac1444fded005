"""Checks the files of a LoRA adapter for weights that are unsafe to load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PICKLED: Final = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
"""Suffixes of weights in the pickle format, which can run code when they are loaded."""
CPU_LORA_VARIABLE: Final = "FLYWHEEL_CPU_LORA"
"""An environment variable of Flywheel's own vLLM processes: on a CPU, its plugin computes the LoRA part of layers."""


def unsafe_weights(folder: Path) -> str:
    """Why the weights in a folder must not be loaded; empty if they may be. Only safetensors cannot hold code.

    Raises OSError if the folder cannot be read.
    """
    for place, _, names in os.walk(folder, onerror=_raise):
        for name in sorted(names):
            if Path(name).suffix.lower() in PICKLED:
                return f"{Path(place, name)} can hold code that runs when it is loaded: only safetensors are"
    return ""


def _raise(error: OSError) -> None:
    raise error
