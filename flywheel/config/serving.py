"""Settings of the inference servers and of the daemon."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from flywheel.config.ingest import Address, host_and_port
from flywheel.config.section import Section, UserPath
from flywheel.system.server_limits import is_loopback

_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


DNS: Final = "dns"
"""Scheme of an entry of `serving.urls` that stands for a replica at each address of a name."""


def _replica(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(
            "its port is not a number up to 65535" if "ort" in str(error) else "its host is no address"
        ) from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("a name or password in it would be shown: name the key's variable in serving.api_key_env")
    if parts.scheme not in ("http", "https", DNS) or not parts.hostname:
        raise ValueError("it must begin with http://, https:// or dns:// and name a host")
    if parts.scheme == DNS and (port is None or parts.path.strip("/")):
        raise ValueError("it must be dns://NAME:PORT: the addresses of the name, all with that port")
    if parts.query or parts.fragment:
        raise ValueError("it must be host, port and path alone")
    if any(not letter.isprintable() or letter.isspace() for letter in parts.hostname):
        raise ValueError("a host has no spaces")
    url = url.rstrip("/")
    if url.endswith("/v1"):
        raise ValueError("it must be without /v1: Flywheel also asks for what lies beside that")
    return url


def _replicas(urls: list[str]) -> list[str]:
    seen: dict[object, str] = {}
    for url in urls:
        parts = urlsplit(url)
        host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
        place = (host, parts.port or {"http": 80, "https": 443}.get(parts.scheme), parts.path)
        if place in seen:
            raise ValueError(f"a replica is named twice: {seen[place]} and {url}")
        seen[place] = url
    return urls


def _host_name(name: str) -> str:
    name = name.lower()
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        if _HOST_NAME.fullmatch(name):
            return name
    raise ValueError("it must be a host name or an address alone, without scheme, port or wildcard")


def own_url(host: str, port: int) -> str:
    """The URL of a server that listens on `host` and `port`, from the same machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("::1" if address.version == 6 else "127.0.0.1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


class CallLogSettings(Section):
    keep_days: float = Field(default=14.0, gt=0)
    """Days that `flywheel serve` and the daemon keep recorded calls: requests to the alias with their responses.
    `serving.call_log: false` records nothing."""
    max_gb: float = Field(default=5.0, gt=0)
    """Maximum size of each call log in GB (1,000,000,000 bytes): the oldest calls are removed earlier. Space in the
    file that is free again does not count."""

    @property
    def keep_ns(self) -> int:
        """`keep_days` in nanoseconds."""
        return int(self.keep_days * 86_400e9)

    @property
    def max_bytes(self) -> int:
        """`max_gb` in bytes."""
        return int(self.max_gb * 1e9)


def _call_log(given: object) -> object:
    if given is None:
        raise ValueError("it must be false, or a mapping of keys to values, not `null`")
    return None if given is False else {} if given is True else given


class ServingSettings(Section):
    host: str = "127.0.0.1"
    """Address on which `flywheel serve` listens. Addresses other than loopback need `api_key_env`."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of `flywheel serve`."""
    start: Literal["auto", "wait"] = "auto"
    """What the alias answers after a start of `flywheel serve`. `auto`: the last target, the base model if the state
    directory records no deployment, and 503 with the reason if its adapter cannot be loaded. `wait`: 503 also if no
    deployment is recorded, until the daemon says what is deployed; for servers that start with an empty state
    directory beside others that serve an adapter."""
    adopt: UserPath | None = None
    """Folder that `deploy.publish` writes. A server without a record of its own starts with what `current.json` names
    there, also without the daemon, which then confirms or corrects it. Default: none."""
    urls: Annotated[list[Annotated[str, AfterValidator(_replica)]], AfterValidator(_replicas)] = Field(
        default_factory=lambda given: [own_url(given["host"], given["port"])], min_length=1
    )
    """URLs of all vLLM replicas that serve the agent (without `/v1`). `dns://NAME:PORT` stands for one replica
    (`http`) at each address that the name has at the time. Default: the server that `flywheel serve` starts on `host`
    and `port`."""
    api_key_env: str | None = None
    """Name of the environment variable with the agents' key; `flywheel serve` then refuses requests without it. The
    key gives access to inference, the list of models and the metrics only."""
    admin_key_env: str | None = None
    """Name of the environment variable with the admin key, which gives access to everything: the alias, adapters and
    all other paths. Default: `flywheel serve` creates `serving/admin.key` in the state directory, which commands and
    the daemon on the same state read. Servers on other machines need the variable on both sides."""
    expose_versions: bool = False
    """Whether the agents' key may ask for loaded versions by name (`my-agent@r0007`) and sees them in `/v1/models`.
    Otherwise it may ask for the aliases and the base model. The admin key may ask for all of them."""
    open_metrics: bool = False
    """Whether `/metrics` answers without a key."""
    allowed_hosts: list[Annotated[str, AfterValidator(_host_name)]] = []
    """Host names of a server on loopback (for example behind a proxy), besides localhost, 127.0.0.1 and ::1. Requests
    with another `Host` header are refused."""
    max_body_mb: float = Field(default=32.0, gt=0)
    """Maximum size of a request body in MB (1,000,000 bytes); longer ones are refused with 413."""
    max_adapter_gb: float = Field(default=4.0, gt=0)
    """Maximum size in GB (1,000,000,000 bytes) of an adapter that the daemon sends to a server that does not have its
    files on a disk of its own."""
    tool_call_parser: str | None = None
    """vLLM's parser for the model's tool calls, or `none`. Default: by the model's family (Qwen, Llama, Mistral,
    DeepSeek, GLM, …)."""
    reasoning_parser: str | None = None
    """vLLM's parser for the model's reasoning, or `none`. Default: by the model's family."""
    max_loras: int = Field(default=4, ge=2)
    """Number of adapters of each target (`targets`) that a server holds: the old one, the new one, the one to roll
    back to, and one that requests in flight still use. A load beyond it is refused."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 64
    """Maximum LoRA rank that the server accepts."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Context length of the server. Default: the model's."""
    cpu_kv_cache_gib: int = Field(default=2, gt=0)
    """Size of the key-value cache without a GPU, in GiB."""
    load_timeout_seconds: float = Field(default=120.0, gt=0)
    """Timeout in seconds for loading an adapter."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Seconds that the old adapter stays loaded for requests in flight."""
    call_log: Annotated[CallLogSettings | None, BeforeValidator(_call_log)] = CallLogSettings()
    extra_args: list[str] = []
    """Additional arguments for vLLM's server."""


class DaemonSettings(Section):
    drain_seconds: float = Field(default=30.0, ge=0)
    """Seconds that a stop waits for judge calls in flight."""
    round_attempts: int = Field(default=2, gt=0)
    """Maximum number of starts of a round before it fails."""
    failed_round_wait_seconds: float = Field(default=1800.0, ge=0)
    """Seconds after a failed round before the next one starts automatically; doubled for each further failure in a
    row, up to sixteen times."""
    round_timeout_seconds: float = Field(default=6 * 3600.0, gt=0)
    """A worker that runs longer (in seconds) is stopped and its round abandoned."""
    on_stop: Literal["stop", "detach"] = "stop"
    """What happens to the worker of a round when `flywheel run` is stopped. `stop` ends it, and the next start
    resumes the round from its last checkpoint. `detach` leaves it running, and the next `flywheel run` adopts it;
    containers refuse that, and systemd needs a drop-in. `flywheel run --once` and `flywheel round` always end
    it."""
    reconcile_seconds: float = Field(default=15.0, gt=0)
    """Interval in seconds at which servers are compared with the deployed adapter (a restarted server loses its
    adapters)."""
    metrics: Address | None = "127.0.0.1:9464"
    """The HOST:PORT at which `flywheel run` serves `/metrics`, `/healthz` and `/readyz`; `null` serves nothing. An
    address that other machines can reach needs a token."""
    metrics_token_env: str | None = None
    """Name of the environment variable with the token that `/metrics` then requires (`Authorization: Bearer TOKEN`).
    `/healthz` and `/readyz` need none."""

    @model_validator(mode="after")
    def _shows_nothing_to_all(self) -> Self:
        is_open = self.metrics is not None and not is_loopback(host_and_port(self.metrics)[0])
        if is_open and self.metrics_token_env is None:
            raise ValueError(
                f"other machines reach metrics {self.metrics}, which show names and paths: name the environment"
                " variable with a token in metrics_token_env, or serve them at 127.0.0.1"
            )
        return self
