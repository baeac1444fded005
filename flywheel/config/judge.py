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
    """Its endpoint. Default: the judge's."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with its key."""
    model: str | None = None
    """Its model. Default: the judge's."""


class JudgeBudget(Section):
    tokens_per_day: int | None = Field(default=None, gt=0)
    """Maximum judge tokens per day (UTC). Then judging pauses until the next day, also within a round."""
    tokens_per_run: int | None = Field(default=None, gt=0)
    """Maximum tokens of one process of `flywheel filter`, `round` or `run`. A round that needs more fails."""


class JudgePrices(Section):
    input_per_million: float = Field(ge=0, allow_inf_nan=False)
    """Price of a million prompt tokens."""
    output_per_million: float = Field(ge=0, allow_inf_nan=False)
    """Price of a million completion tokens."""
    currency: str = Field(default="USD", min_length=1)
    """For display."""


class JudgeSettings(Section):
    model: str | None = None
    """Model of the judge, for rubrics that name none. Not the trained model."""
    base_url: WebUrl | None = None
    """OpenAI-compatible endpoint, to which replies are sent. Default: `$OPENAI_BASE_URL`."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key, or several as `k1|k2`, used in turn. A refused or rate-limited key rests
    for a while."""
    backup: BackupJudge | None = None
    """Used while the judge refuses every key or cannot be reached."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature. Default: the rubric's."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of an answer. Default: the rubric's."""
    response_format: Literal["auto", "schema", "tool", "json", "text"] = "auto"
    """How a verdict is asked for: a strict JSON `schema`, a forced `tool` call, `json` mode, or words alone
    (`text`). `auto`: the first of schema, tool and text that the endpoint accepts."""
    omit: tuple[Literal["seed", "temperature"], ...] = ()
    """Parameters (`seed`, `temperature`) that are never sent, for models that refuse them."""
    max_thread: int = Field(default=16, gt=0, le=MAX_THREADS)
    """Maximum calls in flight, up to 1024. Reduced while the endpoint is rate-limiting."""
    requests_per_minute: int | None = Field(default=None, gt=0)
    """Maximum calls started per minute."""
    tokens_per_minute: int | None = Field(default=None, gt=0)
    """Maximum tokens (prompt and completion) per minute, estimated before each call."""
    budget: JudgeBudget = JudgeBudget()
    """Token limits for judging tasks, rollouts, gates and calibrations, and for writing tasks from documents."""
    prices: JudgePrices | None = None
    """Prices of the judge; estimates and dry runs then show costs as well as tokens."""
    max_attempts: int = Field(default=5, gt=0)
    """Attempts per call before the task is undecided: failed calls, and answers without a verdict."""
    max_unreadable: int = Field(default=16, gt=0)
    """Judging stops after this many tasks in a row without a readable answer."""
    max_task_attempts: int = Field(default=3, gt=0)
    """A task that the judge answered about this often without a verdict is a dead letter."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Timeout of one attempt, including the whole answer."""
    retry_undecided_seconds: float = Field(default=900.0, ge=0)
    """Seconds after which an undecided task is judged again."""
    min_kappa: float | None = Field(default=None, ge=-1, le=1)
    """No round starts on a rubric whose last `flywheel rubric calibrate` with this judge is missing or has a lower
    kappa. Default: none needed."""
    allow_self: bool = False
    """Permit the trained model as judge."""


class FilterSettings(Section):
    rubric: UserPath = Field(default_factory=lambda: files.shipped_folder() / "rubrics" / "qa-quality.yaml")
    """Path of the rubric. Default: the shipped `qa-quality`."""
    chain: UserPath | None = None
    """Path of the filter chain (`filters/*.yaml`) that runs before the judge."""
    warn_window: int = Field(default=50, gt=0)
    """Warn when none of this many newest verdicts accepted a reply."""
