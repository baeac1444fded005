"""Commands: any program that reads the task from its input and writes one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from flywheel.errors import ConfigError
from flywheel.training.program import program_child
from tests.cases import for_each
from tests.training.program.conftest import MODELS, NewPool

pytestmark = pytest.mark.slow

OPENAI = {"base_url": "http://127.0.0.1:9/r1/v1", "model": "agent", "api_key": "key-of-the-rollout"}


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def test_a_command_gets_the_task_and_the_environment(new_pool: NewPool, tmp_path: Path) -> None:
    code = (
        "import json, os, sys; task = json.load(sys.stdin); print('a line of the log', file=sys.stderr);"
        "environment = {name: value for name, value in os.environ.items() if name.startswith('OPENAI_')};"
        "print(json.dumps({'response': {'task': task, 'environment': environment, 'folder': os.getcwd()},"
        " 'reward': 0.5, 'metrics': {'turns': 2}}))"
    )
    pool = new_pool(command=python(code))
    assert pool.start() == f"command {sys.executable} -c {code} ({sys.executable})"
    result = await pool.run({"task_id": "t1", "metadata": {"deep": [1]}}, MODELS, "policy")
    assert (result.cause, result.reward, result.metrics) == (None, 0.5, {"turns": 2.0})
    assert json.loads(result.response or "") == {
        "task": {
            "task_id": "t1",
            "metadata": {"deep": [1]},
            "openai": OPENAI,
            "models": {"policy": OPENAI},
            "auxiliary_models": {},
        },
        "environment": {
            "OPENAI_BASE_URL": OPENAI["base_url"],
            "OPENAI_API_KEY": OPENAI["api_key"],
            "OPENAI_MODEL": OPENAI["model"],
        },
        "folder": str(tmp_path),
    }


@for_each(
    "script, cause, error",
    [
        ("exit 3", "raised", "it ended with exit code 3"),
        ('echo \'{"response": "yes"}\'; exit 1', "raised", "it ended with exit code 1"),
        ("echo one >&2; echo two >&2; exit 3", "raised", "it ended with exit code 3: one | two"),
        ("kill -9 $$", "raised", "it was ended by SIGKILL"),
        (":", "no_result", "it wrote nothing to standard output"),
        ("echo; echo", "no_result", "it wrote nothing to standard output"),
        (
            "echo hello",
            "bad_output",
            "is not one JSON object (Expecting value: line 1 column 1 (char 0)); it begins with",
        ),
        ('echo \'{"response": "a"}{}\'', "bad_output", "Extra data"),
        ('echo working; echo \'{"response": "a"}\'', "bad_output", "it begins with 'working"),
        ("echo '[1]'", "bad_output", "(it is of type list)"),
        ("echo 1", "bad_output", "(it is of type int)"),
        ("printf '\\377'", "bad_output", "is not one JSON object"),
        ("echo '{}'", "no_result", "without reward and response"),
        ("echo '{\"reward\": NaN}'", "not_a_number", "its reward is nan"),
        ("echo '{\"reward\": 1}'", "no_response", "it returned no response, which a judge needs: {'reward': 1}"),
    ],
)
def test_output_that_is_no_result(script: str, cause: str, error: str, new_pool: NewPool) -> None:

    pool = new_pool(command=("sh", "-c", script), needs_response=True)
    result = asyncio.run(pool.run({}, MODELS, "policy"))
    assert result.cause == cause
    assert error in result.error


async def test_input_that_is_not_read(new_pool: NewPool) -> None:
    pool = new_pool(command=("sh", "-c", 'exec <&-; echo \'{"response": "yes"}\''))
    for size in (10, 3_000_000):
        assert (await pool.run({"text": "x" * size}, MODELS, "policy")).response == "yes"


async def test_long_output_is_read_while_the_input_is_written(new_pool: NewPool) -> None:
    code = "import json, sys; text = sys.stdin.read(); sys.stderr.write(text); print(json.dumps({'response': text}))"
    result = await new_pool(command=python(code)).run({"text": "x" * 3_000_000}, MODELS, "policy")
    assert result.cause is None
    assert len(result.response or "") > 3_000_000


async def test_endless_output_is_ended(new_pool: NewPool) -> None:
    result = await new_pool(command=("sh", "-c", "exec yes")).run({}, MODELS, "policy")
    limit = program_child.MAX_OUTPUT_BYTES
    assert (result.cause, result.error) == ("bad_output", f"it wrote more than {limit:,} bytes to standard output")


async def test_what_a_command_leaves_behind_is_ended_though_it_holds_the_output(new_pool: NewPool) -> None:
    pool = new_pool(command=("sh", "-c", 'sleep 1000 & echo \'{"response": "yes"}\''))
    result = await pool.run({}, MODELS, "policy")
    assert (result.cause, result.error) == ("left_processes", "it left a process running: sleep 1000")


async def test_a_command_that_hangs_is_ended(new_pool: NewPool) -> None:
    pool = new_pool(command=("sleep", "1000"))
    result = await pool.run({}, MODELS, "policy", seconds=0.5)
    assert (result.cause, result.error) == ("timeout", "it ran longer than 0.5 s")


async def test_a_reward_function_judges_a_command(new_pool: NewPool, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(
        "async def judge(task, response, auxiliary_models):\n"
        "    return float(response == task['answer']) + len(auxiliary_models)\n"
    )
    pool = new_pool(command=("echo", '{"response": "42"}'), reward_function=f"{tmp_path}/judges.py:judge")
    assert (await pool.run({"answer": "42"}, MODELS, "policy")).reward == 1.0
    assert (await pool.run({"answer": "41"}, MODELS, "policy")).reward == 0.0


async def test_a_setup_runs_before_a_command(new_pool: NewPool, tmp_path: Path) -> None:
    (tmp_path / "setups.py").write_text("import os\ndef setup(): os.environ['OF_THE_SETUP'] = 'yes'\n")
    pool = new_pool(
        command=("sh", "-c", 'echo "{\\"response\\": \\"$OF_THE_SETUP\\"}"'), setup=f"{tmp_path}/setups.py:setup"
    )
    assert (await pool.run({}, MODELS, "policy")).response == "yes"


@for_each(
    "command, why",
    [
        (
            "a-program-that-is-not-there",
            "there is no such program in PATH that can be run: a-program-that-is-not-there",
        ),
        ("./agent.sh", "agent.sh that can be run: ./agent.sh"),
    ],
)
def test_a_command_that_is_not_there_is_refused(command: str, why: str, new_pool: NewPool) -> None:
    with pytest.raises(ConfigError) as caught:
        new_pool(command=(command,)).start()
    assert str(caught.value).startswith("cannot start the command: ")
    assert why in str(caught.value)


async def test_a_relative_command_is_in_the_working_directory(new_pool: NewPool, tmp_path: Path) -> None:
    path = tmp_path / "agent.sh"
    path.write_text('#!/bin/sh\necho \'{"response": "yes"}\'\n')
    path.chmod(0o755)
    pool = new_pool(command=("./agent.sh",))
    assert pool.start() == "command ./agent.sh (./agent.sh)"
    assert (await pool.run({}, MODELS, "policy")).response == "yes"
