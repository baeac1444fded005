"""Checks of serving: the base model's files, the settings of `flywheel serve`, and each inference server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from flywheel.cli.doctor import Finding, Result
from flywheel.config.file import Config
from flywheel.daemon.rounds.planner import missing_base_model
from flywheel.errors import FlywheelError, ServeError
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.replica_addresses import replica_urls
from flywheel.serving.server.model_parsers import folder_of, weight_bytes
from flywheel.serving.server.vllm_command import base_name, command, deployed, not_json
from flywheel.serving.server_keys import admin_key
from flywheel.system.server_limits import is_loopback
from flywheel.system.terminal import byte_size

TIMEOUT_SECONDS: Final = 10.0
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class Base:
    """The folder of the base model, None if it is not on this machine, and the size of its weights in bytes."""

    folder: Path | None
    weights: int = 0


def base_of(name: str) -> Base:
    """A local directory, or the hub client's cache."""
    return Base(folder_of(name), weight_bytes(name))


def check_model(config: Config, base: Base) -> Finding:
    """Whether the base model is here, with config, weights, tokenizer and chat template."""
    name, folder = config.model.base, base.folder
    if folder is None and (why := missing_base_model(name)):
        return Finding("model", Result.FAILED, why, "Set model.base to a model's directory, or download it once.")
    if folder is None:
        why = f"{name} is not on this machine yet: the server and the first round download it from the hub"
        remedy = f"Download it now: hf download {name}; or set model.base."
        return Finding("model", Result.WARNING, why, remedy)
    if not folder.is_dir():
        remedy = "Set model.base to a model's directory or to its name on the hub."
        return Finding("model", Result.FAILED, f"there is no directory {folder}", remedy)
    has = {
        "a config.json that can be read": bool(_json(folder / "config.json")),
        "weights (*.safetensors)": bool(base.weights),
        "a tokenizer": any((folder / file).exists() for file in _TOKENIZERS),
        "a chat template, which writes the prompts": any((folder / file).exists() for file in _TEMPLATES)
        or bool(_json(folder / "tokenizer_config.json").get("chat_template")),
    }
    if lacking := [part for part, is_there in has.items() if not is_there]:
        remedy = "Complete the directory, or use an instruction-tuned model."
        return Finding("model", Result.FAILED, f"{folder} lacks {' and '.join(lacking)}", remedy)
    text = f"{name}: weights {byte_size(base.weights)}, with tokenizer and chat template"
    return Finding("model", Result.OK, text, figures={"weight_bytes": base.weights})


def _json(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_local(config: Config) -> bool:
    """Whether a configured server is on this machine, as `flywheel serve` starts it."""
    return any(is_loopback(urlsplit(url).hostname or "") for url in config.serving.urls)


def check_serve(config: Config) -> Finding:
    """Whether `flywheel serve` accepts the settings, and would serve the deployed adapters again."""
    if wrong := not_json(config.serving.extra_args):
        # Rounds read it, too, wherever the servers are.
        remedy = f"""Correct it, as in {wrong} '{{"name": "value"}}'."""
        return Finding("serve", Result.FAILED, f"{wrong} in serving.extra_args is no JSON object", remedy)
    if not is_local(config):
        return Finding("serve", Result.SKIPPED, "the servers are on other machines")
    try:
        _, waiting = deployed(config)
        command(config)
    except FlywheelError as error:
        return Finding.from_error("serve", error)
    if waiting and config.serving.start == "auto":
        remedy = "Restore the adapter's files from a backup, or use flywheel deploy or flywheel rollback."
        why = "; ".join(f"{alias} answers 503: {why}" for alias, why in waiting.items())
        return Finding("serve", Result.WARNING, f"after a restart, {why}", remedy)
    text = f"{config.max_adapters} adapters of rank {config.serving.max_lora_rank} or less"
    return Finding("serve", Result.OK, f"`flywheel serve` accepts the settings: {text}")


async def check_servers(config: Config) -> AsyncIterator[Finding]:
    """Health, admin key, base model and aliases of each server."""
    for url, entry in (await replica_urls(config.serving)).items():
        try:
            key = admin_key(config, entry, f"ask {url}")
            async with Replica(url, key, timeout_seconds=TIMEOUT_SECONDS) as replica:
                yield await _server(config, replica)
        except FlywheelError as error:
            yield Finding.from_error("server", error, subject=url)


async def _server(config: Config, replica: Replica) -> Finding:
    models = await replica.models()
    if not await replica.ready():
        raise ServeError(f"use {replica.url}", "it is not healthy", "Look at its log; restart it if its engine died.")
    aliases = {name: await replica.alias(name) for name in config.aliases}
    alias = next(iter(aliases.values()))
    base = base_name(config.model.base)
    if alias.base_model != base:
        why = f"it serves {alias.base_model}, and model.base is {base}"
        remedy = "Restart it with `flywheel serve`, or correct model.base."
        raise ServeError(f"train for {replica.url}", why, remedy)
    adapters = sorted(name for name in models if name != alias.base_model)
    targets = ", ".join(f"{name} → {served.target}" for name, served in aliases.items())
    slots = config.max_adapters
    text = f"{targets}; adapters: {', '.join(adapters) or 'none'}; {slots - len(adapters)} of {slots} slots are free"
    result, remedy = Result.OK, ""
    if waiting := [f"{name} answers 503: {served.waiting}" for name, served in aliases.items() if served.waiting]:
        result, text = Result.FAILED, f"{text}; {'; '.join(waiting)}"
        remedy = "Start `flywheel run`, which restores or confirms what is deployed, or use `flywheel deploy`."
    elif lost := [name for served in aliases.values() for name in served.versions if name not in models]:
        result, text = Result.FAILED, f"{text}; {', '.join(lost)} is not loaded"
        remedy = "Restart it with `flywheel serve`; the daemon loads the adapter again."
    figures = {"adapters": len(adapters), "max_loras": slots}
    return Finding("server", result, text, remedy, replica.url, figures)
