"""Settings of what other programs are sent: scores of replies, to Langfuse."""

from __future__ import annotations

import hashlib
import os
from urllib.parse import urlsplit

from pydantic import Field

from flywheel.config.section import Section, WebUrl


class LangfuseSettings(Section):
    host: WebUrl
    """Address of Langfuse, such as `https://cloud.langfuse.com`."""
    public_key_env: str = "LANGFUSE_PUBLIC_KEY"
    """Environment variable with the project's public key."""
    secret_key_env: str = "LANGFUSE_SECRET_KEY"
    """Environment variable with its secret key."""
    comments: bool = False
    """Whether scores carry the judge's reasons, which may quote replies."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Timeout of one request."""

    @property
    def server(self) -> str:
        """The server's name and port, for messages."""
        return urlsplit(self.host).netloc.rpartition("@")[2]

    @property
    def note_key(self) -> str:
        """The key of the note with the position and the counts of what was sent to this project."""
        return f"langfuse {hashlib.sha256(f'{self.host} {self.public_key_env}'.encode()).hexdigest()[:16]}"

    @property
    def keys(self) -> dict[str, str]:
        """Public and secret key by their variables; empty while a variable is not set."""
        return {name: os.environ.get(name, "") for name in (self.public_key_env, self.secret_key_env)}


class ExportSettings(Section):
    langfuse: LangfuseSettings | None = None
    """Where each verdict of the judge is sent as scores. Default: nowhere."""
