"""Files of adapters, without weights that mean anything."""

from __future__ import annotations

import json
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
