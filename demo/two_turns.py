"""Two turns of the wheel on a genuine small model, each step a command of Flywheel: what the scenes of
`python -m demo.real_model` have in common.

The first turn fine-tunes the model on a large model's recorded replies, the second trains it by GRPO on traffic that
it answered itself. What it is worth is measured on held-out questions, by exact checks of what the served alias
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import openai
import yaml

from demo import small_model
from demo.checks import Result
from demo.parts import Part, adopt_orphans, end_descendants
from demo.ports import held_port
from demo.studio import StudioDatabase
from demo.tracing import traced
from demo.wheel import ENVIRONMENT, PATIENCE_SECONDS, settings_of, until_ready
from flywheel.cli.demo import judge
from flywheel.config.file import Config, load
from flywheel.records.round import RESULT_FILE, RoundResult
from flywheel.store import deployments
from flywheel.store.kernel.database import Store

if TYPE_CHECKING:
    from agentscope.model import ChatModelBase
    from agentscope.tool import Toolkit
    from opentelemetry.sdk.trace import TracerProvider

TEACHER: Final = "large-model"
AT_ONCE: Final = 32
TURN_1_SAMPLES: Final = 1
"""Answers per task and adapter of the first gate: the base model can do nearly nothing, so that few show the gain."""
ANSWER_SECONDS: Final = 300.0
STOP_SECONDS: Final = 25.0
LEAST_NOISE: Final = 1e-3
"""In nats: two recordings may be equal to the last bit."""
SHOWN_OF_ROUND: Final = ("round", "state", "adapter", "parent", "reason")


class SceneError(Exception):
    """The scene cannot go on; the text says why."""


@dataclass(slots=True)
class Measured:
    """The held-out questions, answered by the alias: at temperature 1, as users ask, and greedily."""

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

    budgets: Mapping[str, int]
    """Seconds of each phase on two quiet cores with bfloat16 instructions."""
    measured: dict[str, Measured] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    signals: list[dict[str, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def slow(self) -> list[str]:
        """Phases that took more than twice their budget."""
        return [phase for phase, seconds in self.seconds.items() if seconds > 2 * self.budgets[phase]]

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


class TwoTurns(ABC):
    """One scene in `folder`, which is made. After `play` or an exception nothing of it runs any more."""

    about: ClassVar[str]
    """What the model learns, and what is scripted, as a sentence without its subject."""
    template: ClassVar[str]
    """The configuration in `configs/`."""
    budgets: ClassVar[Mapping[str, int]] = {
        "the model": 60,
        "recorded replies of the large model": 10,
        "the server starts": 40,
        "the base model, measured": 60,
        "turn 1: judge the recorded replies": 10,
        "turn 1: SFT, gate and swap": 200,
        "turn 1, measured": 60,
        "turn 2: the deployed model answers": 40,
        "turn 2: judge its replies": 10,
        "turn 2: GRPO, gate and swap": 650,
        "turn 2, measured": 60,
    }
    agent: ClassVar[str]
    system_prompt: ClassVar[str]
    max_tokens: ClassVar[int]
    max_calls: ClassVar[int] = 1
    """Model calls of one reply."""
    recorded: Sequence[str]
    """Questions that the large model answered."""
    asked: Sequence[str]
    """Questions that the deployed model answers after the first turn."""
    held_out: Sequence[str]

    def __init__(self, folder: Path, seed: int, say: Callable[[str], None], *, development: bool = False) -> None:
        self._folder = folder
        self._seed = seed
        self._say = say
        self._part: Part | None = None
        self._hurry = False
        self.report = Report(self.budgets)
        self.draw(development=development)

    @abstractmethod
    def draw(self, *, development: bool) -> None:
        """Set `recorded`, `asked` and `held_out`, of which the last are other ones for `development`."""

    @abstractmethod
    def teach(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The large model's completion."""

    @abstractmethod
    def judge(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The judge's completion."""

    def toolkit(self) -> Toolkit | None:
        """The agent's tools."""
        return None

    async def answer(self, model: ChatModelBase, question: str, middlewares: list[Any]) -> str:
        """What a new agent answers."""
        from agentscope.agent import Agent, InjectionConfig, ReActConfig
        from agentscope.message import UserMsg

        agent = Agent(
            name=self.agent,
            system_prompt=self.system_prompt,
            model=model,
            toolkit=self.toolkit(),
            middlewares=middlewares,
            react_config=ReActConfig(max_iters=self.max_calls),
            # Without the runtime reminder, which AgentScope does not trace, the traces have the exact prompts.
            injection_config=InjectionConfig(inject_runtime_state=False),
        )
        reply = await agent.reply(UserMsg(name="user", content=question))
        return (reply.get_text_content() or "").strip()

    @abstractmethod
    def check(self, answers: Sequence[str]) -> Result:
        """How good the answers to the held-out questions are, by exact checks."""

    def settings(self, judge_url: str, port: int) -> dict[str, Any]:
        """What both turns have in common, with the first one's stages."""
        settings = settings_of(self.template, self._folder, judge_url, port)
        settings["training"]["seed"] = self._seed
        return settings

    def first_turn(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of the first turn: SFT on the large model's replies."""
        return {**settings, "gate": {**settings["gate"], "samples": TURN_1_SAMPLES}}

    def second_turn(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of the second turn: GRPO on the model's own traffic."""
        [source] = settings["sources"]
        return {
            **settings,
            "sources": [{key: value for key, value in source.items() if key != "models"}],
            "training": {**settings["training"], "stages": ["grpo"]},
        }

    async def play(self) -> Report:
        """Both turns. Raises SceneError, PartError and FlywheelError."""
        adopt_orphans()
        self._folder.mkdir(parents=True)
        database = StudioDatabase(self._folder / "studio.sqlite")
        try:
            with (
                judge.running(complete=self.judge) as judge_url,
                judge.running(complete=self.teach) as teacher_url,
                traced(database) as spans,
                held_port() as port,
            ):
                with self._phase("the model"):
                    base = await asyncio.to_thread(small_model.for_this_machine)
                settings = self.settings(judge_url, port)
                settings["model"]["base"] = str(base)
                first = self.write("turn-1.yaml", self.first_turn(settings))
                second = self.write("turn-2.yaml", self.second_turn(settings))
                url, alias = f"http://127.0.0.1:{port}", settings["model"]["alias"]
                with self._phase("recorded replies of the large model"):
                    await self.traffic(teacher_url, TEACHER, self.recorded, spans)
                with self._phase("the server starts"):
                    await self._serve(first, url)
                with self._phase("the base model, measured"):
                    await self._measure("base", url, alias)
                with self._phase("turn 1: judge the recorded replies"):
                    await self._judge(first, len(self.recorded))
                with self._phase("turn 1: SFT, gate and swap"):
                    if await self._round(first) != "promoted":
                        raise SceneError(f"SFT was not promoted, so there is nothing to improve. See {self._folder}.")
                with self._phase("turn 1, measured"):
                    await self._measure("turn 1", url, alias)
                with self._phase("turn 2: the deployed model answers"):
                    await self.traffic(f"{url}/v1", alias, self.asked, spans)
                with self._phase("turn 2: judge its replies"):
                    await self._judge(second, len(self.asked))
                with self._phase("turn 2: GRPO, gate and swap"):
                    await self._round(second)
                with self._phase("turn 2, measured"):
                    await self._measure("turn 2", url, alias)
                return self.report
        finally:
            # In a thread: a second Ctrl-C must still be heard.
            await asyncio.shield(asyncio.to_thread(self._stop))

    def hurry(self) -> None:
        """End the processes without waiting for them to stop by themselves."""
        self._hurry = True

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
        self._say(f"{name}: {seconds:.0f} s of {self.budgets[name]} s{slow}")

    async def _serve(self, config: Path, url: str) -> None:
        arguments = [sys.executable, "-m", "flywheel", "serve", "-c", str(config)]
        self._part = Part("flywheel serve", arguments, self._folder / "serve.log", ENVIRONMENT)
        await until_ready(url, [self._part])

    async def traffic(self, url: str, model: str, questions: Sequence[str], spans: TracerProvider) -> list[str]:
        """Answers whose traces have been written. Raises openai.OpenAIError."""
        from agentscope.middleware import TracingMiddleware

        answers = await self._answers(url, model, questions, 1.0, [TracingMiddleware()])
        await asyncio.to_thread(spans.force_flush)
        return answers

    async def _answers(
        self, url: str, model: str, questions: Sequence[str], temperature: float, middlewares: list[Any]
    ) -> list[str]:
        """Answers by a model at an OpenAI-compatible endpoint (with `/v1`). Raises openai.OpenAIError."""
        from agentscope.credential import OpenAICredential
        from agentscope.model import OpenAIChatModel

        chat = OpenAIChatModel(
            credential=OpenAICredential(api_key="unused", base_url=url),
            model=model,
            parameters=OpenAIChatModel.Parameters(temperature=temperature, max_tokens=self.max_tokens),
            stream=False,
            # The endpoint is on this machine: a proxy of the environment is not for it.
            client_kwargs={
                "http_client": openai.DefaultAsyncHttpxClient(trust_env=False),
                "timeout": ANSWER_SECONDS,
            },
        )
        places = asyncio.Semaphore(AT_ONCE)

        async def answer(question: str) -> str:
            async with places:
                return await self.answer(chat, question, middlewares)

        try:
            return list(await asyncio.gather(*map(answer, questions)))
        finally:
            await chat.client.close()

    async def _measure(self, version: str, url: str, alias: str) -> None:
        """What the alias answers now, by exact checks."""
        temperatures = (1.0, 0.0)
        asked = (self._answers(f"{url}/v1", alias, self.held_out, each, []) for each in temperatures)
        sampled, greedy = answered = await asyncio.gather(*asked)
        for temperature, answers in zip(temperatures, answered, strict=True):
            by_question = dict(zip(self.held_out, answers, strict=True))
            self.write(f"answers-{version.replace(' ', '-')}-{temperature:g}.yaml", by_question)
        measured = self.report.measured[version] = Measured(self.check(sampled), self.check(greedy))
        self._say("  " + ", ".join(f"{name} {share}" for name, share in measured.sampled.shares.items()))

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
            try:
                output, _ = await process.communicate()
            except asyncio.CancelledError:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), STOP_SECONDS)
                raise
        if process.returncode:
            raise SceneError(f"flywheel {command} ended with {process.returncode}. See {log}.")
        report: dict[str, Any] = json.loads(output)
        return report

    def _stop(self) -> None:
        if self._part is not None:
            self._part.ask_to_stop()
            deadline = time.monotonic() + STOP_SECONDS
            while not self._part.wait(0.2) and not self._hurry and time.monotonic() < deadline:
                pass
        end_descendants(0.0 if self._hurry else PATIENCE_SECONDS)


def text_of(message: Mapping[str, Any]) -> str:
    """What a message of a chat request says."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


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
