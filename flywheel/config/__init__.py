"""The configuration: sections by subject, and the file that holds them all."""

from flywheel.config.file import Config, StateSettings, default_state_dir, defaults, load, parse, source_at
from flywheel.config.ingest import (
    AgentSettings,
    IngestSettings,
    JsonlSource,
    OtlpSource,
    SourceSettings,
    StudioSource,
)
from flywheel.config.judge import BackupJudge, FilterSettings, JudgeBudget, JudgePrices, JudgeSettings
from flywheel.config.serving import DaemonSettings, ServingSettings
from flywheel.config.training import (
    GateSettings,
    LoraSettings,
    ModelSettings,
    RaySettings,
    RetentionSettings,
    RolloutSettings,
    TrainingSettings,
    TriggerSettings,
)

__all__ = [
    "AgentSettings",
    "BackupJudge",
    "Config",
    "DaemonSettings",
    "FilterSettings",
    "GateSettings",
    "IngestSettings",
    "JsonlSource",
    "JudgeBudget",
    "JudgePrices",
    "JudgeSettings",
    "LoraSettings",
    "ModelSettings",
    "OtlpSource",
    "RaySettings",
    "RetentionSettings",
    "RolloutSettings",
    "ServingSettings",
    "SourceSettings",
    "StateSettings",
    "StudioSource",
    "TrainingSettings",
    "TriggerSettings",
    "default_state_dir",
    "defaults",
    "load",
    "parse",
    "source_at",
]
