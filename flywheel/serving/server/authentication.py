"""Authentication of requests: the agents' key and the admin key.

Keys are taken from where OpenAI's, Anthropic's and Azure's clients send them. vLLM's own check leaves many paths open
(/invocations, /tokenize, …); here every path not listed in `routes` needs the admin key.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path

from flywheel.serving import routes
from flywheel.serving.environment_variables import (
    ADMIN_KEY_FILE_VARIABLE,
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    VLLM_KEY_VARIABLE,
)
from flywheel.serving.server.asgi import route_path, with_header
from flywheel.system.server_limits import RefusedError, Scope, header

log = logging.getLogger(__name__)

KEY_HEADERS = (b"x-api-key", b"api-key")
"""Where Anthropic's and Azure's clients send the key."""
ADAPTER_HEADER = b"x-amzn-sagemaker-adapter-identifier"
"""For /invocations, vLLM takes the model from this header instead of the body, which would pass by the alias."""


class Access(enum.IntEnum):
    NONE = 0
    AGENT = 1
    ADMIN = 2


class Gate:
    """Authenticates requests before any of their body is read."""

    def __init__(
        self,
        *,
        agents_key: str | None,
        admin_key: str | None,
        vllm_key: str | None,
        open_metrics: bool,
    ) -> None:
        """Without any key everything is open, as in vLLM; with the agents' key alone, management is impossible."""
        self._agents = _digest(agents_key.encode()) if agents_key else None
        self._admin = _digest(admin_key.encode()) if admin_key else None
        self._vllm = vllm_key
        self._open = routes.OPEN | {routes.METRICS} if open_metrics else routes.OPEN

    @classmethod
    def of_environment(cls, *, open_metrics: bool) -> Gate:
        vllm = os.environ.get(VLLM_KEY_VARIABLE) or None
        return cls(
            agents_key=os.environ.get(API_KEY_VARIABLE, vllm),
            admin_key=os.environ.get(ADMIN_KEY_VARIABLE) or _key_in(os.environ.get(ADMIN_KEY_FILE_VARIABLE)),
            vllm_key=vllm,
            open_metrics=open_metrics,
        )

    def admit(self, scope: Scope) -> tuple[Scope, Access]:
        """The request for vLLM, with vLLM's own key, and what its sender may do. Raises RefusedError."""
        path = route_path(scope)
        access = self._access(scope)
        if path.removesuffix("/") not in self._open:
            if access is Access.NONE:
                raise RefusedError(401, "wrong or missing key")
            if access is Access.AGENT and not routes.is_agents(path):
                raise self._refusal(path)
        if access is not Access.ADMIN:
            scope = with_header(scope, ADAPTER_HEADER, None)
        if self._vllm:
            scope = with_header(scope, b"authorization", b"Bearer " + self._vllm.encode())
        return scope, access

    def _access(self, scope: Scope) -> Access:
        given = [_digest(key) for key in _keys(scope)]
        if self._admin and any(hmac.compare_digest(key, self._admin) for key in given):
            return Access.ADMIN
        if self._agents is None:
            return Access.AGENT if self._admin else Access.ADMIN
        return Access.AGENT if any(hmac.compare_digest(key, self._agents) for key in given) else Access.NONE

    def _refusal(self, path: str) -> RefusedError:
        if not routes.is_admins(path):
            return RefusedError(404, "this server has no such path")
        # If agents need no key, no valid key was presented.
        return RefusedError(403 if self._agents else 401, "this takes the server's admin key (serving.admin_key_env)")


def credential(scope: Scope) -> bytes:
    """The header with the client's key, by which its requests are recognised; empty without one."""
    return next(filter(None, (header(scope, name) for name in (b"authorization", *KEY_HEADERS))), b"")


def _keys(scope: Scope) -> list[bytes]:
    scheme, _, key = header(scope, b"authorization").partition(b" ")
    bearer = [key.strip()] if scheme.lower() == b"bearer" else []
    return bearer + [header(scope, name).strip() for name in KEY_HEADERS]


def _key_in(file: str | None) -> str | None:
    if not file:
        return None
    try:
        if key := Path(file).read_text().strip():
            return key
        why: object = "it is empty"
    except (OSError, UnicodeDecodeError) as error:
        why = error
    log.error("the admin key in %s cannot be read (%s): this server cannot be managed", file, why)
    # Not None, which would leave everything open if agents need no key.
    return secrets.token_hex(32)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
