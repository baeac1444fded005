"""The errors of Flywheel: one class for each boundary.

Every error says what was attempted, why it failed, what to do, and whether a retry can help; its class has the exit
code of commands.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from flywheel.secrets import redact_secrets

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69
EXIT_LOCKED = 75
EXIT_CONFIG = 78
EXIT_QUALITY = 100


class FlywheelError(Exception):
    """An error that a person can understand and act on.

    `attempted` completes "cannot …" and names its subject ("open database /x/y.sqlite"), `why` is the cause in one
    clause, `hint` the remedy as an imperative sentence. `retryable` says whether the same call can succeed later
    without any change. Known secrets are removed from all of them, because they often quote other programs.
    """

    exit_code = EXIT_FAILED
    retry_after = 0.0
    """Seconds before which another attempt would be in vain."""

    def __init__(self, attempted: str, why: str, hint: str = "", *, retryable: bool = False) -> None:
        self.attempted = redact_secrets(attempted)
        self.why = redact_secrets(why)
        self.hint = redact_secrets(hint)
        self.retryable = retryable
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"cannot {self.attempted}: {self.why.rstrip('.')}."
        return f"{text} {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between processes (Ray actors); Exception's own pickling would pass one argument.
        return (_rebuild, (type(self), self.attempted, self.why, self.hint, self.retryable), self.__dict__)


def _rebuild(kind: type[FlywheelError], attempted: str, why: str, hint: str, retryable: bool) -> FlywheelError:
    return kind(attempted, why, hint, retryable=retryable)


class SourceError(FlywheelError):
    """A source of replies could not be read. `condition` names the state it is in, in one or two words."""

    condition = "failing"


class StudioError(SourceError):
    """A source database could not be read."""


class ReceiverError(SourceError):
    """Spans could not be received or kept, or an address cannot be listened at."""


class CallLogError(FlywheelError):
    """A call log could not be read or written."""


class NotifyError(FlywheelError):
    """A notice did not reach its webhook or command, or a score the tool that shows it."""


class CheckError(FlywheelError):
    """A criterion that needs no judge could not be decided."""


class CostlyCheckError(CheckError):
    """A criterion could not be decided within its limits of time and memory, and would exceed them again."""


class JudgeError(FlywheelError):
    """The judge gave no verdict: it cannot be reached, refuses its calls, or its answers cannot be read."""

    exit_code = EXIT_UNAVAILABLE


class EndpointError(FlywheelError):
    """A model that is measured at an endpoint does not answer."""

    exit_code = EXIT_UNAVAILABLE


class QualityError(FlywheelError):
    """The replies that were judged are below the quality bar of the command line."""

    exit_code = EXIT_QUALITY


class FilterError(FlywheelError):
    """A filter could not be asked: what waits for it stays pending."""


class StoreError(FlywheelError):
    """Flywheel's own state could not be read or written."""


class StateBusyError(StoreError):
    """Another process writes the state for too long."""


class ExportError(FlywheelError):
    """A file for another program, or for people to edit, could not be written, or nothing can go into it."""


class TrainError(FlywheelError):
    """A round could not be planned, run or understood."""


class ProcessLostError(TrainError):
    """A process of a round died, or its node was removed."""


class Condition(StrEnum):
    """How a server was found."""

    OK = "ok"
    UNREACHABLE = "unreachable"
    """it does not answer in time, or its engine is dead"""
    MISCONFIGURED = "misconfigured"
    """it answers but cannot serve adapters: another key, no middleware, no LoRA, another program"""
    WRONG_ADAPTER = "wrong adapter"
    """it answers with another adapter or with 503, and the deployed one cannot be restored"""
    WRONG_WEIGHTS = "wrong weights"
    """its adapter's log-probabilities differ from those of the round"""
    FAILING = "failing"
    """another error; see the message"""


class ServeError(FlywheelError):
    """The inference server refused or failed. `condition` names the state it is in, in one or two words."""

    condition: str = Condition.FAILING

    def of_condition(self, condition: str) -> Self:
        """This error, of a server that is in `condition`."""
        self.condition = condition
        return self


class ConfigError(FlywheelError):
    """A configuration, rubric or filter file is wrong."""

    exit_code = EXIT_CONFIG


class StoppedError(FlywheelError):
    """A signal ended a command before it was done. Its exit code is 128 and the number of the signal."""


class LockedError(FlywheelError):
    """Another instance works on the same state."""

    exit_code = EXIT_LOCKED
