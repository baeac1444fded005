"""The configuration: one YAML file, strict, with units in the names.

Each field's docstring is its documentation (`docs/configuration.md` is generated from it). An unknown key is an error
that names the key's path. Secrets are never in the file: it names environment variables.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from apscheduler.triggers.cron import CronTrigger
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from flywheel import content
from flywheel.errors import ConfigError
from flywheel.yaml_file import explain, read_yaml


def _expand(path: Path) -> Path:
    return path.expanduser()


def _crontab(text: str) -> str:
    CronTrigger.from_crontab(text, timezone="UTC")
    return text


UserPath = Annotated[Path, AfterValidator(_expand)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class StateSettings(Section):
    dir: UserPath | None = None
    """Where Flywheel keeps its own state: `state.db`, `tasks.jsonl`, rounds and adapters. Default: `$FLYWHEEL_HOME`,
    else `flywheel` under the XDG state directory."""


class SourceSettings(Section):
    type: Literal["studio"] = "studio"
    """What the source is: `studio`, an AgentScope Studio database."""
    path: UserPath = Field(default=Path("~/AgentScope-Studio/database.sqlite"), validate_default=True)
    """The SQLite file. It is opened read-only."""


class IngestSettings(Section):
    settle_seconds: float = Field(default=2.0, ge=0)
    """A reply is closed when its agent span has arrived and its trace has been quiet for this long."""
    poll_seconds: float = Field(default=2.0, gt=0)
    """How often the sources are looked at when the file system sends no event."""
    abandon_seconds: float = Field(default=3600.0, gt=0)
    """A trace whose agent span has not arrived after this long is given up as unfinished."""
    include_agents: list[str] = []
    """Agents whose nested and pipeline-stage replies become tasks too. Root replies of all agents do anyway."""
    exclude_agents: list[str] = []
    """Agents whose replies never become tasks."""
    train_ratio: Share = 0.7
    """Share of conversations that may train; the rest is held out for the gate, for ever."""
    split_seed: int = 42
    """Seed of the split. Changing it moves conversations between the sides, so do not."""
    output: UserPath | None = None
    """The task file. Default: `tasks.jsonl` in the state directory."""


class JudgeSettings(Section):
    model: str = "gpt-4o-mini"
    """Name of the judging model. It should not be the model that is trained."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint. Default: `OPENAI_BASE_URL`, else OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key. An endpoint without keys needs none."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature. Default: the rubric's."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Longest answer of the judge. Default: the rubric's."""
    max_thread: int = Field(default=16, gt=0)
    """Calls in flight, at most."""
    max_attempts: int = Field(default=4, gt=0)
    """Tries per call before the task is undecided."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest wait for one answer."""
    retry_undecided_seconds: float = Field(default=900.0, ge=0)
    """When an undecided task is judged again."""
    allow_self: bool = False
    """Let the trained model judge itself."""


class FilterSettings(Section):
    rubric: UserPath = Field(default_factory=lambda: content.folder() / "rubrics" / "qa-quality.yaml")
    """The rubric: what a good reply is. Relative to the configuration file. Default: the shipped `qa-quality`."""
    chain: UserPath | None = None
    """A filter chain (`filters/*.yaml`) that runs before the rubric's model criteria are paid for."""


class TriggerSettings(Section):
    min_samples: int = Field(default=64, gt=0)
    """A round starts when this many accepted samples are free."""
    max_samples: int = Field(default=2048, gt=0)
    """A round takes this many samples at most, the oldest first."""
    cron: Annotated[str, AfterValidator(_crontab)] | None = None
    """A window (crontab, UTC) in which a round also starts, with at least `cron_min_samples`."""
    cron_min_samples: int = Field(default=8, gt=0)
    """Fewer samples than this never start a round."""
    min_held_out: int = Field(default=8, gt=0)
    """A round waits until this many held-out tasks exist: without them no gain could be shown."""


class ModelSettings(Section):
    base: str = "Qwen/Qwen3-4B"
    """The base model: a local directory or a hub name, as vLLM and transformers take it."""
    alias: str = "my-agent"
    """The stable model name that agents call. Versions are served as `ALIAS@rNNNN`."""


class LoraSettings(Section):
    r: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Rank. vLLM serves only these."""
    alpha: float = 32
    """Scale: the update is multiplied by alpha / r."""
    dropout: Share = 0.0
    """Dropout on the adapter's input. Above 0, the trainer's logprobs differ from the engine's."""
    target_modules: str | list[str] = "all-linear"
    """Which layers get an adapter."""


class TrainingSettings(Section):
    steps: int = Field(default=50, gt=0)
    """Optimizer steps of one round."""
    prompts_per_step: int = Field(default=8, gt=0)
    """Different prompts per step."""
    group_size: int = Field(default=8, gt=1)
    """Rollouts per prompt; GRPO compares them with each other."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate; it decays linearly to 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the policy the round starts from; 0 needs no reference model."""
    clip_epsilon: float = Field(default=0.2, gt=0)
    """Lower clip range of the probability ratio."""
    clip_epsilon_high: float = Field(default=0.28, gt=0)
    """Upper clip range of the probability ratio."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """How TRL aggregates the token losses."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the advantages are divided by."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm."""
    micro_batch_size: int = Field(default=8, gt=0)
    """Rollouts per forward and backward pass; it must divide prompts_per_step × group_size."""
    max_undecided_share: Share = 0.5
    """A step with a larger share of undecided rewards fails the round."""
    min_spread_share: Share = 0.0
    """A round whose first step has no more than this share of groups with different rewards is refused: nothing can
    be learned from it."""
    seed: int = 42
    """Seed of a round, together with its number."""
    lora: LoraSettings = LoraSettings()

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if (self.prompts_per_step * self.group_size) % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} does not divide prompts_per_step × group_size "
                f"= {self.prompts_per_step * self.group_size}"
            )
        return self


class RolloutSettings(Section):
    engines: int = Field(default=1, gt=0)
    """vLLM engines of a round, one Ray actor each."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of rollouts."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of rollouts."""
    max_completion_tokens: int = Field(default=512, gt=0)
    """Longest rollout."""
    max_model_len: int = Field(default=4096, gt=0)
    """Prompt and rollout together, at most. Longer prompts are left out of the round."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for one batch of rollouts."""
    gpu_memory_utilization: float = Field(default=0.45, gt=0, le=1)
    """Share of a GPU that a rollout engine may take (the trainer needs the rest)."""
    cpu_kv_cache_gib: int = Field(default=1, gt=0)
    """Key-value cache of a rollout engine without a GPU, GiB."""


class GateSettings(Section):
    max_tasks: int = Field(default=200, gt=0)
    """Held-out tasks that candidate and deployed adapter both answer, at most; the newest."""
    min_tasks: int = Field(default=8, gt=0)
    """Fewer decided tasks than this are not enough evidence."""
    samples: int = Field(default=2, gt=0)
    """Answers per task and adapter."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of these answers: the one the agent uses."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of the interval of the gain. A candidate is promoted when its lower bound is above min_gain."""
    min_gain: float = Field(default=0.0, ge=0)
    """What the lower bound must exceed."""


class ServingSettings(Section):
    urls: list[str] = ["http://127.0.0.1:8000"]
    """Every vLLM replica that serves the agent (without `/v1`)."""
    api_key_env: str | None = None
    """Name of the environment variable with the server's key, if it wants one."""
    host: str = "127.0.0.1"
    """Where `flywheel serve` listens. Loading adapters is an administrative power: use loopback or a key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of `flywheel serve`."""
    max_loras: int = Field(default=4, gt=0)
    """Adapters that one batch can mix: the old one, the new one and the one to roll back to."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 64
    """Largest rank that the server accepts."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Context length of the server. Default: the model's."""
    cpu_kv_cache_gib: int = Field(default=2, gt=0)
    """Key-value cache without a GPU, GiB."""
    load_timeout_seconds: float = Field(default=120.0, gt=0)
    """Longest wait for an adapter to load."""
    probe_tolerance: float = Field(default=0.1, gt=0)
    """Largest mean difference of log-probabilities between the round's measurement and the server's answer, nats."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long the old adapter stays loaded for requests that were under way."""
    extra_args: list[str] = []
    """More arguments for vLLM's server."""


class RaySettings(Section):
    address: str | None = None
    """An existing Ray cluster. Default: a local one for the length of the round."""


class DaemonSettings(Section):
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long a stop waits for judge calls in flight."""
    round_attempts: int = Field(default=2, gt=0)
    """How often a round is started before it has failed."""
    failed_round_wait_seconds: float = Field(default=1800.0, ge=0)
    """How long after a failed round the next one may start by itself."""
    round_timeout_seconds: float = Field(default=6 * 3600.0, gt=0)
    """A worker that runs longer is stopped and its round abandoned."""
    reconcile_seconds: float = Field(default=15.0, gt=0)
    """How often the servers are compared with what should be deployed (a restarted server forgets its adapters)."""


class Config(Section):
    state: StateSettings = StateSettings()
    sources: list[SourceSettings] = [SourceSettings()]
    """The databases to watch. Default: Studio's own place for its database."""
    ingest: IngestSettings = IngestSettings()
    judge: JudgeSettings = JudgeSettings()
    filter: FilterSettings = FilterSettings()
    trigger: TriggerSettings = TriggerSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    rollout: RolloutSettings = RolloutSettings()
    gate: GateSettings = GateSettings()
    serving: ServingSettings = ServingSettings()
    ray: RaySettings = RaySettings()
    daemon: DaemonSettings = DaemonSettings()

    @property
    def state_dir(self) -> Path:
        return self.state.dir or default_state_dir()

    @property
    def task_file(self) -> Path:
        return self.ingest.output or self.state_dir / "tasks.jsonl"


def default_state_dir() -> Path:
    """`$FLYWHEEL_HOME`, else `flywheel` under the XDG state directory."""
    if home := os.environ.get("FLYWHEEL_HOME"):
        return Path(home).expanduser()
    xdg = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(xdg).expanduser() / "flywheel"


def load(path: Path) -> Config:
    """Read and check a configuration file. Raises ConfigError."""
    raw = read_yaml(path, f"read configuration {path}", "Run `flywheel init` to make one.")
    return parse({} if raw is None else raw, str(path), path.parent)


def parse(raw: Any, name: str, folder: Path) -> Config:
    """Check a parsed configuration; its relative paths are relative to `folder`. Raises ConfigError."""
    attempted = f"use configuration {name}"
    if not isinstance(raw, dict):
        raise ConfigError(attempted, f"its root is a {type(raw).__name__}, not a mapping", "Start with `sources:`.")
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(attempted, explain(error, Config), "Correct the file; see docs/configuration.md.") from None
    return _anchored(config, folder.absolute())


def _anchored(config: Config, folder: Path) -> Config:
    def anchor(path: Path) -> Path:
        return path if path.is_absolute() else folder / path

    base = config.model.base
    if base.startswith(("./", "../", "~")):
        base = str(anchor(Path(base).expanduser()))
    chain, output, state = config.filter.chain, config.ingest.output, config.state.dir
    return config.model_copy(
        update={
            "sources": [s.model_copy(update={"path": anchor(s.path)}) for s in config.sources],
            "filter": config.filter.model_copy(
                update={"rubric": anchor(config.filter.rubric), "chain": chain and anchor(chain)}
            ),
            "ingest": config.ingest.model_copy(update={"output": output and anchor(output)}),
            "state": config.state.model_copy(update={"dir": state and anchor(state)}),
            "model": config.model.model_copy(update={"base": base}),
        }
    )
