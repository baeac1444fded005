"""The round worker: `python -m flywheel.training.worker ROUND_DIR`.

Reads `spec.json`, runs one round with engines, trainer, judge and comparison, writes `metrics.jsonl` meanwhile and
`result.json` last. After a failure, `error.json` has the error, the remedy and whether a retry can help.

A worker that is started again on the same directory goes on where the earlier one died: with the last checkpoint of
the first stage that has not ended, with the stored rollouts of the steps behind it, and with the graded rollouts of
the unfinished step. It starts over only if the round's tasks, parent, rubric or settings have changed, or files of
the user's agent. A directory with a complete result is left unchanged.

Exit codes: 0 done (also if the round was refused), 1 failed, 75 another worker holds the directory, 143 and 130
stopped.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flywheel.errors import EXIT_FAILED, FlywheelError, LockedError, TrainError
from flywheel.judge.usage import UsageFile
from flywheel.records.round import LOG_FILE, RESULT_FILE, RoundResult, RoundSpec
from flywheel.system import log as logs
from flywheel.system.files import write_atomic
from flywheel.system.lock import alone_in
from flywheel.system.log import output_to
from flywheel.system.process import adopt_orphans
from flywheel.system.signals import Stopped, catch_signals
from flywheel.training.data.round_directory import clear, finished, go_on, read_spec, settings_of, write_error
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.policy import (
    check_base,
    check_candidate,
    check_frozen,
    check_parent,
    check_quantization,
    other_form,
)
from flywheel.training.optim.rollout_grading import build_grade
from flywheel.training.worker.round import MakeGrade, Round

log = logging.getLogger("flywheel.training.worker")


def run_round(spec: RoundSpec, directory: Path, make_grade: MakeGrade) -> RoundResult:
    """Run the whole round and stop all of its processes. Raises FlywheelError."""
    started = time.monotonic()
    settings = settings_of(spec)
    if not spec.train and (spec.trains or spec.debug):
        raise TrainError(f"train {spec.round_id}", "it has no task", "Collect and judge more traces first.")
    check_base(spec.base_model)
    check_parent(spec.parent)
    check_candidate(spec.candidate)
    if settings.ray.address is None and spec.trains:
        # On a cluster the trainer checks its own node.
        check_quantization(settings.model.trainer_quantization)
    if spec.parent and (spec.trains or spec.debug) and (form := other_form(spec.parent, settings.training.lora)):
        log.warning(
            "training.lora is not used: %s, which this round goes on from, has %s. For a new form, go back to the"
            " base model first (`flywheel rollback --to base`)",
            spec.parent.name,
            form,
        )
    # Before anything is started: errors in the rubric or the judge's settings appear here.
    whole = Round(spec, directory, settings, make_grade)
    check_frozen(whole.agent.frozen)
    whole.metrics.phase("starting")
    whole.meter.enter("starting")
    with ray_cluster.session(settings):
        # Ray has just installed its own handlers.
        catch_signals()
        try:
            result = whole.run()
            with contextlib.suppress(TrainError):  # all engines may be lost by now
                whole.agent.note_models()
        finally:
            if not isinstance(sys.exception(), Stopped):
                ray_cluster.stop(whole.started)
    # Here, `round` is a module of this package.
    total = builtins.round(time.monotonic() - started, 3)
    return result.model_copy(update={"seconds": {**result.seconds, "total": total}})


def as_flywheel_error(error: Exception, spec: RoundSpec) -> FlywheelError:
    # Libraries that write files raise their own errors with the system's text.
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "Free space." if full or os.strerror(errno.ENOSPC) in str(error) else ""
    return TrainError(
        f"run {spec.round_id}",
        f"{type(error).__name__}: {' '.join(str(error).split())[:500]}",
        hint or f"The traceback is in the round's {LOG_FILE}.",
        retryable=True,
    )


def work(directory: Path, make_grade: MakeGrade) -> None:
    """Run the round of this directory. Raises FlywheelError and Stopped."""
    spec = read_spec(directory)
    try:
        _work(directory, spec, make_grade)
    except OSError as error:
        raise as_flywheel_error(error, spec) from error


def _work(directory: Path, spec: RoundSpec, make_grade: MakeGrade) -> None:
    with alone_in(directory):
        if finished(directory, spec):
            return
        changed = go_on(directory, spec)
        UsageFile(directory).mend()
        with output_to(directory / LOG_FILE):
            logs.setup()
            if changed:
                log.warning("%s starts over: since its last attempt, these have changed: %s", spec.round_id, changed)
            try:
                result = run_round(spec, directory, make_grade)
            except FlywheelError as error:
                log.error("%s", error)
                raise
            except Exception as error:
                log.exception("%s failed", spec.round_id)
                raise as_flywheel_error(error, spec) from error
            finally:
                clear(directory, is_over=False)
        write_atomic(directory / RESULT_FILE, result.model_dump_json(indent=1).encode())
        clear(directory, is_over=True)


def main(argv: Sequence[str] | None = None, make_grade: MakeGrade = build_grade) -> int:
    parser = argparse.ArgumentParser(prog="python -m flywheel.training.worker", description="Run one training round.")
    parser.add_argument("directory", type=Path, metavar="ROUND_DIR", help="holds spec.json; the results go there too")
    directory = parser.parse_args(argv).directory.absolute()
    catch_signals()
    adopt_orphans()  # vLLM's children outlive a killed actor
    try:
        work(directory, make_grade)
    except Stopped as stopped:
        return _end(stopped, stopped.exit_code)
    except LockedError as error:
        return _end(error, error.exit_code)
    except FlywheelError as error:
        write_error(directory, error)
        return _end(error, EXIT_FAILED)
    return 0


def _end(reason: BaseException, code: int) -> int:
    # Whoever reads it may be gone; an exception here would leave threads that wait for the judge to be joined.
    with contextlib.suppress(OSError):
        print(f"flywheel.training.worker: {reason}", file=sys.stderr, flush=True)
    return code


__all__ = ["build_grade", "main", "run_round", "work"]
