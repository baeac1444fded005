"""Settings of sources, and of which replies become tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from flywheel.config.section import HubName, Section, Share, UserPath
from flywheel.system.server_limits import is_loopback

PORT_DIGITS = 5


def host_and_port(listen: str) -> tuple[str, int]:
    """The parts of HOST:PORT; the host of `[::1]:4318` is `::1`. Raises ValueError."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_number = port.isascii() and port.isdecimal() and len(port) <= PORT_DIGITS
    # A slash indicates a URL, http://127.0.0.1:4318.
    if not (colon and host and "/" not in host and is_number and int(port) < 2**16):
        raise ValueError(f"{listen!r} is not HOST:PORT, for example 127.0.0.1:4318 or [::1]:4318")
    return host, int(port)


def _address(listen: str) -> str:
    host_and_port(listen)
    return listen


Address = Annotated[str, AfterValidator(_address)]
"""HOST:PORT."""


class ModelFilter(Section):
    include: list[str] = []
    """Models whose replies are trained on, besides the alias, its versions and its base: names or patterns, `*` for
    all. Other replies are only judged."""
    exclude: list[str] = []
    """Models whose replies are never trained on: names or patterns."""
    teachers: list[str] = []
    """Models whose accepted replies SFT imitates: names or patterns. Other stages and the gate use their prompts.
    `exclude` takes precedence."""


class StudioSource(Section):
    type: Literal["studio"] = "studio"
    """A database of AgentScope Studio. The default type."""
    path: UserPath = Field(default=Path("~/AgentScope-Studio/database.sqlite"), validate_default=True)
    """The SQLite file, opened read-only."""
    models: ModelFilter = ModelFilter()


class DatasetSettings(Section):
    path: HubName
    """A file (JSON, Parquet, CSV), a folder, or a name on the Hub."""
    name: str | None = None
    """The subset."""
    split: str = "train"
    """The split, perhaps with a range (`train[:100]`)."""


class JsonlSource(Section):
    type: Literal["jsonl"]
    """A task file of another program, one JSON object per line."""
    path: UserPath
    """A file, or a directory of `*.jsonl` files. Lines must only be appended. Default with a `dataset`: a file in
    the state directory."""
    dataset: DatasetSettings | None = None
    """A data set with a task in each row, which `datasets` writes to `path` once, if there is no such file."""
    split: Literal["train", "held-out"] | None = None
    """The split of all its tasks. Default: by `ingest.train_ratio`."""
    models: ModelFilter = ModelFilter()


class OtlpSource(Section):
    type: Literal["otlp"]
    """Spans that agents send by OTLP/HTTP."""
    listen: Address = "127.0.0.1:4318"
    """HOST:PORT to listen on; the path is `/v1/traces`. An address that other machines reach needs a token."""
    token_env: str | None = None
    """Environment variable with the token that senders must send (`Authorization: Bearer TOKEN`)."""
    models: ModelFilter = ModelFilter()

    @model_validator(mode="after")
    def _is_not_open_to_all(self) -> Self:
        if self.token_env is None and not is_loopback(host_and_port(self.listen)[0]):
            raise ValueError(
                f"other machines reach listen {self.listen}, and whoever can send spans can add training data: name"
                " the environment variable with a token in token_env, or listen at 127.0.0.1"
            )
        return self


class CallsSource(Section):
    type: Literal["calls"]
    """Replies found in the calls that `flywheel serve` has recorded."""
    idle_minutes: float = Field(default=60.0, gt=0)
    """A call continues a conversation whose last call ended at most so long before. A reply that waits longer for
    its tools is unfinished."""
    models: ModelFilter = ModelFilter()


def _source_type(value: Any) -> str:
    found = value.get("type", "studio") if isinstance(value, dict) else getattr(value, "type", "studio")
    return str(found)


SourceSettings = Annotated[
    Annotated[StudioSource, Tag("studio")]
    | Annotated[JsonlSource, Tag("jsonl")]
    | Annotated[OtlpSource, Tag("otlp")]
    | Annotated[CallsSource, Tag("calls")],
    Discriminator(_source_type),
]


class AgentSettings(Section):
    include: list[str] = []
    """Agents whose nested and pipeline-stage replies also become tasks. Root replies always do."""
    exclude: list[str] = []
    """Agents whose replies never become tasks."""


class IngestSettings(Section):
    settle_seconds: float = Field(default=2.0, ge=0)
    """A reply is complete when its agent span has arrived and its trace has not changed for this long."""
    poll_seconds: float = Field(default=2.0, gt=0)
    """Interval at which sources are checked without file system events."""
    abandon_seconds: float = Field(default=3600.0, gt=0)
    """A trace without its agent span after this long is unfinished."""
    calls_wait_seconds: float = Field(default=30.0, ge=0)
    """How long a finished reply waits for its recorded calls."""
    sweep_seconds: float = Field(default=3600.0, gt=0)
    """Interval of full scans, which find rows that changed in place."""
    keep_received_days: float = Field(default=30.0, gt=0)
    """Days that received spans and the places of recorded calls are kept. Replies and tasks stay."""
    agents: AgentSettings = AgentSettings()
    train_ratio: Share = 0.7
    """Share of conversations in the training split. The others are held out for the gate."""
    split_seed: int = 42
    """Seed of the split. Do not change it: conversations would move between the splits."""
    output: UserPath | None = None
    """The task file, which is only appended to. Default: `tasks.jsonl` in the state directory. A file with other
    content, or one that a source reads, is refused."""
