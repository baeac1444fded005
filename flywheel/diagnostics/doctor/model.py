"""Checks of the base model: its files, its context length, and the rank of its adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flywheel.config import Config
from flywheel.daemon.planner import missing_base_model
from flywheel.diagnostics.doctor.finding import Finding, Result
from flywheel.model_parsers import folder_of
from flywheel.terminal import byte_size

_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_WHERE: Final = "Set model.base to a model's directory or to its name on the hub."


@dataclass(frozen=True, slots=True)
class Base:
    """The folder of the base model, None if it is not on this machine, and the size of its weights in bytes."""

    folder: Path | None
    weights: int = 0


def find(base: str) -> Base:
    """A local directory, or the hub client's cache."""
    folder = folder_of(base)
    weights = 0
    for pattern in ("*.safetensors", "*.bin"):
        if folder is not None and not weights:
            weights = sum(file.stat().st_size for file in folder.glob(pattern) if file.exists())
    return Base(folder, weights)


def check_model(config: Config, base: Base) -> Iterator[Finding]:
    """The model's files, its longest context, and the rank of its adapters."""
    name = config.model.base
    if base.folder is not None:
        settings = _json(base.folder / "config.json")
        yield _files(name, base, base.folder, settings)
        if isinstance(settings, dict) and (wrong := _too_long(config, settings)):
            remedy = "Lower it, or use a model with a longer context."
            yield Finding("context", Result.FAILED, "; ".join(wrong), remedy)
    elif why := missing_base_model(name):
        yield Finding("model", Result.FAILED, why, "Set model.base to a model's directory, or download it once.")
    else:
        why = f"{name} is not on this machine yet: the server and the first round download it from the hub"
        remedy = f"Download it now: hf download {name}; or set model.base to a directory."
        yield Finding("model", Result.WARNING, why, remedy)
    # A rank above the server's is a wrong configuration, which is reported there.
    text = f"training.lora.r {config.training.lora.r}; servers accept up to {config.serving.max_lora_rank}"
    yield Finding("rank", Result.OK, text)


def _files(name: str, base: Base, folder: Path, settings: Any) -> Finding:
    if not folder.is_dir():
        return Finding("model", Result.FAILED, f"there is no directory {folder}", _WHERE)
    if not isinstance(settings, dict):
        return Finding("model", Result.FAILED, f"{folder} has no config.json that can be read", _WHERE)
    tokenizer = _json(folder / "tokenizer_config.json")
    has_template = any((folder / file).exists() for file in ("chat_template.jinja", "chat_template.json")) or (
        isinstance(tokenizer, dict) and bool(tokenizer.get("chat_template"))
    )
    lacking = [] if base.weights else ["weights (*.safetensors)"]
    if shards := _missing_shards(folder):
        lacking.append(f"{len(shards)} of its weight files (the first is {shards[0]})")
    if not any((folder / file).exists() for file in _TOKENIZERS):
        lacking.append("a tokenizer")
    elif not has_template:
        lacking.append("a chat template, which writes the prompts")
    if lacking:
        remedy = "Complete the directory, or use an instruction-tuned model."
        return Finding("model", Result.FAILED, f"{folder} lacks {' and '.join(lacking)}", remedy)
    kind = ", ".join(map(str, settings.get("architectures") or ())) or "unknown architecture"
    text = f"{name}: {kind}, weights {byte_size(base.weights)}, with tokenizer and chat template"
    return Finding("model", Result.OK, text, figures={"weight_bytes": base.weights})


def _missing_shards(folder: Path) -> list[str]:
    for index in folder.glob("*.index.json"):
        listed = _json(index)
        if isinstance(listed, dict) and isinstance(files := listed.get("weight_map"), dict):
            return sorted(file for file in set(map(str, files.values())) if not (folder / file).exists())
    return []


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _too_long(config: Config, settings: dict[str, Any]) -> list[str]:
    """Configured context lengths above the model's own, which vLLM refuses."""
    longest = settings.get("max_position_embeddings")
    if not isinstance(longest, int) or settings.get("rope_scaling") or isinstance(settings.get("text_config"), dict):
        return []
    wanted = {
        "rollout.max_model_len": config.rollout.max_model_len,
        "serving.max_model_len": config.serving.max_model_len,
    }
    return [
        f"{key} is {length:,}, and the model's longest context is {longest:,}"
        for key, length in wanted.items()
        if length is not None and length > longest
    ]
