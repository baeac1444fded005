"""The model that is trained: whether its files are there, and whether what is configured goes together with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flywheel.config import Config
from flywheel.daemon.base_model import missing
from flywheel.diagnostics.doctor.finding import Finding, Result, size
from flywheel.model_parsers import folder_of

_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True, slots=True)
class Base:
    """The folder of the base model, if it is on this machine, and the size of its weights in bytes."""

    folder: Path | None
    weights: int = 0


def find(base: str) -> Base:
    """A local model, or what the hub's client keeps of it."""
    path = folder_of(base)
    if path is None:
        return Base(None)
    try:
        files = [file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern)]
        kept = [file for file in files if file.suffix == ".safetensors"] or files
        return Base(path, sum(file.stat().st_size for file in kept))
    except OSError:
        return Base(path)


def model(config: Config, base: Base) -> Iterator[Finding]:
    """The model's files, its length, the rank of its adapters."""
    name = config.model.base
    if base.folder is None:
        yield _not_here(name)
    else:
        settings = _json(base.folder / "config.json")
        yield _files(name, base, settings)
        if isinstance(settings, dict) and (wrong := _lengths(config, settings)):
            yield Finding(
                "context", Result.FAILED, "; ".join(wrong), "Lower it, or use a model with a longer context."
            )
    yield _rank(config)


def _not_here(name: str) -> Finding:
    if told := missing(name):
        return Finding("model", Result.FAILED, told, "Set model.base to a model's directory, or load it once.")
    told = f"{name} is not on this machine yet: the server and the first round load it from the hub"
    return Finding(
        "model", Result.WARNING, told, f"Load it now: hf download {name}; or set model.base to a directory."
    )


def _files(name: str, base: Base, settings: Any) -> Finding:
    assert base.folder is not None
    folder = base.folder
    where = "Set model.base to a model's directory or to its name on the hub."
    if not folder.is_dir():
        return Finding("model", Result.FAILED, f"there is no directory {folder}", where)
    if not isinstance(settings, dict):
        return Finding("model", Result.FAILED, f"{folder} has no config.json that can be read", where)
    lacking = []
    if not base.weights:
        lacking.append("weights (*.safetensors)")
    if missing := _missing_shards(folder):
        lacking.append(f"{len(missing)} of its weight files ({missing[0]} first)")
    if not any((folder / file).exists() for file in _TOKENIZERS):
        lacking.append("a tokenizer")
    elif not _has_template(folder):
        lacking.append("a chat template, by which prompts are written")
    if lacking:
        remedy = "Complete the directory, or use an instruction-tuned model."
        return Finding("model", Result.FAILED, f"{folder} lacks {' and '.join(lacking)}", remedy)
    kind = ", ".join(map(str, settings.get("architectures") or ())) or "unknown architecture"
    told = f"{name}: {kind}, weights {size(base.weights)}, with tokenizer and chat template"
    return Finding("model", Result.OK, told, figures={"weight_bytes": base.weights})


def _missing_shards(folder: Path) -> list[str]:
    for index in folder.glob("*.index.json"):
        listed = _json(index)
        if isinstance(listed, dict) and isinstance(files := listed.get("weight_map"), dict):
            return sorted(file for file in {str(value) for value in files.values()} if not (folder / file).exists())
    return []


def _has_template(folder: Path) -> bool:
    if any((folder / file).exists() for file in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = _json(folder / "tokenizer_config.json")
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _lengths(config: Config, settings: dict[str, Any]) -> list[str]:
    """Contexts that are longer than the model's, which vLLM refuses."""
    text = settings.get("text_config")
    longest = settings.get("max_position_embeddings") or (
        isinstance(text, dict) and text.get("max_position_embeddings")
    )
    is_scaled = bool(settings.get("rope_scaling")) or isinstance(text, dict)
    if not isinstance(longest, int) or is_scaled:
        return []
    wanted = {
        "rollout.max_model_len": config.rollout.max_model_len,
        "serving.max_model_len": config.serving.max_model_len,
    }
    return [
        f"{key} is {length:,}, and the model's own longest context {longest:,}"
        for key, length in wanted.items()
        if length is not None and length > longest
    ]


def _rank(config: Config) -> Finding:
    # A larger one than servers take is a wrong configuration.
    told = f"training.lora.r {config.training.lora.r}; servers take up to {config.serving.max_lora_rank}"
    return Finding("rank", Result.OK, told)
