"""Whether the judge is somebody else: the trained model would reward its own mistakes."""

from __future__ import annotations

import ipaddress
import logging
from urllib.parse import urlsplit

from flywheel.config import Config
from flywheel.errors import ConfigError
from flywheel.judge.client import judge_of, judges
from flywheel.rubric import Rubric

log = logging.getLogger(__name__)

PORTS = {"http": 80, "https": 443}


def check_independence(config: Config, rubric: Rubric | None = None) -> None:
    """Refuse a judge, or a backup, that is the trained model; a rubric may name another one. Raises ConfigError.

    What else speaks against it is warned of.
    """
    for doubt in doubts(config, rubric):
        log.warning("%s", doubt)


def doubts(config: Config, rubric: Rubric | None = None) -> list[str]:
    """What speaks against the judge's independence. Raises ConfigError for one that is the trained model.

    The alias and its adapters are names that only our servers give, so they are refused wherever they are asked for.
    The base model is refused at our servers; elsewhere, like any other name at our servers, it is warned of.
    """
    found: list[str] = []
    if config.judge.allow_self:
        return found
    ours = {place(url) for url in config.serving.urls}
    for who in judges(judge_of(rubric, config.judge) if rubric else config.judge):
        here = place(who.base_url) in ours
        trained, base = _is_trained(who.model, config), _is_base(who.model, config)
        if trained or (base and here):
            raise ConfigError(
                f"judge with {who}",
                "it is the model that is trained",
                f"Set {who.section}.model to an independent model, or judge.allow_self: true if you know why.",
            )
        if base or here:
            why = "is the base of the trained model" if base else "is at the trained model's own server"
            found.append(f"the judge {who} {why}: it should be an independent one")
    return found


def _is_trained(model: str, config: Config) -> bool:
    return model == config.model.alias or model.startswith(f"{config.model.alias}@")


def _is_base(model: str, config: Config) -> bool:
    base = config.model.base.rstrip("/")
    return model.rstrip("/") in (base, base.rpartition("/")[2])


def place(url: str) -> tuple[str, int, str]:
    """Where a URL leads: host, port and path, without what is only spelling. Every name of this machine is one."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        return url, 0, ""
    path = "/".join(part for part in parts.path.split("/") if part).removesuffix("v1").rstrip("/")
    return "loopback" if _is_loopback(host) else host, port, path


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)
