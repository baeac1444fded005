"""Checks of the inference servers: reachable, right model and alias, adapters and tools accepted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import urlsplit

import httpx2

from flywheel.cli.doctor.finding import Finding, Result
from flywheel.config import Config
from flywheel.errors import FlywheelError, ServeError
from flywheel.serving.client.replica_client import Alias, Replica
from flywheel.serving.client.replica_errors import message_of
from flywheel.serving.server.inference_server import command
from flywheel.serving.server.left_processes import left_processes
from flywheel.serving.server.model_parsers import parsers_of
from flywheel.serving.server.startup_adapters import base_name, deployed
from flywheel.serving.server_keys import admin_key
from flywheel.sources.calls.call_log_copy import PulledServer, call_log_copy_path, pulled_servers
from flywheel.system.http_client import BoundedClient
from flywheel.system.server_limits import is_loopback

TIMEOUT_SECONDS: Final = 10.0
TOOL_TIMEOUT_SECONDS: Final = 60.0
TOOL: Final = "look_up_local_time"
_PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION: Final = {"name": TOOL, "description": "The present time in a city.", "parameters": _PARAMETERS}
_TOOL_REQUEST: Final = {
    "messages": [{"role": "user", "content": "What time is it in Lisbon now? Use the tool."}],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "max_tokens": 128,
    "temperature": 0,
}


def is_local(config: Config) -> bool:
    """Whether a configured server is on this machine, as `flywheel serve` starts it."""
    return any(is_loopback(urlsplit(url).hostname or "") for url in config.serving.urls)


def check_serve(config: Config) -> Finding:
    """Whether `flywheel serve` accepts the settings."""
    if not is_local(config):
        return Finding("serve", Result.SKIPPED, "the servers are on other machines")
    try:
        _, waiting = deployed(config)
        command(config)
    except FlywheelError as error:
        return Finding.of("serve", error)
    if left := list(left_processes(config.state_dir)):
        pids = " ".join(str(each.pid) for each in left)
        remedy = f"`flywheel serve` ends it at its start; by hand: kill -9 {pids}"
        return Finding("serve", Result.WARNING, "; ".join(map(str, left)), remedy)
    if waiting and config.serving.start == "auto":
        remedy = "Restore the adapter's files from a backup, or use flywheel deploy or flywheel rollback."
        why = "; ".join(f"{alias} answers 503: {why}" for alias, why in waiting.items())
        return Finding("serve", Result.WARNING, f"after a restart, {why}", remedy)
    text = f"{config.max_adapters} adapters of rank {config.serving.max_lora_rank} or less"
    return Finding("serve", Result.OK, f"settings can be used: {text}")


async def check_servers(config: Config) -> AsyncIterator[Finding]:
    """Two findings for each server, and one more if their aliases differ."""
    aliases: dict[str, dict[str, Alias]] = {}
    for url in config.serving.urls:
        try:
            key = admin_key(config, url, f"ask {url}")
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with (
                Replica(url, key, timeout_seconds=TIMEOUT_SECONDS) as replica,
                BoundedClient(url, seconds=TIMEOUT_SECONDS, headers=headers) as http,
            ):
                found, aliases[url] = await _server(config, replica, http)
                yield found
                if found.result is not Result.FAILED:
                    result, text, remedy = await _tools(config, url, next(iter(aliases[url].values())).target, http)
                    yield Finding("tools", result, text, remedy, url)
                    if config.serving.call_log is not None:
                        yield await _calls(config, replica)
        except FlywheelError as error:
            yield Finding.of("server", error, subject=url)
    for name in config.aliases:
        if len({(found[name].target, found[name].base_model) for found in aliases.values()}) > 1:
            targets = "; ".join(f"{url}: {found[name].target}" for url, found in aliases.items())
            text = f"{name} is not the same version everywhere: {targets}"
            yield Finding("servers", Result.WARNING, text, "The daemon corrects that; see `flywheel status`.")


async def _server(config: Config, replica: Replica, http: httpx2.AsyncClient) -> tuple[Finding, dict[str, Alias]]:
    models = await replica.models()
    if not await replica.ready():
        raise ServeError(f"use {replica.url}", "it is not healthy", "Look at its log; restart it if its engine died.")
    aliases = {name: await replica.alias(name) for name in config.aliases}
    alias = next(iter(aliases.values()))
    wanted = base_name(config.model.base)
    if alias.base_model != wanted:
        why = f"it serves {alias.base_model}, and model.base is {wanted}"
        remedy = "Restart it with `flywheel serve`, or correct model.base."
        raise ServeError(f"train for {replica.url}", why, remedy)
    try:
        # The route accepts POST only, so GET changes nothing; without run-time loading vLLM has no such route.
        answer = await http.get("/v1/load_lora_adapter")
    except httpx2.HTTPError as error:
        why = str(error) or type(error).__name__
        raise ServeError(f"ask {replica.url}", why, "Look at the server's log.", retryable=True) from error
    if answer.status_code == 404:
        remedy = "Start it with `flywheel serve`, or with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
        raise ServeError(f"load adapters into {replica.url}", "it does not load any at run time", remedy)
    adapters = sorted(name for name in models if name != alias.base_model)
    slots = config.max_adapters
    targets = ", ".join(f"{name} → {each.target}" for name, each in aliases.items())
    result, text = Result.OK, f"{targets}; adapters: {', '.join(adapters) or 'none'}"
    remedy = ""
    if waiting := [f"{name} answers 503: {each.waiting}" for name, each in aliases.items() if each.waiting]:
        result, text = Result.FAILED, f"{text}; {'; '.join(waiting)}"
        remedy = "Start `flywheel run`, which restores or confirms what is deployed, or use `flywheel deploy`."
    elif lost := [each.target for each in aliases.values() if each.target not in models]:
        result, text = Result.FAILED, f"{text}; {', '.join(lost)} is not loaded"
        remedy = "Restart it with `flywheel serve`; the daemon loads the adapter again."
    # A swap unloads old versions of its own alias, and needs a slot for the new one beside the one that serves.
    elif (
        len(others := [name for name in adapters if name.partition("@")[0] not in aliases]) + 2 * len(aliases) > slots
    ):
        result, text = Result.WARNING, f"{text}: {', '.join(others)} may leave no slot of {slots} for a new version"
        remedy = (
            "Unload what is not needed (POST /v1/unload_lora_adapter), or raise serving.max_loras and restart it."
        )
    else:
        text = f"{text}; {slots - len(adapters)} of {slots} slots are free"
    figures = {"adapters": len(adapters), "max_loras": slots}
    return Finding("server", result, text, remedy, replica.url, figures), aliases


async def _calls(config: Config, replica: Replica) -> Finding:
    """Whether the server records the calls of agents, and what of them is missing."""
    page = await replica.calls(0, 1)
    if page is None:
        text = "it records no calls: prompts are those that traces show"
        remedy = "Restart it with `flywheel serve` of this version, without `serving.call_log: false`."
        return Finding("calls", Result.WARNING, text, remedy, replica.url)
    pulled = pulled_servers(call_log_copy_path(config.state_dir)).get(replica.url, PulledServer(replica.url))
    parts = [f"{page.state.newest - page.state.oldest + 1:,} recorded calls are there, {pulled.calls:,} were pulled"]
    remedy = ""
    if pulled.missed:
        parts.append(f"{pulled.missed:,} were pruned before they were pulled")
        remedy = "Raise serving.call_log.keep_days or max_gb, or keep `flywheel run` running."
    if dropped := max(pulled.dropped, page.state.dropped):
        parts.append(f"{dropped:,} could not be recorded")
        remedy = remedy or "Look at the server's log: its disk may be full or too slow."
    figures = {"calls": pulled.calls, "missed": pulled.missed, "dropped": dropped}
    result = Result.WARNING if remedy else Result.OK
    return Finding("calls", result, "; ".join(parts), remedy, replica.url, figures)


async def _tools(config: Config, url: str, model: str, http: httpx2.AsyncClient) -> tuple[Result, str, str]:
    """The server's answer to one request with a tool. One to the alias would be recorded as an agent's."""
    request = {**_TOOL_REQUEST, "model": model}
    try:
        response = await http.post("/v1/chat/completions", json=request, timeout=TOOL_TIMEOUT_SECONDS)
    except httpx2.HTTPError as error:
        why = f"a request with a tool got no answer: {str(error) or type(error).__name__}"
        return Result.WARNING, why, "Look at the server's log."
    if response.status_code != 200:
        why, remedy = message_of(response), "Look at the server's log."
        if "tool" in why:
            serving = config.serving
            parser = parsers_of(config.model.base, serving.tool_call_parser, serving.reasoning_parser).tool
            remedy = "Set serving.tool_call_parser, and restart the server."
            if parser:
                remedy = f"Restart it with `flywheel serve`, which sets the parser {parser}."
        return Result.FAILED, f"requests with tools are refused (HTTP {response.status_code}): {why}", remedy
    try:
        message = response.json()["choices"][0]["message"]
        called, text = bool(message.get("tool_calls")), str(message.get("content") or "")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        why = "the answer to a request with a tool is not what vLLM answers"
        return Result.WARNING, why, f"Check that {url} is the inference server."
    if not called and TOOL in text:
        why = f"the model's tool call comes back as text, which the parser does not read: {text.strip()[:100]}"
        return Result.WARNING, why, "Set serving.tool_call_parser to the model's format."
    text = "a request with a tool is answered with a call" if called else "requests with tools are accepted"
    return Result.OK, text, ""
