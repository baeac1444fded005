"""A turn of the wheel on one GPU, for `benchmarks.gpu`: a round with its engine, trainer and gate, and a server that
its adapter is swapped into, by the commands of users.

The judge is scripted and passes every second answer. Answers of a model with random weights are random tokens of full
length, so its figures are those of work, not of learning.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import yaml
from sqlalchemy import Connection

from benchmarks import round as round_benchmark
from benchmarks import swap
from benchmarks.round_work import RUBRIC, SEED, Judge, tasks
from demo.ports import held_port
from flywheel.cli.demo import judge
from flywheel.config.file import Config, load
from flywheel.records.round import RESULT_FILE, SPEC_FILE, GateTest, RoundResult, RoundSpec
from flywheel.store.kernel.database import Store
from flywheel.training.data.round_progress import read_steps
from tests.factories.round import put_adapter, put_round

GIB: Final = 2**30
LOOK_SECONDS: Final = 0.2
TRAIN, HELD_OUT = 60, 16


def turn(model: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """The figures of a round, of the server's start, and of a swap and a rollback. Seconds are of the whole command;
    tokens a second of rollouts and of updates, and seconds of a sync, are medians of the steps after the first.
    Raises RuntimeError."""
    folder.mkdir()
    try:
        with held_port() as port:
            with judge.running(complete=Judge(0.0)) as url, _most_memory() as memory:
                file = folder / "flywheel.yaml"
                file.write_text(yaml.safe_dump(_settings(model, folder, url, port, quick=quick)))
                config = load(file)
                result, figures = _round(config, folder / "r0001")
                figures["peak_gib"] = memory()
            return figures | _served(config, file, folder, result)
    except SystemExit as error:
        raise RuntimeError(str(error)) from error


def _settings(model: str, folder: Path, url: str, port: int, *, quick: bool) -> dict[str, Any]:
    tokens, steps, prompts = (16, 3, 2) if quick else (512, 4, 8)
    return {
        "state": {"dir": str(folder / "state")},
        "sources": [],
        "model": {"base": model, "alias": "agent"},
        "judge": {"base_url": url, "model": judge.MODEL},
        # Large enough that the adapter differs from the base model by more than the noise of bfloat16.
        "training": {"steps": steps, "prompts_per_step": prompts, "group_size": 8, "learning_rate": 2e-3},
        "rollout": {"max_completion_tokens": tokens, "max_model_len": tokens + 256},
        "gate": {"max_tasks": HELD_OUT, "samples": 1, "min_tasks": 2},
        "serving": {
            "port": port,
            "urls": [f"http://127.0.0.1:{port}"],
            "max_model_len": tokens + 256,
            "drain_seconds": 1,
        },
        "daemon": {"metrics": None},
    }


def _round(config: Config, directory: Path) -> tuple[RoundResult, dict[str, Any]]:
    directory.mkdir()
    spec = RoundSpec(
        round_id="r0001",
        attempt=1,
        seed=SEED,
        debug=False,
        base_model=str(config.model.base),
        parent=None,
        train=tasks("train-", 0, TRAIN),
        held_out=tasks("held-", TRAIN, HELD_OUT),
        rubric=RUBRIC,
        settings=config.model_dump(mode="json"),
        test=GateTest(epoch=1, number=1, alpha=0.0024),
    )
    (directory / SPEC_FILE).write_text(spec.model_dump_json())
    began = time.time()
    _, ended = round_benchmark._watch(directory)
    result = RoundResult.model_validate_json((directory / RESULT_FILE).read_bytes())
    if result.adapter is None or result.probe is None:
        raise RuntimeError(f"the round has no adapter to swap in: {result.reason or result.outcome}")
    steps = read_steps(directory)
    later = steps[1:]
    return result, {
        "device": result.device,
        "round_s": ended - began,
        "startup_s": round_benchmark.first_sync_of(steps) - began,
        "gate_s": result.seconds["evaluate"],
        "rollout_tokens_per_s": round(median(step["tokens_per_second"] for step in later)),
        "update_tokens_per_s": round(median(step["trained_tokens"] / step["seconds"]["train"] for step in later)),
        "sync_s": median(step["seconds"]["sync"] for step in later),
        "logprob_gap": steps[0]["logprob_gap"],
    }


def _served(config: Config, file: Path, folder: Path, result: RoundResult) -> dict[str, Any]:
    _record(config, result)
    log, begin = folder / "server.log", time.perf_counter()
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "flywheel", "serve", "-c", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        swap._wait_for(config.serving.port, server, log)
        figures = {"serve_s": time.perf_counter() - begin}
        # It verifies the weights by the round's log-probabilities.
        figures["swap_s"] = swap.flywheel(file, "deploy", "r0001")
        figures["rollback_s"] = swap.flywheel(file, "rollback", "--to", "base")
        return figures
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, number)
                server.wait(30)


def _record(config: Config, result: RoundResult) -> None:
    """Put the adapter into the state, as the daemon does."""
    import asyncio

    adapter, probe = result.adapter, result.probe
    assert adapter is not None and probe is not None

    def put(conn: Connection) -> None:
        put_round(conn, 1)
        values = {"base_model": str(config.model.base), "probe": json.loads(probe.model_dump_json())}
        put_adapter(conn, 1, Path(adapter.path), **values)

    async def record() -> None:
        store = await Store.open(config.state_dir)
        await store.write(put)
        await store.close()

    asyncio.run(record())


@contextlib.contextmanager
def _most_memory() -> Iterator[Any]:
    """Yields a function that returns the most memory of the GPU in use so far, by all processes, in GiB; None without
    a GPU."""
    import torch

    most, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            free, total = torch.cuda.mem_get_info()
            most[0] = max(most[0], total - free)

    thread = threading.Thread(target=look)
    if torch.cuda.is_available():
        thread.start()
    try:
        yield lambda: round(most[0] / GIB, 2) if torch.cuda.is_available() else None
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
