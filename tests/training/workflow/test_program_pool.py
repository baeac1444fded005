"""The pool runs a real function in real child processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from flywheel.training.workflow.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.workflow.program_pool import ProgramPool

MODELS = {"policy": ModelEndpoint("http://127.0.0.1:9/r1/v1", "agent", "key-of-the-rollout")}


async def test_a_function_gets_task_and_model_and_returns_reward_response_and_metrics(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        "async def run(task, model, logger=None):\n"
        "    print('text of the user')\n"
        "    text = f\"{task['main_query']} {task['metadata']} {task['openai']['base_url']} {model.model}\"\n"
        "    return {'reward': 0.5, 'response': text, 'metrics': {'turns': 3}}\n"
    )
    pool = ProgramPool(AgentProgram(workflow=f"{path}:run", folder=str(tmp_path)), workers=2)
    try:
        assert pool.start() == f"async def run(task, model, logger=None) in {path}"
        task = {"main_query": "How much?", "metadata": {"deep": {"er": [1]}}}
        for result in await asyncio.gather(*(pool.run(task, MODELS, "policy") for _ in range(4))):
            assert result.cause is None
            assert result.reward == 0.5
            assert result.response == "How much? {'deep': {'er': [1]}} http://127.0.0.1:9/r1/v1 agent"
            assert result.metrics == {"turns": 3.0}
            assert result.peak_bytes > 1_000_000
    finally:
        pool.close()
