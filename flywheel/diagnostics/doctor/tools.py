"""Whether agents with tools are served: one request that offers a tool, as agents send it."""

from __future__ import annotations

from typing import Final

import httpx2

from flywheel.config import Config
from flywheel.diagnostics.doctor.finding import Finding, Result
from flywheel.model_parsers import parsers_of
from flywheel.serving.refusals import message_of

PATIENCE_SECONDS: Final = 60.0
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
        async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False, headers=headers) as http:
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
