"""Adapters that a server loads when it is restarted: the last targets of its aliases."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from flywheel.config import Config
from flywheel.serving.adapter_files import unsafe_weights
from flywheel.serving.server.alias_table import Target, read_aliases
from flywheel.system.files import tree_sha256


def base_name(base: str) -> str:
    """The served name of the base model: a local model's directory, else the hub name."""
    return Path(base).name if Path(base).is_absolute() else base


def alias_file(config: Config) -> Path:
    return config.state_dir / "serving" / f"aliases-{config.serving.port}.json"


def call_log_file(config: Config) -> Path:
    """The call log of this machine's server."""
    return config.state_dir / "serving" / f"calls-{config.serving.port}.db"


def deployed(config: Config, versions: Mapping[str, str] | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """The valid adapters among the targets of the saved aliases, name → directory; and the aliases that the server
    cannot answer yet, with the reason. `versions` are those that the state says are deployed, by alias."""
    found: dict[str, str] = {}
    waiting = {}
    saved, damage = read_aliases(alias_file(config))
    for alias in () if damage else config.aliases:
        if alias in saved:
            continue
        if version := (versions or {}).get(alias):
            waiting[alias] = f"{version} is deployed, and this server has not served it yet"
        elif config.serving.start == "wait":
            waiting[alias] = "the daemon has not confirmed what it stands for (serving.start: wait)"
    # Those of aliases that the configuration does not name any more come last: there may be no slot for them.
    for alias, target in sorted(saved.items(), key=lambda entry: entry[0] not in config.aliases):
        if target.name == base_name(config.model.base):
            continue
        trouble = _unservable(target, config)
        if not trouble and target.name not in found and len(found) >= config.max_adapters:
            trouble = f"all {config.max_adapters} slots for adapters are taken (serving.max_loras)"
        if trouble:
            waiting[alias] = f"{target.name} cannot be served again: {trouble}"
        elif target.path:
            found[target.name] = target.path
    return found, waiting


def _unservable(target: Target, config: Config) -> str | None:
    """The reason why vLLM would refuse to start with this adapter or answer wrongly with it, or None."""
    if not target.path:
        return "its directory was not written down"
    folder = Path(target.path)
    try:
        trained = json.loads((folder / "adapter_config.json").read_bytes())
        if why := unsafe_weights(folder):
            return why
        rank, base = trained["r"], str(trained.get("base_model_name_or_path") or config.model.base)
        weights = folder / "adapter_model.safetensors"
        with weights.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(header))
        end = max(entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__")
        if weights.stat().st_size != 8 + header + end:
            return f"{weights} is cut short"
        if rank > config.serving.max_lora_rank:
            return f"rank {rank} > serving.max_lora_rank {config.serving.max_lora_rank}"
        # Weights of the same shape would load without verification, because the alias points to it from the start.
        if os.path.realpath(base) != os.path.realpath(config.model.base):
            return f"it was trained on {base}, and model.base is {config.model.base}"
        # Other files of the same shape would load as well.
        if target.sha256 and tree_sha256(folder) != target.sha256:
            return f"the files in {folder} are not those that were proven"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        return f"{folder} holds no readable adapter ({type(error).__name__}: {error})"
    return None
