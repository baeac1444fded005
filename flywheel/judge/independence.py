"""Check that the judge is independent of the trained model, which would reward its own mistakes."""

from __future__ import annotations

import ipaddress
import logging
from urllib.parse import urlsplit

from flywheel.config import Config
from flywheel.errors import ConfigError
from flywheel.judge.client import endpoints_of, settings_for
from flywheel.rubric import Rubric

log = logging.getLogger(__name__)

PORTS = {"http": 80, "https": 443}


def check_independence(config: Config, rubric: Rubric | None = None) -> None:
    """Raise ConfigError if the judge, or its backup, is the trained model; log what else makes it dependent.

    `rubric` may name a judge model of its own.
    """
    for warning in independence_warnings(config, rubric):
        log.warning("%s", warning)


def independence_warnings(config: Config, rubric: Rubric | None = None) -> list[str]:
    """Reasons to doubt the judge's independence. Raises ConfigError for a judge that is the trained model.

    The alias and its adapters are names that only our servers serve: they are an error at any endpoint. The base
    model is an error at our servers and a warning elsewhere. Any other model at our servers is a warning.
    """
    warnings: list[str] = []
    if config.judge.allow_self:
        return warnings
    servers = {server_address(url) for url in config.serving.urls}
    alias, base = config.model.alias, config.model.base.rstrip("/")
    for endpoint in endpoints_of(settings_for(rubric, config.judge) if rubric else config.judge):
        is_ours = server_address(endpoint.base_url) in servers
        is_alias = endpoint.model == alias or endpoint.model.startswith(f"{alias}@")
        is_base = endpoint.model.rstrip("/") in (base, base.rpartition("/")[2])
        if is_alias or (is_base and is_ours):
            raise ConfigError(
                f"judge with {endpoint}",
                "it is the model that is trained",
                f"Set {endpoint.section}.model to an independent model, or judge.allow_self: true if you know why.",
            )
        if is_base or is_ours:
            why = "is the base of the trained model" if is_base else "is at the trained model's own server"
            warnings.append(f"the judge {endpoint} {why}: it should be an independent one")
    return warnings


def server_address(url: str) -> tuple[str, int, str]:
    """Host, port and path of a URL in a normal form. All names of this machine are "loopback"."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        return url, 0, ""
    path = "/".join(part for part in parts.path.split("/") if part).removesuffix("v1").rstrip("/")
    is_loopback = host == "localhost" or host.endswith(".localhost")
    try:
        address = ipaddress.ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        is_loopback = address.is_loopback or address.is_unspecified
    except ValueError:
        pass  # a name
    return "loopback" if is_loopback else host, port, path
