"""The servers that serve the agent: reachable, with the alias, able to take an adapter and requests with tools.

Nothing is changed there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import urlsplit

import httpx2

from flywheel.config import Config
from flywheel.diagnostics.doctor.finding import Finding, Result
from flywheel.errors import FlywheelError, ServeError
from flywheel.model_parsers import parsers_of
from flywheel.serving.client import Alias, Replica
from flywheel.serving.key import admin_key
from flywheel.serving.loopback import is_loopback
from flywheel.serving.refusals import message_of
from flywheel.serving.restart import base_name, deployed
from flywheel.serving.server import command

PATIENCE_SECONDS: Final = 10.0


def is_local(config: Config) -> bool:
    """Whether the configured servers are this machine's, as `flywheel serve` starts them."""
    return any(is_loopback(urlsplit(url).hostname or "") for url in config.serving.urls)


def serve(config: Config) -> Finding:
    """Whether `flywheel serve` would take these settings."""
    if not is_local(config):
        return Finding("serve", Result.SKIPPED, "the servers are on other machines")
    try:
        _, lost = deployed(config)
        command(config)
    except FlywheelError as error:
        return Finding.of("serve", error)
    if lost:
        told = f"once it is started anew: {' '.join(lost)}"
        remedy = "Put the adapter's files back from a backup, or deploy another: flywheel deploy, flywheel rollback."
        return Finding("serve", Result.WARNING, told, remedy)
    told = f"{config.serving.max_loras} adapters of rank {config.serving.max_lora_rank} or less"
    return Finding("serve", Result.OK, f"settings can be used: {told}")


async def servers(config: Config) -> AsyncIterator[Finding]:
    """Two findings for each server, and one more if they differ."""
    serving = config.serving
    aliases: dict[str, Alias] = {}
    for url in serving.urls:
        try:
            key = admin_key(config, url, f"ask {url}")
            async with Replica(url, key, timeout_seconds=PATIENCE_SECONDS) as replica:
                found, aliases[url] = await _server(config, replica, key)
            yield found
            if found.result is not Result.FAILED:
                yield await tools(config, url, key)
        except FlywheelError as error:
            yield Finding.of("server", error, subject=url)
    if len({(alias.target, alias.base_model) for alias in aliases.values()}) > 1:
        places = "; ".join(f"{url}: {alias.target}" for url, alias in aliases.items())
        told = f"{config.model.alias} does not stand for the same everywhere: {places}"
        remedy = "The daemon brings them together; see `flywheel status`."
        yield Finding("servers", Result.WARNING, told, remedy)


async def _loads_adapters(url: str, key: str | None) -> bool:
    """Whether there is a way to load one. Without the setting that allows it, vLLM knows no such path."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False) as http:
        try:
            # It can only be posted to: this asks for nothing.
            return (await http.get(f"{url}/v1/load_lora_adapter", headers=headers)).status_code != 404
        except httpx2.TransportError as error:
            why = str(error) or type(error).__name__
            raise ServeError(f"ask {url}", why, "Look at the server's log.", retryable=True) from error


async def _server(config: Config, replica: Replica, key: str | None) -> tuple[Finding, Alias]:
    models = await replica.models()
    if not await replica.ready():
        raise ServeError(f"use {replica.url}", "it is not healthy", "Look at its log; restart it if its engine died.")
    alias = await replica.alias(config.model.alias)
    wanted = base_name(config.model.base)
    if alias.base_model != wanted:
        raise ServeError(
            f"train for {replica.url}",
            f"it serves {alias.base_model}, and model.base is {wanted}",
            "Restart it with `flywheel serve`, or correct model.base.",
        )
    if not await _loads_adapters(replica.url, key):
        raise ServeError(
            f"load adapters into {replica.url}",
            "it does not load any at run time",
            "Start it with `flywheel serve`, or with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.",
        )
    adapters = sorted(name for name in models if name != alias.base_model)
    slots = config.serving.max_loras
    figures = {"adapters": len(adapters), "max_loras": slots}
    told = f"{config.model.alias} → {alias.target}; adapters: {', '.join(adapters) or 'none'}"
    result, remedy = Result.OK, ""
    if alias.target not in models:
        result, told = Result.FAILED, f"{told}; {alias.target} is not loaded"
        remedy = "Restart it with `flywheel serve`; the daemon brings the adapter back."
    elif len(adapters) >= slots:
        result, told = Result.WARNING, f"{told}: all {slots} slots of serving.max_loras are taken"
        remedy = "Raise serving.max_loras, and restart it: a swap needs room for both versions."
    else:
        told = f"{told}; {slots - len(adapters)} of {slots} slots are free"
    return Finding("server", result, told, remedy, replica.url, figures), alias


TOOLS_PATIENCE_SECONDS: Final = 60.0
TOOL: Final = "look_up_local_time"
_REQUEST: Final = {
    "messages": [{"role": "user", "content": "What time is it in Lisbon now? Use the tool."}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": TOOL,
                "description": "The present time in a city.",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        }
    ],
    "max_tokens": 128,
    "temperature": 0,
}


async def tools(config: Config, url: str, key: str | None) -> Finding:
    """What the server at `url` makes of a request with a tool."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx2.AsyncClient(timeout=TOOLS_PATIENCE_SECONDS, trust_env=False, headers=headers) as http:
            response = await http.post(f"{url}/v1/chat/completions", json={**_REQUEST, "model": config.model.alias})
    except httpx2.HTTPError as error:
        told = f"a request with a tool got no answer: {str(error) or type(error).__name__}"
        return Finding("tools", Result.WARNING, told, "See whether the server is overloaded; look at its log.", url)
    if response.status_code != 200:
        return _refused(config, url, response)
    try:
        message = response.json()["choices"][0]["message"]
        called, text = bool(message.get("tool_calls")), str(message.get("content") or "")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        told = "the answer to a request with a tool is not what vLLM answers"
        return Finding("tools", Result.WARNING, told, f"See whether {url} is the inference server.", url)
    if not called and TOOL in text:
        shown = " ".join(text.split())[:100]
        told = f"the model's tool call comes back as text, which the parser does not read: {shown}"
        return Finding("tools", Result.WARNING, told, "Set serving.tool_call_parser to the model's format.", url)
    told = "a request with a tool is answered with a call" if called else "requests with tools are taken"
    return Finding("tools", Result.OK, told, subject=url)


def _refused(config: Config, url: str, response: httpx2.Response) -> Finding:
    why = message_of(response)
    told = f"requests with tools are refused (HTTP {response.status_code}): {why}"
    serving = config.serving
    parser = parsers_of(config.model.base, serving.tool_call_parser, serving.reasoning_parser).tool
    remedy = "Look at the server's log."
    if "tool" in why:
        remedy = f"Set serving.tool_call_parser: no parser is known for {config.model.base}. Then restart the server."
        if parser:
            remedy = f"Restart it with `flywheel serve`, which starts it with the parser {parser}."
    return Finding("tools", Result.FAILED, told, remedy, url)
