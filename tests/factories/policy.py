"""A base model with an adapter, as a round's trainer loads and writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flywheel.config.training import LoraSettings, Quantization
from flywheel.records.round import AdapterRef
from flywheel.training.engine.policy import appear, base_dtype, load_base, with_adapter, write_adapter


def load_policy(
    base: str,
    parent: AdapterRef | None,
    lora: LoraSettings,
    seed: int,
    *,
    dtype: str | None = None,
    quantization: Quantization | None = None,
) -> Any:
    """A PeftModel with the parent's adapter, or a new one. The base model has the checkpoint's dtype unless another
    one is named."""
    model = load_base(base, dtype=dtype or base_dtype(base), quantization=quantization)
    return with_adapter(model, base, None if parent is None else Path(parent.path), lora, seed)


def save_adapter(model: Any, directory: Path) -> None:
    """Write the adapter `default`; the directory appears atomically."""
    appear(directory, lambda beside: write_adapter(model, beside))
