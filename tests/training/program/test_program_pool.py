"""Workflow functions in real child processes: what they get, how they fail, and that a failure costs one run."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from flywheel import secrets as known_secrets
from flywheel.errors import ConfigError
from flywheel.training.program import program_pool
from flywheel.training.program.agent_program import ModelEndpoint
from flywheel.training.program.watcher import ForkServer
from tests.cases import for_each
from tests.training.program.conftest import MODELS, WITHOUT_AGENTSCOPE, NewPool
from tests.waiting import until

pytestmark = pytest.mark.slow

TASK = {"main_query": "How much?", "metadata": {"deep": {"er": [1]}}}


async def test_a_function_gets_task_and_model_and_returns_reward_response_and_metrics(
    new_pool: NewPool, tmp_path: Path
) -> None:
    pool = new_pool(
        """
        async def run(task, model, logger=None):
            print("text of the user")
            logger.info("a line of the user's log")
            text = f"{task['main_query']} {task['metadata']} {model.model}"
            return {"reward": 0.5, "response": text, "metrics": {"turns": 3}}
        """,
        workers=2,
    )
    assert pool.start() == f"async def run(task, model, logger=None) in {tmp_path}/agent.py"
    for result in await asyncio.gather(*(pool.run(TASK, MODELS, "policy") for _ in range(4))):
        assert result.cause is None
        assert result.error == ""
        assert result.reward == 0.5
        assert result.response == "How much? {'deep': {'er': [1]}} agent"
        assert result.metrics == {"turns": 3.0}
        assert result.shown.startswith("{'reward': 0.5, 'response': ")
        assert result.seconds > 0
        assert result.peak_bytes > 1_000_000


async def test_models_reach_the_function_as_arguments_in_the_task_and_in_the_environment(
    new_pool: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "internal")
    pool = new_pool(
        """
        import json, os
        async def run(task, model, auxiliary_models=None):
            return {"response": json.dumps({
                "model": model.model,
                "auxiliary_models": {name: each.model for name, each in auxiliary_models.items()},
                "task": {name: task[name] for name in ("openai", "models", "auxiliary_models")},
                "environment": {name: os.environ.get(name) for name in (
                    "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "NO_PROXY", "no_proxy"
                )},
            })}
        """,
        auxiliary_models={"helper": ModelEndpoint("http://helper.example/v1", "large", "its-key")},
    )
    base_url = "http://127.0.0.1:9/r2/v1"
    models = {"planner": ModelEndpoint(base_url, "plan", "k"), "writer": ModelEndpoint(base_url, "write", "k")}
    writer = {"base_url": base_url, "model": "write", "api_key": "k"}
    helper = {"base_url": "http://helper.example/v1", "model": "large", "api_key": "its-key"}
    result = await pool.run({}, models, "writer")
    assert json.loads(result.response or "") == {
        "model": "write",
        "auxiliary_models": {"helper": "large", "planner": "plan", "writer": "write"},
        "task": {
            "openai": writer,
            "models": {"planner": {**writer, "model": "plan"}, "writer": writer},
            "auxiliary_models": {"helper": helper},
        },
        "environment": {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": "k",
            "OPENAI_MODEL": "write",
            "NO_PROXY": "internal,127.0.0.1",
            "no_proxy": "127.0.0.1",
        },
    }
    # Of one target alone, no model is an auxiliary one.
    result = await pool.run({}, MODELS, "policy")
    assert json.loads(result.response or "")["auxiliary_models"] == {"helper": "large"}


async def test_a_watcher_that_says_nothing_is_waited_for_no_longer_than_a_start(
    new_pool: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(ForkServer, "start", lambda *_: ours)
    monkeypatch.setattr(program_pool, "START_SECONDS", 0.01)
    result = await new_pool("async def run(task, model): ...").run({}, MODELS, "policy")
    assert result.cause == "raised"
    assert result.error == "its process does not start: its watcher does not answer within 0.01 s"
    with theirs:
        assert theirs.recv(1) == b"", "which the watcher takes for its end"


async def test_the_environment_has_no_secrets(new_pool: NewPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_secrets, "_variables", {"THE_JUDGE"})
    for name in ("THE_JUDGE", "OPENAI_API_KEY", "VLLM_API_KEY", "DATABASE_PASSWORD"):
        monkeypatch.setenv(name, "a value that nobody may see")
    monkeypatch.setenv("ORDINARY", "seen")
    monkeypatch.delenv("SEARCH_API_KEY", raising=False)
    text = """
        import os
        async def run(task, model):
            return {"response": " ".join(f"{name}={value}" for name, value in os.environ.items())}
    """
    for environment in ({}, {"SEARCH_API_KEY": "of the tools"}):
        pool = new_pool(text, environment=environment)
        result = await pool.run({}, MODELS, "policy")
        assert "a value that nobody may see" not in (result.response or "")
        assert "ORDINARY=seen" in (result.response or "")
        assert ("SEARCH_API_KEY=of the tools" in (result.response or "")) == bool(environment)


async def test_an_error_shows_no_secret(new_pool: NewPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_secrets, "_values", {"sk-0123456789"})
    pool = new_pool("async def run(task, model): raise ValueError('refused: ' + task['key'])")
    result = await pool.run({"key": "sk-0123456789"}, MODELS, "policy")
    assert result.error == "it raised ValueError: refused: [secret] (agent.py, line 1)"


async def test_the_working_directory_and_the_modules_beside_the_file(new_pool: NewPool, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "tools_of_the_user.py").write_text("ANSWER = 42\n")
    # Neither is imported by mistake: they are in the working directory.
    (elsewhere / "json.py").write_text("raise AssertionError\n")
    (elsewhere / "asyncio.py").write_text("raise AssertionError\n")
    pool = new_pool(
        """
        import os, tools_of_the_user
        async def run(task, model):
            return {"reward": tools_of_the_user.ANSWER, "response": os.getcwd()}
        """,
        folder=str(elsewhere),
    )
    result = await pool.run({}, MODELS, "policy")
    assert (result.reward, result.response) == (42.0, str(elsewhere))


@for_each(
    "text, why",
    [
        ("async def run(task): return 1", "has no parameter model"),
        ("async def ran(task, model): return 1", "has no run; it has ran"),
        ("import os; os._exit(3)", "while it was loaded, its process ended (exit code 3)"),
    ],
)
def test_what_is_not_the_contract_is_refused(text: str, why: str, new_pool: NewPool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        new_pool(text).start()
    assert f"cannot load the workflow {tmp_path}/agent.py:run: " in str(caught.value)
    assert why in str(caught.value)


@for_each(
    "settings, why",
    [
        ({"workflow": "/nowhere/agent.py:run"}, "there is no file /nowhere/agent.py"),
        ({"folder": "/nowhere"}, "its process does not start: [Errno 2] No such file or directory: '/nowhere'"),
        ({"python": "/nowhere/python"}, "No such file or directory: '/nowhere/python'"),
        ({"reward_function": "/nowhere/judge.py:judge"}, "there is no file /nowhere/judge.py"),
        ({"setup": "/nowhere/setup.py:setup"}, "there is no file /nowhere/setup.py"),
    ],
)
def test_what_is_not_there_is_named(settings: dict[str, str], why: str, new_pool: NewPool, tmp_path: Path) -> None:
    path = tmp_path / "right.py"
    path.write_text("async def run(task, model): return 1\n" + WITHOUT_AGENTSCOPE)
    with pytest.raises(ConfigError) as caught:
        new_pool(**({"workflow": f"{path}:run"} | settings)).start()
    assert why in str(caught.value)


def test_a_file_that_loads_forever_is_refused(new_pool: NewPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_pool, "START_SECONDS", 1.0)
    with pytest.raises(ConfigError, match="while it was loaded, it ran longer than 1 s"):
        new_pool("import time; time.sleep(1000)").start()


CASES = """\
import asyncio, math, os, signal, sys, threading

class Odd:
    @property
    def reward(self):
        raise OSError("the reward is gone")

async def other():
    sys.exit("from a task")

def loop():
    while True:
        pass

async def run(task, model):
    match task["case"]:
        case "fine": return {"reward": 1, "response": "yes"}
        case "raises": raise ValueError("nothing\\nworks")
        case "exits": sys.exit(3)
        case "exits in a task":
            await asyncio.gather(asyncio.create_task(other()), asyncio.sleep(1000))
        case "cancels itself":
            asyncio.current_task().cancel()
            await asyncio.sleep(1000)
        case "interrupts": raise KeyboardInterrupt
        case "ends": os._exit(4)
        case "ends well": os._exit(0)
        case "killed": os.kill(os.getpid(), signal.SIGKILL)
        case "closes": os.closerange(3, 4096)
        case "stops the loop": asyncio.get_running_loop().stop(); await asyncio.sleep(1000)
        case "nothing": return None
        case "text": return "the answer"
        case "nan": return math.nan
        case "metric": return {"reward": 1, "metrics": {"loss": math.nan}}
        case "odd": return Odd()
        case "object": return {"response": object()}
        case "hangs": await asyncio.sleep(1000)
        case "blocks": loop()
        case "does not stop":
            while True:
                try: await asyncio.sleep(1000)
                except asyncio.CancelledError: pass
        case "starts a thread": threading.Thread(target=loop).start(); return 1
        case "forks":
            os.fork()
            return {"response": "yes"}
"""

FAILURES = [
    ("raises", "raised", "it raised ValueError: nothing works (agent.py, line "),
    ("exits", "raised", "it raised SystemExit: 3 (agent.py, line "),
    ("exits in a task", "raised", "it raised SystemExit: from a task (agent.py, line "),
    ("cancels itself", "raised", "it raised CancelledError (agent.py, line "),
    ("interrupts", "raised", "it raised KeyboardInterrupt (agent.py, line "),
    ("ends", "ended", "its process ended (exit code 4)"),
    ("ends well", "ended", "its process ended (exit code 0)"),
    ("killed", "ended", "its process ended (SIGKILL)"),
    ("closes", "ended", "its process ended"),
    ("stops the loop", "raised", "it raised RuntimeError: Event loop stopped before Future completed"),
    ("nothing", "no_result", "it returned nothing instead of a number or an object"),
    ("text", "no_result", "it returned a value of type str without reward and response"),
    ("nan", "not_a_number", "its reward is nan, which is not a finite number"),
    ("metric", "not_a_number", "its metric loss is nan, which is not a finite number"),
    ("odd", "raised", "reading what it returned raised OSError: the reward is gone (agent.py, line "),
    ("object", "no_response", "its response is an object of type object, which has no text"),
]


async def test_a_run_that_fails_says_why_and_costs_only_itself(new_pool: NewPool) -> None:
    pool = new_pool(CASES, needs_response=True)
    for case, cause, error in FAILURES:
        result = await pool.run({"case": case}, MODELS, "policy")
        assert (case, result.cause) == (case, cause), result
        assert error in result.error
        assert (result.reward, result.response) == (None, None)
        result = await pool.run({"case": "fine"}, MODELS, "policy")
        assert (case, result.cause, result.reward, result.response) == (case, None, 1.0, "yes")


async def test_a_run_that_takes_too_long_is_ended(new_pool: NewPool) -> None:
    pool = new_pool(CASES)
    pool.start()
    for case in ("hangs", "blocks", "does not stop"):
        result = await pool.run({"case": case}, MODELS, "policy", seconds=0.5)
        assert (case, result.cause, result.error) == (case, "timeout", "it ran longer than 0.5 s")
        assert (await pool.run({"case": "fine"}, MODELS, "policy")).reward == 1.0


async def test_a_thread_that_goes_on_does_not_keep_a_child(new_pool: NewPool) -> None:
    pool = new_pool(CASES)
    result = await pool.run({"case": "starts a thread"}, MODELS, "policy")
    assert result.cause == "left_threads"
    assert result.error.startswith("it left a thread running: Thread-")
    assert " in loop (agent.py). End what it starts" in result.error
    assert (await pool.run({"case": "fine"}, MODELS, "policy")).reward == 1.0


async def test_threads_of_the_setup_stay_and_those_of_a_run_do_not(new_pool: NewPool, tmp_path: Path) -> None:
    """Also where the agent is outside of the working directory."""
    text = """
        import os, threading
        def wait(): threading.Event().wait()
        def start(): threading.Thread(target=wait, daemon=True).start()
        async def run(task, model):
            if task["starts"]:
                start()
            return {"response": str(os.getpid())}
    """
    (tmp_path / "elsewhere").mkdir()
    pool = new_pool(text, setup=f"{tmp_path}/agent.py:start", folder=str(tmp_path / "elsewhere"))
    found = [await pool.run({"starts": starts}, MODELS, "policy") for starts in (False, False, True, False)]
    assert [result.cause for result in found] == [None, None, "left_threads", None]
    assert found[0].response == found[1].response != found[3].response
    assert found[0].idle_threads == [], "one of the setup is not idle"


async def test_a_forked_process_that_returns_answers_nothing(new_pool: NewPool) -> None:
    pool = new_pool(CASES)
    result = await pool.run({"case": "forks"}, MODELS, "policy")
    assert (result.cause, result.response) == (None, "yes")
    assert (await pool.run({"case": "fine"}, MODELS, "policy")).reward == 1.0


async def test_a_missing_response_or_reward_fails_where_it_is_needed(new_pool: NewPool) -> None:
    text = "async def run(task, model): return task['returned']"
    pool = new_pool(text, needs_response=True)
    result = await pool.run({"returned": 0.5}, MODELS, "policy")
    assert (result.cause, result.error) == ("no_response", "it returned no response, which a judge needs: 0.5")
    assert (await pool.run({"returned": {"response": ""}}, MODELS, "policy")).response == ""
    pool = new_pool(text, needs_reward=True)
    result = await pool.run({"returned": {"response": "yes"}}, MODELS, "policy")
    assert (result.cause, result.error) == ("no_response", "it returned no reward: {'response': 'yes'}")
    assert (await pool.run({"returned": 0}, MODELS, "policy")).reward == 0.0


async def test_a_reward_function_replaces_the_reward(new_pool: NewPool, tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text(
        "async def judge(task, response, logger=None):\n"
        "    if response['answer'] == 'boom': raise ValueError('boom')\n"
        "    if response['answer'] == 'nothing': return None\n"
        "    return {'reward': float(response['answer'] == task['answer']), 'metrics': {'judged': 1}}\n"
    )
    pool = new_pool(
        """
        async def run(task, model):
            if task["answer"] is None: return 0.5
            return {"reward": 0.25, "response": {"answer": task["given"]}, "metrics": {"turns": 2}}
        """,
        reward_function=f"{judge}:judge",
        needs_reward=True,
    )
    result = await pool.run({"answer": "42", "given": "42"}, MODELS, "policy")
    assert (result.reward, result.response) == (1.0, '{"answer": "42"}')
    assert result.metrics == {"turns": 2.0, "judged": 1.0}
    for task, cause, why in (
        (
            {"answer": "42", "given": "boom"},
            "raised",
            "the reward function raised ValueError: boom (judge.py, line 2)",
        ),
        ({"answer": "42", "given": "nothing"}, "no_result", "the reward function: it returned nothing"),
        ({"answer": None}, "no_response", "it returned no response, which a judge needs: 0.5"),
    ):
        result = await pool.run(task, MODELS, "policy")
        assert result.cause == cause
        assert why in result.error


async def test_what_a_run_leaves_in_the_event_loop_is_cancelled(new_pool: NewPool) -> None:
    pool = new_pool(
        """
        import asyncio
        seen = []
        async def forever():
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: seen.append("cancelled"); raise
        async def run(task, model):
            left = list(seen)
            seen.clear()
            asyncio.create_task(forever())
            return {"response": left}
        """
    )
    responses = [(await pool.run({}, MODELS, "policy")).response for _ in range(3)]
    assert responses == ["[]", '["cancelled"]', '["cancelled"]']


async def test_setup_runs_once_per_child_and_its_tasks_go_on(new_pool: NewPool) -> None:
    text = """
        import asyncio, os
        setups = []
        counted = 0
        async def count():
            global counted
            while True:
                counted += 1
                await asyncio.sleep(0)
        async def setup():
            setups.append(os.getpid())
            asyncio.get_running_loop().counting = asyncio.create_task(count())
        async def run(task, model):
            before = counted
            await asyncio.sleep(0.01)
            return {"response": [os.getpid(), setups, counted > before]}
    """
    pool = new_pool(text, setup="agent:setup")
    responses = [json.loads((await pool.run({}, MODELS, "policy")).response or "") for _ in range(3)]
    pid = responses[0][0]
    assert responses == [[pid, [pid], True]] * 3
    assert pid != os.getpid()


async def test_a_setup_may_run_an_event_loop_of_its_own(new_pool: NewPool) -> None:
    text = """
        import asyncio
        async def prepare(): return 7
        def setup():
            global prepared
            prepared = asyncio.run(prepare())
        async def run(task, model):
            await asyncio.sleep(0)
            return prepared
    """
    pool = new_pool(text, setup="agent:setup")
    assert (await pool.run({}, MODELS, "policy")).reward == 7.0


@for_each(
    "text, why",
    [
        ("def setup(): raise OSError('no database')", "raised OSError: no database (agent.py, line 1)"),
        ("async def setup(): raise OSError('no database')", "raised OSError: no database (agent.py, line 1)"),
        ("def setup(port): pass", "must have no required parameter: missing a required argument: 'port'"),
    ],
)
def test_a_setup_that_fails_refuses_the_program(text: str, why: str, new_pool: NewPool, tmp_path: Path) -> None:
    pool = new_pool(f"{text}\nasync def run(task, model): return 1", setup=f"{tmp_path}/agent.py:setup")
    with pytest.raises(ConfigError) as caught:
        pool.start()
    assert f"the setup function {tmp_path}/agent.py:setup {why}" in str(caught.value)


async def test_a_later_child_that_does_not_start_costs_the_run(new_pool: NewPool, tmp_path: Path) -> None:
    pool = new_pool("import os\nasync def run(task, model): os._exit(1)")
    pool.start()
    assert (await pool.run({}, MODELS, "policy")).cause == "ended"
    (tmp_path / "agent.py").unlink()
    result = await pool.run({}, MODELS, "policy")
    assert (result.cause, result.error) == ("raised", f"there is no file {tmp_path}/agent.py")


async def test_at_most_so_many_run_at_once_and_a_wait_is_not_part_of_the_time_limit(
    new_pool: NewPool, tmp_path: Path
) -> None:
    pool = new_pool(
        """
        import asyncio, os, pathlib
        async def run(task, model):
            mark = pathlib.Path(f"running-{os.getpid()}")
            mark.touch(exist_ok=False)
            most, met = 0, pathlib.Path("met")
            while most < 2 and not met.exists():  # the first two wait for each other
                most = len(list(pathlib.Path().glob("running-*")))
                await asyncio.sleep(0.01)
            met.touch()
            for _ in range(20):
                most = max(most, len(list(pathlib.Path().glob("running-*"))))
                await asyncio.sleep(0.01)
            mark.unlink()
            return most
        """,
        workers=2,
    )
    results = await asyncio.gather(*(pool.run({}, MODELS, "policy", seconds=60) for _ in range(6)))
    assert all(result.cause is None for result in results), results
    assert max(result.reward or 0 for result in results) == 2
    assert not list(tmp_path.glob("running-*"))


async def test_a_cancelled_run_is_ended_and_the_pool_goes_on(new_pool: NewPool, tmp_path: Path) -> None:
    pool = new_pool(
        """
        import asyncio, os, pathlib
        async def run(task, model):
            if task["wait"]:
                pathlib.Path("running").write_text(str(os.getpid()))
                await asyncio.sleep(1000)
            return os.getpid()
        """
    )
    running = asyncio.create_task(pool.run({"wait": True}, MODELS, "policy"))
    waiting = asyncio.create_task(pool.run({"wait": True}, MODELS, "policy"))
    mark = tmp_path / "running"
    await until(lambda: mark.exists() and mark.read_text(), "the first run")
    pid = int((tmp_path / "running").read_text())
    for task in (waiting, running):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    result = await pool.run({"wait": False}, MODELS, "policy")
    assert result.cause is None
    assert result.reward != pid


async def test_runs_of_a_pool_that_is_closed_end(new_pool: NewPool, tmp_path: Path) -> None:
    pool = new_pool(
        """
        import asyncio, pathlib
        async def run(task, model):
            pathlib.Path("running").touch()
            await asyncio.sleep(1000)
        """
    )
    runs = [asyncio.create_task(pool.run({}, MODELS, "policy")) for _ in range(3)]
    await until((tmp_path / "running").exists, "a run")
    await asyncio.to_thread(pool.close)
    assert [(await run).cause for run in runs] == ["ended"] * 3
    with pytest.raises(RuntimeError, match="shutdown"):
        await pool.run({}, MODELS, "policy")


async def test_a_task_that_is_no_json_is_an_error_of_the_caller(new_pool: NewPool) -> None:
    pool = new_pool("async def run(task, model): return 1")
    with pytest.raises(TypeError):
        await pool.run({"object": object()}, MODELS, "policy")
    assert (await pool.run({"large": "x" * 3_000_000, "half a pair": "\ud83d"}, MODELS, "policy")).reward == 1.0
