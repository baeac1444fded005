"""One run of a demo: judge, server, traffic and `flywheel run`, watched until enough rounds were promoted.

Composes the parts and decides when the users come often, when seldom and when it is enough. What is shown comes from
Flywheel's own records.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
import yaml
from rich.console import Console
from rich.live import Live

from demo import panel
from demo.parts import Part, adopt_orphans, end_descendants
from demo.ports import held_port
from demo.users import Users
from flywheel.cli.demo import judge
from flywheel.config.file import Config, load
from flywheel.daemon.status import as_json, snapshot
from flywheel.errors import StoreError
from flywheel.store.kernel.database import Store
from flywheel.training.data.round_progress import read_metrics

ROOT: Final = Path(__file__).parent.parent
QUIET_RATE: Final = 0.5
"""Dialogues per second while a round trains: it needs the processor."""
LAST_JUDGED: Final = 80
"""Replies of the last version that must have been judged before the table is drawn."""
WATCHED_UNITS: Final = 120
LOOK_SECONDS: Final = 1.0
PLAIN_SECONDS: Final = 5.0
STOP_SECONDS: Final = 25.0
PATIENCE_SECONDS: Final = 5.0

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OPENAI_API_KEY": "demo",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class SlowError(Exception):
    """The rounds that were asked for were not promoted in time."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is played: a configuration in `configs/`, and the users who ask the agent while samples are gathered."""

    template: str
    users: Callable[[Config], Users]
    rollout: Mapping[str, Any] = field(default_factory=dict)
    """Settings of rollouts beside those of the configuration."""
    watches: bool = False
    """Whether promotions are watched: both versions answer until enough conversations have an outcome."""

    def settings(self, folder: Path, judge_url: str, port: int) -> dict[str, Any]:
        """The shipped configuration with the run's own paths and addresses."""
        raw = settings_of(self.template, folder, judge_url, port)
        raw["rollout"] = {**raw.get("rollout", {}), **self.rollout}
        if self.watches:
            raw["deploy"] = {"watch": {"new_share": 0.5, "until_units": WATCHED_UNITS}}
        return raw


def settings_of(template: str, folder: Path, judge_url: str, port: int) -> dict[str, Any]:
    """A configuration in `configs/` with the paths and addresses of the run in `folder`."""
    here = ROOT / "configs"
    raw: dict[str, Any] = yaml.safe_load((here / template).read_text(encoding="utf-8"))
    raw["state"]["dir"] = str(folder.absolute() / "state")
    for source in raw["sources"]:
        if "path" in source:
            source["path"] = str(folder.absolute() / Path(source["path"]).name)
    raw["judge"]["base_url"] = judge_url
    raw["filter"]["rubric"] = str((here / raw["filter"]["rubric"]).resolve())
    raw["model"]["base"] = str((here / raw["model"]["base"]).resolve())
    raw["serving"]["port"] = port
    return raw


class Screen:
    """The live panel on a terminal; elsewhere a line whenever something has changed."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._last = ""
        self._written = -PLAIN_SECONDS

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        with self._live or contextlib.nullcontext():
            yield

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, status: panel.Status, metrics: panel.Metrics) -> None:
        if self._live:
            self._live.update(panel.render(status, metrics), refresh=True)
            return
        line = panel.plain(status, metrics)
        if line != self._last and time.monotonic() - self._written >= PLAIN_SECONDS:
            self.say(line)
            self._last, self._written = line, time.monotonic()


class Wheel:
    """The run in `folder`, which is made. After `turn` or an exception nothing of it runs any more."""

    def __init__(self, scene: Scene, folder: Path, rounds: int, limit_seconds: float, screen: Screen) -> None:
        self._scene = scene
        self._folder = folder
        self._rounds = rounds
        self._limit_seconds = limit_seconds
        self._screen = screen
        self._parts: list[Part] = []
        self._hurry = False

    async def turn(self) -> Mapping[str, Any]:
        """The last status. Raises PartError, TrafficError, SlowError and FlywheelError."""
        adopt_orphans()
        self._folder.mkdir(parents=True)
        with judge.running() as judge_url, held_port() as port:
            file = self._folder / "flywheel.yaml"
            file.write_text(yaml.safe_dump(self._scene.settings(self._folder, judge_url, port), sort_keys=False))
            config = load(file)
            users = self._scene.users(config)
            try:
                for name in ("serve", "run"):
                    arguments = [sys.executable, "-m", "flywheel", name, "-c", str(file)]
                    self._parts.append(Part(f"flywheel {name}", arguments, self._folder / f"{name}.log", ENVIRONMENT))
                self._screen.say(f"The run's files are in {self._folder}. vLLM starts; that takes half a minute.")
                await until_ready(config.serving.urls[0], self._parts)
                asking = asyncio.create_task(users.run())
                try:
                    with self._screen.on():
                        return await self._watch(config, users, asking)
                finally:
                    asking.cancel()
                    await asyncio.wait([asking])
            finally:
                # In a thread: a second Ctrl-C must still be heard.
                await asyncio.shield(asyncio.to_thread(self._stop))

    def hurry(self) -> None:
        """End the processes without waiting for them to stop by themselves."""
        self._hurry = True

    async def _watch(self, config: Config, users: Users, asking: asyncio.Task[None]) -> Mapping[str, Any]:
        deadline = time.monotonic() + self._limit_seconds
        busy_rate = users.rate
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for part in self._parts:
                part.check()
            if asking.done():
                await asking
            status = await look(config)
            if status is None:
                continue
            live = status["live_round"]
            shown = live or (status["rounds"][-1] if status["rounds"] else None)
            metrics = read_metrics(Path(shown["dir"])) if shown and shown["dir"] else []
            self._screen.show(status, metrics)
            if self._enough(status):
                return status
            done = status["promoted"] >= self._rounds
            users.rate = QUIET_RATE if live and not done else busy_rate
            if time.monotonic() > deadline:
                raise SlowError(
                    f"{status['promoted']} of {self._rounds} rounds were promoted in {self._limit_seconds / 60:.0f} "
                    f"minutes. See {self._folder / 'run.log'}, or allow more with --minutes."
                )

    def _enough(self, status: Mapping[str, Any]) -> bool:
        if status["promoted"] < self._rounds or status["watch"]:
            return False
        last = panel.lines(status)[-1]
        return last.accepted + last.rejected >= LAST_JUDGED

    def _stop(self) -> None:
        for part in self._parts:
            part.ask_to_stop()
        deadline = time.monotonic() + STOP_SECONDS
        for part in self._parts:
            while not part.wait(0.2) and not self._hurry and time.monotonic() < deadline:
                pass
        end_descendants(0.0 if self._hurry else PATIENCE_SECONDS)


async def until_ready(url: str, parts: Sequence[Part]) -> None:
    """Wait for the server. Raises PartError when one of the parts has ended."""
    async with httpx2.AsyncClient(trust_env=False) as client:
        while True:
            for part in parts:
                part.check()
            with contextlib.suppress(httpx2.TransportError):
                if (await client.get(f"{url}/health")).status_code == httpx2.codes.OK:
                    return
            await asyncio.sleep(LOOK_SECONDS / 2)


async def look(config: Config) -> dict[str, Any] | None:
    """Flywheel's status; None until the daemon has made its database."""
    try:
        store = await Store.view(config.state_dir)
    except StoreError:
        return None
    try:
        return as_json(await store.read(snapshot, config))
    finally:
        await store.close()


def record(folder: Path, status: Mapping[str, Any]) -> Path:
    """Keep the last status beside the run's other files."""
    path = folder / "status.json"
    path.write_text(json.dumps(status, default=str, indent=1) + "\n")
    return path
