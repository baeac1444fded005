"""The judge, and the filters before it."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from flywheel import files
from flywheel.config.section import Section, UserPath

MAX_THREADS: Final = 1024
"""Each call in flight has a thread of its own."""


class BackupJudge(Section):
    base_url: str | None = None
    """Its endpoint. Default: that of the judge, which makes sense with another key or model."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds its key."""
    model: str | None = None
    """Name of its model. Default: that of the judge."""


class JudgeBudget(Section):
    tokens_per_day: int | None = Field(default=None, gt=0)
    """Tokens that judging may use in one day (UTC); it pauses when they are used up, a round in the middle of a step
    too, and goes on the next day."""
    tokens_per_run: int | None = Field(default=None, gt=0)
    """Tokens that one `flywheel filter`, `flywheel round` or `flywheel run` may use, from its start to its end. A
    round that would need more fails."""


class JudgePrices(Section):
    input_per_million: float = Field(ge=0, allow_inf_nan=False)
    """What a million tokens cost that are sent to the judge."""
    output_per_million: float = Field(ge=0, allow_inf_nan=False)
    """What a million tokens cost that it answers with."""
    currency: str = Field(default="USD", min_length=1)
    """What they cost that in, as it is shown."""


class JudgeSettings(Section):
    model: str = "gpt-4o-mini"
    """Name of the judging model. It should not be the model that is trained."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint. Default: `OPENAI_BASE_URL`, else OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key, or several as `k1|k2`: they take turns, and one that is
    refused or asked to slow down rests. An endpoint without keys needs none."""
    backup: BackupJudge | None = None
    """Who is asked while the judge refuses every key or cannot be reached."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature. Default: the rubric's."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Longest answer of the judge. Default: the rubric's."""
    max_thread: int = Field(default=16, gt=0, le=MAX_THREADS)
    """Calls in flight, at most. Fewer while the endpoint asks to slow down. No more than 1024."""
    requests_per_minute: int | None = Field(default=None, gt=0)
    """Calls that begin in one minute, at most."""
    tokens_per_minute: int | None = Field(default=None, gt=0)
    """Tokens, sent and received, that are used in one minute, at most; a call's are estimated before it."""
    budget: JudgeBudget = JudgeBudget()
    """What judging may use before it pauses: that of tasks, of rollouts and gates, and of calibrations."""
    prices: JudgePrices | None = None
    """What the judge costs; estimates and dry runs then show money beside tokens."""
    max_attempts: int = Field(default=4, gt=0)
    """Tries per call before the task is undecided."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest wait for one answer."""
    retry_undecided_seconds: float = Field(default=900.0, ge=0)
    """When an undecided task is judged again."""
    min_kappa: float | None = Field(default=None, ge=-1, le=1)
    """No round starts on a rubric whose last `flywheel rubric calibrate` with this judge is missing or has a lower
    Cohen's kappa. Default: rounds need no calibration."""
    allow_self: bool = False
    """Let the trained model judge itself."""


class FilterSettings(Section):
    rubric: UserPath = Field(default_factory=lambda: files.shipped_folder() / "rubrics" / "qa-quality.yaml")
    """The rubric: what a good reply is. Relative to the configuration file. Default: the shipped `qa-quality`."""
    chain: UserPath | None = None
    """A filter chain (`filters/*.yaml`) that runs before the rubric's model criteria are paid for."""
    warn_window: int = Field(default=50, gt=0)
    """Warn when none of the newest verdicts, so many, accepted a reply: then rubric or judge are more likely wrong
    than every reply."""
