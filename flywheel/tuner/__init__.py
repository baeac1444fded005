"""Training from Python: `flywheel.tune`, `sft`, `dpo` and `grpo`.

Also the names of AgentScope's tuner, for `from agentscope.tuner import …` with one word replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from flywheel.tuner.objects import AlgorithmConfig as AlgorithmConfig
from flywheel.tuner.objects import DatasetConfig as DatasetConfig
from flywheel.tuner.objects import JudgeOutput as JudgeOutput
from flywheel.tuner.objects import JudgeType as JudgeType
from flywheel.tuner.objects import TinkerConfig as TinkerConfig
from flywheel.tuner.objects import TunerModelConfig as TunerModelConfig
from flywheel.tuner.objects import WorkflowOutput as WorkflowOutput
from flywheel.tuner.objects import WorkflowType as WorkflowType

if TYPE_CHECKING:
    from flywheel.config.file import Config
    from flywheel.daemon.file_round import TuneResult as TuneResult

REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "tune_prompt": ("rounds train weights, and no prompt", "Keep AgentScope's own tune_prompt for that."),
    "PromptTuneConfig": ("rounds train weights, and no prompt", "Keep AgentScope's own tune_prompt for that."),
    "select_model": (
        "a round trains one model",
        "Call `flywheel.tune` for each: `comparison.deployed_mean` of the result is the model's own score.",
    ),
}
"""Names of AgentScope's tuner that do nothing here: why, and what to use."""


def tune(
    workflow_func: Callable[..., Any] | str,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    judge_func: Callable[..., Any] | str | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    model: Any = None,
    auxiliary_models: Mapping[str, Any] | None = None,
    algorithm: Any = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | None = None,
    config_path: str | Path | None = None,
    directory: str | Path | None = None,
    trainer_python: str | Path | None = None,
) -> TuneResult:
    """Train a LoRA adapter of a workflow's model in one round, and compare it with the base model.

    Where several say the same, arguments win over `config`, and `config` over the file `config_path`.

    Args:
        workflow_func: An async function by the contract of AgentScope's tuner, defined in a file, or
            `FILE.py:function`.
        config: Settings as a mapping or a YAML file, in Flywheel's keys, or those of the tuner (`repeat_times`,
            `batch_size`, …) or of a Trinity file.
        judge_func: A function that rewards the workflow's response.
        train_dataset: A file (JSON lines, JSON, Parquet, CSV), a folder, a data set of the Hub, or a `DatasetConfig`.
            Default: `buffer.explorer_input.taskset` of a Trinity file.
        eval_dataset: The same for the tasks of the comparison. Default: `eval_tasksets` of a Trinity file; else whole
            conversations of the others, until they have the share that `ingest.train_ratio` leaves (30 of 100
            tasks), and at least `gate.min_tasks`.
        model: The base model's path or name, or a `TunerModelConfig`.
        auxiliary_models: Further models by name, each with `base_url`, `model` and perhaps `api_key_env`.
        algorithm: An `AlgorithmConfig`, or a mapping with its names.
        project_name, experiment_name: Without effect: the files of the round are in `directory`.
        monitor_type: `tensorboard` writes event files for it as well, to the folder `tensorboard` of the directory.
        config_path: A configuration of Trinity-RFT, or of Flywheel.
        directory: Where the round's files go. Default: a new folder in the working directory.
        trainer_python: The Python interpreter that trains, with Flywheel and the packages of a round. Default:
            `$FLYWHEEL_TRAINER_PYTHON`, else this one. The workflow runs in this one in any case.

    Raises ConfigError for wrong settings, a wrong data set or a wrong function, and TrainError if the round fails.
    """
    given = dict(locals())
    # Only here: a workflow's process imports the names above as well.
    from flywheel.tuner.call import run

    return run(given)


def sft(data: Any, **settings: Any) -> TuneResult:
    """Train a LoRA adapter on recorded replies, word by word, in one round, as `flywheel train sft` does.

    Args:
        data: A file (JSON lines, JSON, Parquet, CSV), a folder, a data set of the Hub, or rows: mappings such as
            lines of a file hold, in a list or another iterable, for example a `datasets.Dataset`.
        settings: The options of the command by their names: `base_model` (or `model`), `output`, `epochs`,
            `learning_rate` and others; `task_weights` is a mapping. Sections of Flywheel's settings as mappings, such
            as `training={"lora": {"r": 8}}`. Options win over sections, and these over the file `config`.

    Returns the result, whose `adapter` is the folder `output` (default: a new one in the working directory). Raises
    ConfigError for wrong settings or data, and TrainError if the round fails.
    """
    return _train("sft", data, settings)


def dpo(data: Any, **settings: Any) -> TuneResult:
    """Train on pairs of a better and a worse reply, with arguments and errors as of `sft`."""
    return _train("dpo", data, settings)


def grpo(data: Any, **settings: Any) -> TuneResult:
    """Train on rollouts of the model, which a rubric or a workflow rewards, with arguments and errors as of `sft`."""
    return _train("grpo", data, settings)


def _train(stage: Literal["sft", "dpo", "grpo"], data: Any, settings: Mapping[str, Any]) -> TuneResult:
    from flywheel.daemon.stage_round import prepare
    from flywheel.system.signals import run_coroutine

    return run_coroutine(prepare(stage, data, settings).run())


def __getattr__(name: str) -> Any:
    if name == "TuneResult":
        from flywheel.daemon.file_round import TuneResult

        return TuneResult
    if name not in REFUSED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(*_: Any, **__: Any) -> NoReturn:
        from flywheel.errors import ConfigError

        why, hint = REFUSED[name]
        raise ConfigError(f"use {name} of AgentScope's tuner", why, hint)

    return refuse
