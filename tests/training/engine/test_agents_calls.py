"""Rollouts of the user's agent in real processes, which calls a scripted model over HTTP: what the machine failed has
no reward, and what a run leaves behind reaches no other run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flywheel.config.file import Config
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, RewardWeights, Rollout, RolloutBatch, RolloutRequest
from flywheel.training.engine.rollout_engine import ProgramSetup, RolloutEngine
from tests.factories.task import round_task
from tests.training.engine.scripted_application import ScriptedApplication, answered, message, started
from tests.training.program.conftest import WITHOUT_AGENTSCOPE
from tests.waiting import until

pytestmark = pytest.mark.slow

FAILED = (500, {"error": {"message": "CUDA error", "code": 500}})
AGENT = """
import asyncio, concurrent.futures, functools, json, os, pathlib, sys, threading, time, urllib.request
sys.path.append("site-packages")
import library

pool = concurrent.futures.ThreadPoolExecutor(1)


def ask(text, url=None, **more):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    request = urllib.request.Request(
        (url or os.environ["OPENAI_BASE_URL"]) + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def poll():
    while not os.path.exists("go"):
        time.sleep(0.01)
    ask("late")


def soon():
    time.sleep(0.01)


async def sleep_and_ask():
    await asyncio.sleep(1000)
    ask("late")


def of_a_loop():
    loop = asyncio.new_event_loop()
    asyncio.run_coroutine_threadsafe(sleep_and_ask(), loop)
    threading.Thread(target=loop.run_forever, name="left", daemon=True).start()


def after_a_while(function):
    timer = threading.Timer(1000, function)
    timer.name = "left"
    timer.daemon = True
    timer.start()


async def run(task, model):
    does = task["does"]
    ask("first")
    if does == "catch":
        try:
            ask("second")
        except OSError:
            return {"response": "Sorry, I cannot answer.", "reward": 0.0}
    elif does == "raise":
        ask("second")
    elif does == "retry":
        for _ in range(2):
            try:
                ask("second")
            except OSError:
                pass
    elif does == "leave":
        pathlib.Path("ready").touch()
        library.ask_later(os.environ["OPENAI_BASE_URL"])
        while not os.path.exists("asked"):
            await asyncio.sleep(0.01)
    elif does == "thread":
        threading.Thread(target=poll, name="left", daemon=True).start()
    elif does == "executor":
        asyncio.get_running_loop().run_in_executor(None, poll)
    elif does == "timer":
        after_a_while(poll)
    elif does == "timer of a partial function":
        after_a_while(functools.partial(ask, "late"))
    elif does == "loop":
        of_a_loop()
    elif does == "ends soon":
        pool.submit(soon)
        threading.Thread(target=soon).start()
    elif does == "library":
        library.ask_later(os.environ["OPENAI_BASE_URL"])
    return {"response": str(os.getpid()), "reward": 1.0}
"""
LIBRARY = """
import json, os, threading, time, urllib.error, urllib.request

def work(url):
    while not os.path.exists("go"):
        time.sleep(0.01)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "of a library"}]})
    try:
        urllib.request.urlopen(url + "/chat/completions", body.encode())
    except urllib.error.HTTPError as error:
        open("refused", "w").write(str(error.code))

def ask_later(url):
    threading.Thread(target=work, args=[url], name="exporter", daemon=True).start()
"""


class Engine(RolloutEngine):
    def __init__(self, application: ScriptedApplication) -> None:
        super().__init__()
        self._application = application

    def _tokens_of_context(self, request: RolloutRequest) -> int:
        return 100

    def _texts(self, token_ids: Sequence[int]) -> Sequence[str]:
        return [""] * len(token_ids)

    async def roll_out(self, does: str) -> Completion:
        task = round_task(reference="", agent="program", line={"does": does})
        return await self._with_program(RolloutRequest(Prompt(task, (5, 6)), 0, 1, 1.0, 100, None))


@asynccontextmanager
async def running(folder: Path, application: ScriptedApplication) -> AsyncIterator[Engine]:
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "library.py").write_text(LIBRARY)
    (folder / "agent.py").write_text(AGENT + WITHOUT_AGENTSCOPE)
    agent = {"workflow": f"{folder}/agent.py:run", "folder": str(folder)}
    config = Config.model_validate(
        {"rollout": {"agent": agent, "workers": 1, "reward": {"rubric": 0, "workflow": 1}}}
    )
    engine = Engine(application)
    await engine._endpoint.start()
    try:
        setup = ProgramSetup({"m": "m"}, "m", 16, needs_reward=True)
        await engine.use_program(config.model_dump(mode="json"), setup)
        yield engine
    finally:
        await engine.stop()


def reward(completion: Completion) -> float | None:
    request = RolloutRequest(Prompt(round_task(agent="program"), (5,)), 0, 1, 1.0, 100, None)
    return Rollout(request, completion, None, RewardWeights(0, 1)).reward


def texts(application: ScriptedApplication) -> list[str]:
    return [body["messages"][0]["content"] for body in application.asked]


async def test_an_agent_that_makes_the_best_of_a_failed_call_has_no_reward(tmp_path: Path) -> None:
    said = answered(message())
    application = ScriptedApplication(said, FAILED, said, FAILED, said, FAILED, said)
    async with running(tmp_path, application) as engine:
        for does, cause in (("catch", "engine_error"), ("raise", "engine_error"), ("retry", "")):
            found = await engine.roll_out(does)
            assert (does, found.cause, reward(found)) == (does, cause, None if cause else 1.0)
            assert ("the engine failed: CUDA error (HTTP status 500)" in found.error) == bool(cause)


async def test_an_agent_that_does_not_wait_for_an_answer_has_no_reward(tmp_path: Path) -> None:
    application = ScriptedApplication()
    async with running(tmp_path, application) as engine:
        rolling = asyncio.create_task(engine.roll_out("leave"))
        await until((tmp_path / "ready").exists, "the run")
        application.go.clear()
        (tmp_path / "go").touch()
        await started(application, 2)
        (tmp_path / "asked").touch()
        found = await rolling
        assert (found.cause, reward(found)) == ("abandoned_call", None)
        assert "it was given up before the engine had answered" in found.error
        application.go.set()
        assert reward(await engine.roll_out("nothing")) == 1.0
    assert (tmp_path / "refused").read_text() == "410"


@pytest.mark.parametrize("does", ["thread", "executor", "timer", "timer of a partial function", "loop"])
async def test_a_thread_that_runs_the_agents_code_after_its_run_calls_no_model_of_another(
    does: str, tmp_path: Path
) -> None:
    application = ScriptedApplication()
    async with running(tmp_path, application) as engine:
        left = await engine.roll_out(does)
        assert (left.cause, reward(left)) == ("left_threads", None)
        assert "it left a thread running: " in left.error
        assert "(agent.py)" in left.error
        (tmp_path / "go").touch()
        for _ in range(3):
            assert reward(await engine.roll_out("nothing")) == 1.0
    assert texts(application) == ["first"] * 4


async def test_threads_that_run_nothing_of_the_agents_keep_their_process(tmp_path: Path) -> None:
    async with running(tmp_path, ScriptedApplication()) as engine:
        found = [await engine.roll_out(does) for does in ("ends soon", "nothing", "ends soon", "nothing")]
    assert [reward(each) for each in found] == [1.0] * 4
    assert len({each.text for each in found}) == 1
    assert all("ThreadPoolExecutor-0_0" in each.run.idle_threads for each in found if each.run)


async def test_a_process_in_which_a_thread_called_the_model_of_an_ended_run_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path, ScriptedApplication()) as engine:
        first, second = [await engine.roll_out(does) for does in ("library", "nothing")]
        assert first.text == second.text, "a thread that waits costs nothing"
        assert first.run is not None
        assert first.run.idle_threads == ["exporter"]
        (tmp_path / "go").touch()
        await until((tmp_path / "refused").exists, "the late call")
        third, fourth = [await engine.roll_out("nothing") for _ in range(2)]
    assert (tmp_path / "refused").read_text() == "404"
    assert third.text == fourth.text != first.text
    request = RolloutRequest(Prompt(round_task(agent="program"), (5,)), 0, 1, 1.0, 100, None)
    batch = RolloutBatch(tuple(Rollout(request, each, None) for each in (second, third, fourth)))
    assert batch.summary()["program"]["failures"] == {"late_call": 1}
