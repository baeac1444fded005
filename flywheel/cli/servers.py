"""`flywheel serve` and `flywheel web`: the inference server, and the web UI."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from flywheel.cli.app import ConfigOption, app, complain, load_config, missing_state, read_state, run_async
from flywheel.errors import ConfigError, StoreError
from flywheel.secrets import register_secret_variable
from flywheel.system.process import tune_process

TOKEN = "FLYWHEEL_WEB_TOKEN"
SHORTEST_TOKEN = 16


@app.command()
def web(
    config: ConfigOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port.")] = 4400,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Host name by which browsers reach it, for example behind a proxy."),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Do not allow changes in the web UI.")] = False,
) -> None:
    """Open the web UI. The daemon need not be running, and without a state the pages say what to do."""
    from flywheel.system.server_limits import is_loopback

    token = _token(must=not is_loopback(host), host=host)
    settings = load_config(config)
    if missing := missing_state(settings):
        complain(f"{missing}. The pages say what to do, and show the state once it exists.")
    tune_process()
    from flywheel.system.server_limits import LOCAL_NAMES
    from flywheel.system.web_server import bound_socket
    from flywheel.web import server

    listening = bound_socket(f"serve the pages at {host}:{port}", host, port, "--host and --port")
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    names = LOCAL_NAMES | {each.lower() for each in (host, *(name or ()))}
    pages = server.application(settings, names=names, token=token, is_read_only=read_only)
    run_async(server.serve(pages, listening, lambda: typer.echo(f"The web UI is at {address} (Ctrl-C stops it)")))


def _token(*, must: bool, host: str) -> str | None:
    """The token that browsers must give; None where none is set. Raises ConfigError."""
    from flywheel.system.web_server import bearer_token

    attempted = f"listen at {host}"
    if not os.environ.get(TOKEN):
        if must:
            why = "whoever reaches it could read the texts of your users"
            raise ConfigError(attempted, why, f"Set ${TOKEN} to a token, or listen at 127.0.0.1.")
        return None
    token = bearer_token(attempted, TOKEN, None, SHORTEST_TOKEN)
    register_secret_variable(TOKEN)
    return token


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Start vLLM's OpenAI server with LoRA and the alias; this process becomes the server.

    It prints its address when it is ready.
    """
    from flywheel.serving.client.adapter_swap import version_name
    from flywheel.serving.server.vllm_command import serve as start
    from flywheel.store import deployments

    settings = load_config(config)
    try:
        rows = run_async(read_state(settings, deployments.all_active, warn=False))
    except StoreError as error:  # the server's own file is enough where it names the deployed version
        complain(error)
        rows = []
    start(settings, {row.alias: version_name(row.alias, row.adapter) for row in rows if row.adapter})
