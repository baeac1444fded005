"""Files of adapters, without weights that mean anything."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from flywheel.serving.adapter_files import FILES


def put_files(folder: Path, weights: bytes = b"weights" * 1000, **others: bytes) -> Path:
    folder.mkdir()
    for name, content in {FILES[0]: b'{"r": 8}', FILES[1]: weights, **others}.items():
        (folder / name).write_bytes(content)
    return folder


def put_adapter_files(folder: Path, rank: int = 8) -> Path:
    """The smallest directory that vLLM would take for an adapter."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "peft_type": "LORA"}))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    return folder


def put_matrices(
    folder: Path, layers: Mapping[str, tuple[int, int]], rank: int = 8, value: float = 0.0, **config: object
) -> Path:
    """An adapter as PEFT saves one, of these layers with their outputs and inputs. Each number is `value`."""
    tensors: dict[str, object] = {}
    size = 0
    for name, (outputs, inputs) in layers.items():
        for matrix, shape in (("A", [rank, inputs]), ("B", [outputs, rank])):
            begin, size = size, size + 4 * shape[0] * shape[1]
            key = f"base_model.model.{name}.lora_{matrix}.weight"
            tensors[key] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, size]}
    folder.mkdir(parents=True)
    targets = sorted({name.rpartition(".")[2] for name in layers})
    made = {"r": rank, "lora_alpha": rank, "peft_type": "LORA", "target_modules": targets, **config}
    (folder / FILES[0]).write_text(json.dumps(made))
    header = json.dumps(tensors).encode()
    weights = len(header).to_bytes(8, "little") + header + struct.pack("<f", value) * (size // 4)
    (folder / FILES[1]).write_bytes(weights)
    return folder
