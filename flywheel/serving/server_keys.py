"""The keys of the servers: the agents' for inference, the admin key for everything else."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from flywheel.config.file import Config
from flywheel.config.serving import ServingSettings
from flywheel.errors import Condition, ServeError
from flywheel.secrets import is_sendable, register_secret
from flywheel.serving.environment_variables import VLLM_KEY_VARIABLE
from flywheel.system.files import sync
from flywheel.system.server_limits import is_loopback


def agents_key(serving: ServingSettings, attempted: str) -> str | None:
    """The key that agents need, None if they need none. Raises ServeError, without the key, for an invalid one."""
    if name := serving.api_key_env:
        return _of_environment(name, "serving.api_key_env", attempted)
    # A key for vLLM itself is meant for the agents.
    return _of_environment(VLLM_KEY_VARIABLE, "", attempted) if os.environ.get(VLLM_KEY_VARIABLE) else None


def admin_key_file(config: Config) -> Path:
    return config.state_dir / "serving" / "admin.key"


def admin_key(config: Config, url: str, attempted: str) -> str | None:
    """The admin key of the server at `url`; None if `flywheel serve` has not created one in this state yet.

    Raises ServeError for an invalid key, and for a server on another machine without a configured key.
    """
    if name := config.serving.admin_key_env:
        return _of_environment(name, "serving.admin_key_env", attempted)
    host = urlsplit(url).hostname or ""
    if not is_loopback(host) and host != config.serving.host:
        raise ServeError(
            attempted,
            "it is on another machine, and serving.admin_key_env is not set: only servers on this one share the key "
            f"in {admin_key_file(config)}",
            "Name an environment variable with one key in serving.admin_key_env, here and for its `flywheel serve`.",
        ).of_condition(Condition.MISCONFIGURED)
    file = admin_key_file(config)
    try:
        return _sendable(file.read_text().strip(), str(file), attempted) or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = f"the admin key in {file} cannot be read ({getattr(error, 'strerror', None) or error})"
        hint = "Run this as the user that runs `flywheel serve`, or set serving.admin_key_env."
        raise ServeError(attempted, why, hint).of_condition(Condition.MISCONFIGURED) from error


def make_admin_key(config: Config) -> None:
    """Create the file with the admin key, readable by its owner only, unless it exists. Raises OSError."""
    file = admin_key_file(config)
    if file.exists():
        return file.chmod(0o600)
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with open(beside, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:
            opened.write(secrets.token_urlsafe(32) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        # Linked and not renamed: a key that another server has created meanwhile must stay.
        with contextlib.suppress(FileExistsError):
            os.link(beside, file)
    finally:
        beside.unlink(missing_ok=True)
    sync(file.parent)


def _of_environment(name: str, setting: str, attempted: str) -> str:
    key = os.environ.get(name)
    if not key:
        raise ServeError(
            attempted, f"{setting} names {name}, which is not set", f"Set {name} in its environment."
        ).of_condition(Condition.MISCONFIGURED)
    return _sendable(key, name, attempted)


def _sendable(key: str, place: str, attempted: str) -> str:
    register_secret(key)
    # Checked here because the HTTP library's error would contain the header.
    if key != key.strip() or not is_sendable(key):
        raise ServeError(
            attempted,
            f"the key in {place} cannot be sent: "
            "it holds a line end, a space at its edge or a character beyond ASCII",
            f"Set {place} to the key alone.",
        ).of_condition(Condition.MISCONFIGURED)
    return key
