"""`python -m demo.support_desk`: two turns of the wheel on a genuine small model, each step a command of Flywheel.

The first turn fine-tunes it on a large model's recorded replies, the second trains it by GRPO on traffic that it
answered itself. What it is worth is measured on held-out messages, by exact checks of what the served alias answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from opentelemetry.sdk.trace import TracerProvider

from demo import small_model
from demo.parts import Part, adopt_orphans, end_descendants
from demo.studio import StudioDatabase
from demo.support_desk import desk, models
from demo.support_desk.checks import Result, result
from demo.support_desk.messages import DESK, DEVELOPMENT, HELD_OUT, TEACHER, Kind, Message
from demo.wheel import ENVIRONMENT, PATIENCE_SECONDS, free_port, settings_of, until_ready
from flywheel.cli.demo import judge
from flywheel.config import Config, load
from flywheel.records.round import RESULT_FILE, RoundResult
from flywheel.store import deployments
from flywheel.store.kernel.database import Store

TEMPLATE: Final = "demo-real.yaml"
TEACHER_MESSAGES: Final = 72
DESK_MESSAGES: Final = 120
HELD_OUT_MESSAGES: Final = 96
IMPROVE_THRESHOLD: Final = 0.4
"""What a reply of the small model must be worth for GRPO to ask its message again: most of them."""
BUDGETS: Final = {
    "the model": 60,
    "recorded replies of the large model": 10,
    "the server starts": 40,
    "the base model, measured": 60,
    "turn 1: judge the recorded replies": 10,
    "turn 1: SFT, gate and swap": 220,
    "turn 1, measured": 60,
    "turn 2: the deployed model answers": 40,
    "turn 2: judge its replies": 10,
    "turn 2: GRPO, gate and swap": 600,
    "turn 2, measured": 60,
}
"""Seconds of each phase on two quiet cores with bfloat16 instructions."""
STOP_SECONDS: Final = 25.0
LEAST_NOISE: Final = 1e-3
"""In nats: two recordings may be equal to the last bit."""
SHOWN_OF_ROUND: Final = ("round", "state", "adapter", "parent", "reason")


class SceneError(Exception):
    """The scene cannot go on; the text says why."""


@dataclass(slots=True)
class Measured:
    """The held-out messages, answered by the alias: at temperature 1, as users ask, and greedily."""

    sampled: Result
    greedy: Result

    def as_json(self) -> dict[str, Any]:
        return {"sampled": self.sampled.as_json(), "greedy": self.greedy.as_json()}


@dataclass(slots=True)
class Report:
    """What came of a scene. `seconds` is by phase, and `rounds` are those of `flywheel round --json`.

    `signals` say how clearly the proof of weights tells each round's adapter from the base model and from its parent:
    the root mean square of the recorded differences over that of the noise.
    """

    measured: dict[str, Measured] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    signals: list[dict[str, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def slow(self) -> list[str]:
        """Phases that took more than twice their budget."""
        return [phase for phase, seconds in self.seconds.items() if seconds > 2 * BUDGETS[phase]]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": small_model.NAME,
            "measured": {version: each.as_json() for version, each in self.measured.items()},
            "rounds": [{name: each[name] for name in SHOWN_OF_ROUND} for each in self.rounds],
            "signals": self.signals,
            "seconds": {phase: round(seconds, 1) for phase, seconds in self.seconds.items()},
            "total_seconds": round(sum(self.seconds.values()), 1),
            "over_twice_the_budget": self.slow,
        }


class SupportDesk:
    """One scene in `folder`, which is made. After `play` or an exception nothing of it runs any more."""

    def __init__(self, folder: Path, seed: int, say: Callable[[str], None], *, development: bool = False) -> None:
        self._folder = folder
        self._seed = seed
        self._say = say
        self._measured_on: Kind = DEVELOPMENT if development else HELD_OUT
        self._part: Part | None = None
        self.report = Report()

    async def play(self) -> Report:
        """Both turns. Raises SceneError, PartError and FlywheelError."""
        adopt_orphans()
        self._folder.mkdir(parents=True)
        recorded = TEACHER.draw(TEACHER_MESSAGES, self._seed)
        asked = DESK.draw(DESK_MESSAGES, self._seed)
        held_out = self._measured_on.draw(HELD_OUT_MESSAGES, self._seed)
        scripted = models.Models([*recorded, *asked, *held_out], self._seed)
        database = StudioDatabase(self._folder / "studio.sqlite")
        try:
            with (
                judge.running(complete=scripted.judge) as judge_url,
                judge.running(complete=scripted.teach) as teacher_url,
                desk.traced(database) as spans,
            ):
                with self._phase("the model"):
                    base = await asyncio.to_thread(small_model.for_this_machine)
                settings = settings_of(TEMPLATE, self._folder, judge_url, free_port())
                settings["model"]["base"] = str(base)
                settings["training"]["seed"] = self._seed
                first = self.write("turn-1.yaml", settings)
                second = self.write("turn-2.yaml", self.second_turn(settings))
                url, alias = f"http://127.0.0.1:{settings['serving']['port']}", settings["model"]["alias"]
                with self._phase("recorded replies of the large model"):
                    await self._traffic(teacher_url, models.TEACHER, recorded, spans)
                with self._phase("the server starts"):
                    await self._serve(first, url)
                with self._phase("the base model, measured"):
                    await self._measure("base", url, alias, held_out)
                with self._phase("turn 1: judge the recorded replies"):
                    await self._judge(first, len(recorded))
                with self._phase("turn 1: SFT, gate and swap"):
                    if await self._round(first) != "promoted":
                        raise SceneError(f"SFT was not promoted, so there is nothing to improve. See {self._folder}.")
                with self._phase("turn 1, measured"):
                    await self._measure("turn 1", url, alias, held_out)
                with self._phase("turn 2: the deployed model answers"):
                    await self._traffic(f"{url}/v1", alias, asked, spans)
                with self._phase("turn 2: judge its replies"):
                    await self._judge(second, len(asked))
                with self._phase("turn 2: GRPO, gate and swap"):
                    await self._round(second)
                with self._phase("turn 2, measured"):
                    await self._measure("turn 2", url, alias, held_out)
                return self.report
        finally:
            await asyncio.shield(asyncio.to_thread(self._stop))

    def second_turn(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """GRPO on the model's own traffic, which is asked again if it was not all wrong."""
        rubric = yaml.safe_load(Path(settings["filter"]["rubric"]).read_text(encoding="utf-8"))
        improve = self.write("improve.yaml", {**rubric, "id": "support-desk-improve", "threshold": IMPROVE_THRESHOLD})
        [source] = settings["sources"]
        return {
            **settings,
            "sources": [{key: value for key, value in source.items() if key != "models"}],
            "filter": {"rubric": str(improve)},
            "training": {**settings["training"], "stages": ["grpo"]},
        }

    def write(self, name: str, content: Mapping[str, Any]) -> Path:
        """A YAML file in the run's folder."""
        path = self._folder / name
        path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
        return path

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        seconds = self.report.seconds[name] = time.monotonic() - started
        slow = "  SLOW" if name in self.report.slow else ""
        self._say(f"{name}: {seconds:.0f} s of {BUDGETS[name]} s{slow}")

    async def _serve(self, config: Path, url: str) -> None:
        arguments = [sys.executable, "-m", "flywheel", "serve", "-c", str(config)]
        self._part = Part("flywheel serve", arguments, self._folder / "serve.log", ENVIRONMENT)
        await until_ready(url, [self._part])

    async def _traffic(self, url: str, model: str, messages: list[Message], spans: TracerProvider) -> None:
        await desk.answers(url, model, messages)
        await asyncio.to_thread(spans.force_flush)

    async def _measure(self, version: str, url: str, alias: str, messages: list[Message]) -> None:
        """What the alias answers now, by exact checks."""
        results = []
        for temperature in (1.0, 0.0):
            answers = await desk.answers(f"{url}/v1", alias, messages, temperature=temperature, tracing=False)
            results.append(result(messages, answers))
            by_message = dict(zip([message.text for message in messages], answers, strict=True))
            self.write(f"answers-{version.replace(' ', '-')}-{temperature:g}.yaml", by_message)
        measured = self.report.measured[version] = Measured(*results)
        self._say(f"  all fields right {measured.sampled.exact}, fields right {measured.sampled.right}")

    async def _judge(self, config: Path, expected: int) -> None:
        """Read and judge the new replies, of which there are at least `expected`."""
        report = await self._flywheel("filter", config)
        if report["judged"] < expected or report["undecided"]:
            raise SceneError(
                f"{report['judged']} of {expected} replies were judged, {report['undecided']} undecided."
            )
        self._say(f"  {report['accepted']} of {report['judged']} replies accepted")

    async def _round(self, config: Path) -> str:
        """How the round ended: promoted or rejected, after which the deployed adapter goes on serving."""
        report = await self._flywheel("round", config)
        self.report.rounds.append(report)
        if report["state"] not in ("promoted", "rejected"):
            raise SceneError(f"The round ended as {report['state']}: {report['reason']}. See {report['dir']}.")
        self._say(f"  {report['state']}: {report['reason']}")
        if report["state"] == "promoted":
            self.report.signals.append(await _signals(load(config), Path(report["dir"])))
        return str(report["state"])

    async def _flywheel(self, command: str, config: Path) -> dict[str, Any]:
        """What `flywheel COMMAND --json` prints. Raises SceneError where it fails."""
        self._say(f"$ flywheel {command} -c {config}")
        log = self._folder / f"{command}-{config.stem}.log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "flywheel",
                command,
                "-c",
                str(config),
                "--json",
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            output, _ = await process.communicate()
        if process.returncode:
            raise SceneError(f"flywheel {command} ended with {process.returncode}. See {log}.")
        report: dict[str, Any] = json.loads(output)
        return report

    def _stop(self) -> None:
        if self._part is not None:
            self._part.ask_to_stop()
            self._part.wait(STOP_SECONDS)
        end_descendants(PATIENCE_SECONDS)


async def _signals(config: Config, directory: Path) -> dict[str, float]:
    """Of the adapter of the round in `directory`, which is deployed: see `Report`."""
    store = await Store.view(config.state_dir)
    try:
        row = await store.read(deployments.active, config.model.alias)
    finally:
        await store.close()
    assert row is not None
    [replica] = row.report["replicas"]
    figures = replica["probe"]
    probe = RoundResult.model_validate_json((directory / RESULT_FILE).read_bytes()).probe
    assert probe is not None
    adapter = np.array(probe.second.adapter)
    others = {"base": probe.second.base, "parent": probe.second.parent}
    differences = {name: adapter - np.array(logprobs) for name, logprobs in others.items() if logprobs is not None}
    noise = max(figures["noise"], LEAST_NOISE)
    return {
        name: round(float(np.sqrt(np.mean(difference[: figures["tokens"]] ** 2))) / noise, 2)
        for name, difference in differences.items()
    }
