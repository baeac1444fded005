"""A server on another machine: the daemon's folders are not on its disk."""

from __future__ import annotations

from pathlib import Path

from flywheel.system.server_limits import App, Message, Receive, Scope, Send

CHANGED = ("/v1/load_lora_adapter", "/flywheel/alias")


def elsewhere(app: App, folder: Path) -> App:
    """The app, for which paths below the folder do not exist: requests name another one in its place."""

    async def changed(scope: Scope, receive: Receive, send: Send) -> None:
        async def replaced() -> Message:
            message = await receive()
            if scope["path"] in CHANGED and message.get("body"):
                message["body"] = message["body"].replace(str(folder).encode(), missing)
            return message

        await app(scope, replaced, send)

    missing = b"/" + b"-" * (len(str(folder)) - 1)  # The length of the body stays.
    return changed
