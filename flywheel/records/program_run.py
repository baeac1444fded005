"""What one run of the user's agent in a rollout returned.

Plain data, and only the standard library: it is imported by the user's interpreter, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

FailureCause = Literal[
    "timeout", "memory", "raised", "ended", "no_result", "not_a_number", "no_response", "bad_output",
    "left_processes", "left_threads",
]  # fmt: skip
"""Why a run gave nothing to learn from.

`timeout`: it ran too long. `memory`: it used too much. `raised`: the function raised, or the command's exit code was
not 0. `ended`: the process of a function ended. `no_result`: it returned nothing, or nothing that is a result.
`not_a_number`: a reward or metric that is not a finite number, or a reward beyond ±1e6. `no_response`: no response
for the rubric's judge, or no reward where one is needed. `bad_output`: the output of a command is not one JSON
object. `left_processes`: processes that it started were still running. `left_threads`: threads that it started still
ran the user's code.
"""
CallFault = Literal["engine_error", "broken_stream", "abandoned_call"]
"""Why a run has no answer of the model to one of its requests, whatever it returned.

`engine_error`: the engine failed, which is seen as a status such as 500. `broken_stream`: the answer broke off as it
was streamed. `abandoned_call`: its client left before the engine had answered.
"""
ENGINE_FAULTS: Final[frozenset[str]] = frozenset({"engine_error", "broken_stream"})
"""Those that say nothing about the adapter that answers. A call is also abandoned because an answer is long."""


LARGEST_REWARD: Final = 1e6
"""Of either sign. Sums and squares of larger ones lose what rewards differ by, or overflow."""
FAILURE_CAUSES: Final[tuple[FailureCause, ...]] = get_args(FailureCause)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run returned, or why it failed.

    Attributes:
        response: The text for the judge; None if it returned none.
        metrics: Finite numbers by name.
        error: For people; empty if it did not fail.
        seconds: Duration.
        peak_bytes: Largest resident memory that was seen.
        shown: The repr of what was returned, shortened.
        idle_threads: The names of threads that its process has after it, and that run nothing of the user's.
        late_calls: Number of processes that were replaced before it, because a thread of an earlier run had called
            the model after that run's end.
    """

    reward: float | None = None
    response: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    cause: FailureCause | None = None
    error: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    shown: str = ""
    idle_threads: Sequence[str] = ()
    late_calls: int = 0
