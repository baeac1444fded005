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
    """Days that recorded calls (requests to the alias with responses) are kept. `serving.call_log: false` records
    nothing."""
    max_gb: float = Field(default=5.0, gt=0)
    """Maximum size of each call log in GB (1,000,000,000 bytes). The oldest calls are removed earlier."""

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
    """What the alias answers after a start. `auto`: the last adapter, or the base model if none is recorded. `wait`:
    503 until the daemon has set the adapter, for replicas that start with an empty state, as on Kubernetes."""
    adopt: UserPath | None = None
    """Folder that `deploy.publish` writes. A server without a record starts with what `current.json` names there,
    also without the daemon."""
    urls: Annotated[list[Annotated[str, AfterValidator(_replica)]], AfterValidator(_replicas)] = Field(
        default_factory=lambda given: [own_url(given["host"], given["port"])], min_length=1
    )
    """URLs of all vLLM replicas (without `/v1`). `dns://NAME:PORT` is one replica at each address of the name.
    Default: the server that `flywheel serve` starts."""
    api_key_env: str | None = None
    """Environment variable with the agents' key, for inference, the list of models and metrics. With it, requests
    without the key are refused."""
    admin_key_env: str | None = None
    """Environment variable with the admin key, which gives access to everything. Default: `serving/admin.key` in the
    state directory. Servers on other machines need the variable on both sides."""
    expose_versions: bool = False
    """Whether the agents' key may ask for loaded versions by name (`my-agent@r0007`) and list them. Otherwise only
    for aliases and base model."""
    open_metrics: bool = False
    """Whether `/metrics` answers without a key."""
    allowed_hosts: list[Annotated[str, AfterValidator(_host_name)]] = []
    """Host names of a server on loopback, for example behind a proxy. Requests with another `Host` header are
    refused."""
    max_body_mb: float = Field(default=32.0, gt=0)
    """Maximum request body in MB (1,000,000 bytes). Longer ones get 413."""
    max_adapter_gb: float = Field(default=4.0, gt=0)
    """Maximum size in GB (1,000,000,000 bytes) of an adapter that the daemon sends to a server without access to its
    files."""
    tool_call_parser: str | None = None
    """vLLM's parser for tool calls, or `none`. Default: by the model's family."""
    reasoning_parser: str | None = None
    """vLLM's parser for reasoning, or `none`. Default: by the model's family."""
    max_loras: int = Field(default=4, ge=2)
    """Adapters of each target that a server holds: old, new, the one to roll back to, and one still in use. Further
    loads are refused."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 64
    """Maximum LoRA rank that the server accepts."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Context length of the server. Default: the model's."""
    cpu_kv_cache_gib: int = Field(default=2, gt=0)
    """Key-value cache without a GPU, in GiB."""
    load_timeout_seconds: float = Field(default=120.0, gt=0)
    """Timeout for loading an adapter."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long the old adapter stays loaded for requests in flight."""
    call_log: Annotated[CallLogSettings | None, BeforeValidator(_call_log)] = CallLogSettings()
    extra_args: list[str] = []
    """Additional arguments for vLLM's server."""


class DaemonSettings(Section):
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long a stop waits for judge calls in flight."""
    round_attempts: int = Field(default=2, gt=0)
    """Maximum starts of a round before it fails."""
    failed_round_wait_seconds: float = Field(default=1800.0, ge=0)
    """Pause after a failed round; doubled for each further failure in a row, up to sixteen times."""
    round_timeout_seconds: float = Field(default=6 * 3600.0, gt=0)
    """A worker that runs longer is stopped and its round abandoned."""
    on_stop: Literal["stop", "detach"] = "stop"
    """A running round when `flywheel run` stops. `stop`: its worker ends, and the next start goes on from its last
    checkpoint. `detach`: it goes on, and the next start adopts it. Containers refuse that; systemd needs a
    drop-in."""
    reconcile_seconds: float = Field(default=15.0, gt=0)
    """Interval at which servers are compared with the deployed adapter."""
    metrics: Address | None = "127.0.0.1:9464"
    """HOST:PORT of `/metrics`, `/healthz` and `/readyz`; `null` serves nothing. An address that other machines reach
    needs a token."""
    metrics_token_env: str | None = None
    """Environment variable with the token that `/metrics` requires (`Authorization: Bearer TOKEN`). The others need
    none."""

    @model_validator(mode="after")
    def _shows_nothing_to_all(self) -> Self:
        is_open = self.metrics is not None and not is_loopback(host_and_port(self.metrics)[0])
        if is_open and self.metrics_token_env is None:
            raise ValueError(
                f"other machines reach metrics {self.metrics}, which show names and paths: name the environment"
                " variable with a token in metrics_token_env, or serve them at 127.0.0.1"
            )
        return self
