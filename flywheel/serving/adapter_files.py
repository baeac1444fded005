"""Checks the files of a LoRA adapter before anything loads them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from flywheel.system.files import tree_sha256

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)
"""The files of an adapter, in their order."""
CURRENT_FILE: Final = "current.json"
"""Of a folder of published adapters: what each alias stands for, in the form of a server's alias file, with paths
relative to the folder."""
PICKLED: Final = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
"""Suffixes of weights in the pickle format, which can run code when they are loaded."""


def why_unloadable(
    folder: Path,
    *,
    sha256: str | None = None,
    base_model: str = "",
    max_rank: int = 0,
    hash_of: Callable[[Path], str] | None = None,
) -> str:
    """Why the adapter in a folder must not be loaded; empty if it may be.

    Only safetensors cannot hold code. With `sha256`, the files must be those that were evaluated, by `hash_of`
    (`tree_sha256` if it is None). With `base_model`, which is for a server that answers with the adapter from its
    start, without verification, the weights must also be whole, of a rank of at most `max_rank`, and trained on that
    model.
    """
    try:
        if not folder.is_dir():
            return f"its directory {folder} is not there"
        for place, _, names in os.walk(folder, onerror=_raise):
            for name in sorted(names):
                if Path(name).suffix.lower() in PICKLED:
                    return f"{Path(place, name)} can hold code that runs when it is loaded: only safetensors are"
        if base_model and (why := _why_unfit(folder, base_model, max_rank)):
            return why
        if sha256 is not None and (hash_of or tree_sha256)(folder) != sha256:
            return why_changed(folder)
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror or error}"
    return ""


def why_changed(folder: Path) -> str:
    """The reason for readable files that are not those of the hash."""
    return f"the files in {folder} are not those that were evaluated"


def _why_unfit(folder: Path, base_model: str, max_rank: int) -> str:
    try:
        trained = json.loads((folder / CONFIG_FILE).read_bytes())
        rank, base = most_rank(trained), str(trained.get("base_model_name_or_path") or base_model)
        weights = folder / WEIGHTS_FILE
        header, tensors = header_of(weights)
        end = max(entry["data_offsets"][1] for entry in tensors.values())
        if weights.stat().st_size != 8 + header + end:
            return f"{weights} is cut short"
        if rank > max_rank:
            return f"rank {rank} > serving.max_lora_rank {max_rank}"
        if os.path.realpath(base) != os.path.realpath(base_model):
            return f"it was trained on {base}, and model.base is {base_model}"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        return f"{folder} holds no readable adapter ({type(error).__name__}: {error})"
    return ""


def most_rank(config: Mapping[str, Any]) -> int:
    """The largest rank of an adapter's matrices, as its `adapter_config.json` says."""
    return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])


def header_of(weights: Path) -> tuple[int, dict[str, Any]]:
    """The length of the header of a safetensors file in bytes, and its entries by tensor (`dtype`, `shape`,
    `data_offsets`). Raises OSError, and ValueError for another file."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(size))
    tensors.pop("__metadata__", None)
    return size, tensors


def _raise(error: OSError) -> None:
    raise error
