"""The inference server: vLLM's OpenAI server with LoRA, the alias middleware and the adapters that were deployed.

Owns the command line and the environment of `flywheel serve`. It never imports vLLM: the server is its own program.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import logging
import os
import socket
import sys
from importlib import metadata
from pathlib import Path

from flywheel.config import Config, ServingSettings
from flywheel.errors import ServeError
from flywheel.files import tree_sha256
from flywheel.serving.aliases import Target, read_aliases
from flywheel.serving.key import key_of
from flywheel.serving.middleware import (
    ALIAS_VARIABLE,
    BASE_VARIABLE,
    FILE_VARIABLE,
    KEY_VARIABLE,
    LOADED_VARIABLE,
    AliasMiddleware,
)

log = logging.getLogger(__name__)

MODULE = "vllm.entrypoints.openai.api_server"
MIDDLEWARE = f"{AliasMiddleware.__module__}.{AliasMiddleware.__qualname__}"
OWN_ARGUMENTS = {
    "--api-key": "serving.api_key_env",
    "--host": "serving.host",
    "--port": "serving.port",
    "--model": "model.base",
    "--max-loras": "serving.max_loras",
    "--max-lora-rank": "serving.max_lora_rank",
    "--max-model-len": "serving.max_model_len",
    "--served-model-name": "model.base",
}
"""Arguments that come from the configuration, and from which key: given twice, vLLM would silently take the last."""
BREAKING_ARGUMENTS = {
    "--lora-modules": "the adapters that were deployed would not be loaded",
    "--no-enable-lora": "no adapter could be served",
    "--uds": "serving.urls would not reach the server",
}
"""Arguments that cannot be, and why."""
DATA_PARALLEL = ("--data-parallel", "-dp", "--api-server-count", "-asc")


def base_name(base: str) -> str:
    """Under which name the base model is served: a local model's folder, else the hub name."""
    return Path(base).name if Path(base).is_absolute() else base


def alias_file(config: Config) -> Path:
    return config.state_dir / "serving" / f"aliases-{config.serving.port}.json"


def command(config: Config) -> tuple[list[str], dict[str, str]]:
    """How to start the server: its arguments, and what its environment needs beyond the present one.

    Adapters that the aliases stood for when the server last ran are loaded from the start; one whose files are gone,
    damaged or not those that were proven, or that was trained on another base model, is left out, with a warning, and
    its alias answers with the base model. Raises ServeError.
    """
    serving, base = config.serving, config.model.base
    name = base_name(base)
    if config.model.alias == name:
        raise ServeError(
            f"serve {base} as {config.model.alias}", "alias and base model have the same name", "Change model.alias."
        )
    _check_arguments(serving)
    key = _key(serving)
    adapters, lost = deployed(config)
    for trouble in lost:
        log.error("%s", trouble)
    arguments = [sys.executable, "-m", MODULE]
    arguments += ["--model", base, "--served-model-name", name]
    arguments += ["--host", serving.host, "--port", str(serving.port)]
    # On a CPU, vLLM 0.32 adds the adapter in the last slot to requests for the base model that share a batch with one
    # for an adapter: one slot more than adapters stays empty, and an empty slot adds nothing.
    slots = serving.max_loras + _built_for_cpu()
    arguments += ["--enable-lora", "--max-loras", str(slots)]
    # Evicted adapters are read from disk again on demand: twice the slots keeps those of recent rounds in memory.
    arguments += ["--max-cpu-loras", str(2 * serving.max_loras), "--max-lora-rank", str(serving.max_lora_rank)]
    arguments += ["--middleware", MIDDLEWARE]
    if _built_for_cpu():
        # When only a part of a seeded prompt fits into a step, vLLM 0.32 rewinds the request's random generator,
        # which a CPU's cannot do: the engine dies ("CPU Generator does not use offset"), and every model with it.
        arguments += ["--no-enable-chunked-prefill"]
    if serving.max_model_len is not None:
        arguments += ["--max-model-len", str(serving.max_model_len)]
    if adapters:
        modules = [json.dumps({"name": adapter, "path": path}) for adapter, path in adapters.items()]
        arguments += ["--lora-modules", *modules]
    arguments += serving.extra_args
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(serving.cpu_kv_cache_gib),
        ALIAS_VARIABLE: config.model.alias,
        BASE_VARIABLE: name,
        FILE_VARIABLE: str(alias_file(config)),
        LOADED_VARIABLE: json.dumps(list(adapters)),
    }
    if Path(base).is_absolute():
        environment["HF_HUB_OFFLINE"] = "1"
    if key:
        # By environment and not as an argument, which every user of the machine could read.
        environment[KEY_VARIABLE] = key
    return arguments, environment


def serve(config: Config) -> None:
    """Become the server: on success this never returns. Raises ServeError."""
    arguments, environment = command(config)
    _check_machine(config)
    file = alias_file(config)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise ServeError(f"keep the aliases in {file}", why, "Check state.dir and its permissions.") from error
    os.execve(arguments[0], arguments, {**os.environ, **environment})


def _built_for_cpu() -> bool:
    """Whether the installed vLLM is the CPU build, which has a distribution of its own."""
    return bool(list(metadata.distributions(name="vllm-cpu")))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_arguments(serving: ServingSettings) -> None:
    attempted = "start the inference server"
    for argument in serving.extra_args:
        # As vLLM reads them: underscores are dashes, and the beginning of a name will do.
        flag = argument.partition("=")[0].replace("_", "-")
        if len(flag) > 2 and flag.startswith("--"):
            for own, key in OWN_ARGUMENTS.items():
                if own.startswith(flag):
                    raise ServeError(attempted, f"serving.extra_args holds {flag}", f"Set {key} instead.")
            for own, why in BREAKING_ARGUMENTS.items():
                if own.startswith(flag):
                    raise ServeError(attempted, f"serving.extra_args holds {flag}: {why}", "Leave it out.")
        if flag.startswith(DATA_PARALLEL):
            raise ServeError(
                attempted,
                f"serving.extra_args holds {flag}, and an adapter would be loaded into one of its replicas only",
                "Start one server per replica and name each in serving.urls.",
            )


def _key(serving: ServingSettings) -> str | None:
    key = key_of(serving, "start the inference server")
    if not key and not is_loopback(serving.host):
        raise ServeError(
            f"listen on {serving.host}",
            "whoever reaches the server could load adapters into it, and no key is set",
            "Name an environment variable with a key in serving.api_key_env, or listen on 127.0.0.1.",
        )
    return key


def deployed(config: Config) -> tuple[dict[str, str], list[str]]:
    """The adapters that the saved aliases stand for: name → directory of those that can be served, and what is wrong
    with the others."""
    found, lost = {}, []
    for alias, target in read_aliases(alias_file(config)).items():
        if target.name == base_name(config.model.base):
            continue
        trouble = _unservable(target, config)
        if trouble:
            lost.append(f"{target.name} cannot be served again: {trouble}. {alias} ANSWERS WITH THE BASE MODEL")
        elif target.path:
            found[target.name] = target.path
    return found, lost


def _unservable(target: Target, config: Config) -> str | None:
    """Why vLLM would refuse to start with this adapter or answer wrongly with it, or None."""
    if not target.path:
        return "its directory was not written down"
    folder = Path(target.path)
    try:
        trained = json.loads((folder / "adapter_config.json").read_bytes())
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
        # Of the same shape it would load, and nobody would prove it: at a restart the alias stands for it already.
        if os.path.realpath(base) != os.path.realpath(config.model.base):
            return f"it was trained on {base}, and model.base is {config.model.base}"
        # Others of the same shape would load as well.
        if target.sha256 and tree_sha256(folder) != target.sha256:
            return f"the files in {folder} are not those that were proven"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        return f"{folder} holds no readable adapter ({type(error).__name__}: {error})"
    return None


def _check_machine(config: Config) -> None:
    serving, base = config.serving, Path(config.model.base)
    if importlib.util.find_spec("vllm") is None:
        raise ServeError(
            "start the inference server",
            f"vLLM is not installed for {sys.executable}",
            "Install `agentscope-flywheel[gpu]`, or `agentscope-flywheel[cpu]` on a machine without a GPU.",
        )
    if base.is_absolute() and not (base / "config.json").is_file():
        why = "the folder holds no config.json" if base.is_dir() else "there is no such folder"
        raise ServeError(f"serve the model {base}", why, "Point model.base at a model's folder or a hub name.")
    family = socket.AF_INET6 if ":" in serving.host else socket.AF_INET
    try:
        with socket.create_server((serving.host, serving.port), family=family):
            pass
    except OSError as error:
        # The errors of name look-ups have numbers of their own, and create_server adds to the text of the others.
        number = error.errno or 0
        raise ServeError(
            f"listen on {f'[{serving.host}]' if ':' in serving.host else serving.host}:{serving.port}",
            os.strerror(number) if number > 0 else (error.strerror or str(error)),
            "Stop what listens there, or change serving.port and serving.urls.",
        ) from error
