"""Settings of the judge and the filters."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from flywheel.config.section import Section, UserPath, WebUrl
from flywheel.system import files

MAX_THREADS: Final = 1024
"""Maximum of `max_thread`; each call in flight has its own thread."""


class BackupJudge(Section):
    base_url: WebUrl | None = None
    """Endpoint of the backup. Default: the judge's, for use with another key or model."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable with its key."""
    model: str | None = None
    """Name of its model. Default: the judge's."""


class JudgeBudget(Section):
    tokens_per_day: int | None = Field(default=None, gt=0)
    """Maximum tokens for judging per day (UTC). When they are used up, judging pauses until the next day, also within
    a round."""
    tokens_per_run: int | None = Field(default=None, gt=0)
    """Maximum tokens of one process of `flywheel filter`, `flywheel round` or `flywheel run`. A round that needs more
    fails."""


class JudgePrices(Section):
    input_per_million: float = Field(ge=0, allow_inf_nan=False)
    """Price of a million prompt tokens."""
    output_per_million: float = Field(ge=0, allow_inf_nan=False)
    """Price of a million completion tokens."""
    currency: str = Field(default="USD", min_length=1)
    """Currency of the prices, for display."""


class JudgeSettings(Section):
    model: str | None = None
    """Name of the judge's model, for rubrics that name none. It must not be the trained model."""
    base_url: WebUrl | None = None
    """An OpenAI-compatible endpoint, to which replies are sent. Default: `$OPENAI_BASE_URL`."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable with the key, or several as `k1|k2`, which are used in turn; a refused or
    rate-limited key is not used for a while. Not needed for endpoints without keys."""
    backup: BackupJudge | None = None
    """A backup that is used while the judge refuses every key or cannot be reached."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature. Default: the rubric's."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of an answer. Default: the rubric's."""
    response_format: Literal["auto", "schema", "tool", "json", "text"] = "auto"
    """How the judge is asked for its verdict: by a strict JSON schema, a forced tool call, JSON mode (`json_object`)
    or words alone. Default: the first of schema, tool and text that its endpoint does not refuse. `flywheel doctor
    --ask-judge` says whether it is obeyed."""
    omit: tuple[Literal["seed", "temperature"], ...] = ()
    """Parameters that are never sent, for models that refuse them."""
    max_thread: int = Field(default=16, gt=0, le=MAX_THREADS)
    """Maximum number of calls in flight, up to 1024. Reduced while the endpoint is rate-limiting."""
    requests_per_minute: int | None = Field(default=None, gt=0)
    """Maximum number of calls started per minute."""
    tokens_per_minute: int | None = Field(default=None, gt=0)
    """Maximum tokens (prompt and completion) per minute; a call's tokens are estimated before it."""
    budget: JudgeBudget = JudgeBudget()
    """Token limits for judging tasks, rollouts, gates and calibrations, and for writing tasks from documents."""
    prices: JudgePrices | None = None
    """Prices of the judge; estimates and dry runs then show costs as well as tokens."""
    max_attempts: int = Field(default=5, gt=0)
    """Maximum attempts per call before the task is undecided: calls that fail, and replies without a verdict."""
    max_unreadable: int = Field(default=16, gt=0)
    """Judging stops after this many tasks in a row of which no answer could be read. The next run asks about one task
    first; the daemon does so after `judge.retry_undecided_seconds`."""
    max_task_attempts: int = Field(default=3, gt=0)
    """A task that the judge has answered about this many times, and left undecided, is a dead letter."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Timeout in seconds of one attempt, including the whole answer."""
    retry_undecided_seconds: float = Field(default=900.0, ge=0)
    """Seconds after which an undecided task is judged again."""
    min_kappa: float | None = Field(default=None, ge=-1, le=1)
    """No round starts on a rubric whose last `flywheel rubric calibrate` with this judge is missing or has a lower
    Cohen's kappa. Default: rounds need no calibration."""
    allow_self: bool = False
    """Permit the trained model as judge."""


class FilterSettings(Section):
    rubric: UserPath = Field(default_factory=lambda: files.shipped_folder() / "rubrics" / "qa-quality.yaml")
    """Path of the rubric, relative to the configuration file. Default: the shipped `qa-quality`."""
    chain: UserPath | None = None
    """Path of the filter chain (`filters/*.yaml`) that runs before the judge."""
    warn_window: int = Field(default=50, gt=0)
    """Warn when none of this many newest verdicts accepted a reply, which suggests a problem of rubric or judge."""
