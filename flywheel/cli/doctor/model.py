"""Checks of the base model: its files, its context length, and the rank of its adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flywheel.cli.doctor.finding import Finding, Result
from flywheel.config import Config
from flywheel.daemon.rounds.planner import missing_base_model
from flywheel.serving.server.model_parsers import folder_of
from flywheel.system.terminal import byte_size

_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")
_WHERE: Final = "Set model.base to a model's directory or to its name on the hub."


@dataclass(frozen=True, slots=True)
class Base:
    """The folder of the base model, None if it is not on this machine, and the size of its weights in bytes."""

    folder: Path | None
    weights: int = 0


def find(base: str) -> Base:
    """A local directory, or the hub client's cache."""
    folder = folder_of(base)
    if folder is None:
        return Base(None)
    files = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
    return Base(folder, sum(file.stat().st_size for file in files if file.exists()))


def check_model(config: Config, base: Base) -> Iterator[Finding]:
    """The model's files, its longest context, and the rank of its adapters."""
    name = config.model.base
    if base.folder is not None:
        settings = _json(base.folder / "config.json")
        yield Finding("model", *_files(name, base, base.folder, settings), figures={"weight_bytes": base.weights})
        if wrong := _too_long(config, settings):
            yield Finding("context", Result.FAILED, wrong, "Lower it, or use a model with a longer context.")
    elif why := missing_base_model(name):
        yield Finding("model", Result.FAILED, why, "Set model.base to a model's directory, or download it once.")
    else:
        why = f"{name} is not on this machine yet: the server and the first round download it from the hub"
        yield Finding("model", Result.WARNING, why, f"Download it now: hf download {name}; or set model.base.")
    # A rank above the server's is a wrong configuration, which is reported there.
    text = f"training.lora.r {config.training.lora.r}; servers accept up to {config.serving.max_lora_rank}"
    yield Finding("rank", Result.OK, text)


def _files(name: str, base: Base, folder: Path, settings: dict[str, Any]) -> tuple[Result, str, str]:
    if not folder.is_dir():
        return Result.FAILED, f"there is no directory {folder}", _WHERE
    if not settings:
        return Result.FAILED, f"{folder} has no config.json that can be read", _WHERE
    lacking = [] if base.weights else ["weights (*.safetensors)"]
    maps = [_json(index).get("weight_map") for index in folder.glob("*.index.json")]
    shards = {str(file) for each in maps if isinstance(each, dict) for file in each.values()}
    if missing := sorted(file for file in shards if not (folder / file).exists()):
        lacking.append(f"{len(missing)} of its weight files (the first is {missing[0]})")
    tokenizer = _json(folder / "tokenizer_config.json")
    if not any((folder / file).exists() for file in _TOKENIZERS):
        lacking.append("a tokenizer")
    elif not (any((folder / file).exists() for file in _TEMPLATES) or tokenizer.get("chat_template")):
        lacking.append("a chat template, which writes the prompts")
    if lacking:
        remedy = "Complete the directory, or use an instruction-tuned model."
        return Result.FAILED, f"{folder} lacks {' and '.join(lacking)}", remedy
    kind = ", ".join(map(str, settings.get("architectures") or ())) or "unknown architecture"
    return Result.OK, f"{name}: {kind}, weights {byte_size(base.weights)}, with tokenizer and chat template", ""


def _json(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty if it cannot be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _too_long(config: Config, settings: dict[str, Any]) -> str:
    """Configured context lengths above the model's own, which vLLM refuses."""
    longest = settings.get("max_position_embeddings")
    if not isinstance(longest, int) or settings.get("rope_scaling") or isinstance(settings.get("text_config"), dict):
        return ""
    wanted = {"rollout": config.rollout.max_model_len, "serving": config.serving.max_model_len}
    return "; ".join(
        f"{section}.max_model_len is {length:,}, and the model's longest context is {longest:,}"
        for section, length in wanted.items()
        if length is not None and length > longest
    )
