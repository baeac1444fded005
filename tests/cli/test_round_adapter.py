"""`flywheel round --adapter`: an adapter that plain TRL has trained goes through the gate to a real server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flywheel.records.states import Split
from flywheel.serving.server_keys import admin_key_file
from tests.cli.conftest import Run
from tests.conftest import POLICY, VllmServer, serve_config
from tests.factories.config import write_config, write_rubric
from tests.factories.state import execute, write_state
from tests.factories.trace import replies_on, write_lines
from tests.factories.verdict import put_judged
from tests.waiting import wait_for

ALIAS = "foreign-agent"
HELD_OUT = 24
TAUGHT = "\\boxed{7}"
TRAINING = """
import json, sys
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

base, data, out = sys.argv[1:]
arguments = SFTConfig(
    output_dir=out, max_steps=60, per_device_train_batch_size=8, learning_rate=1e-2, use_cpu=True, bf16=False,
    report_to=[], save_strategy="no", seed=1,
)
lines = [json.loads(line) for line in open(data)]
trainer = SFTTrainer(
    model=base, args=arguments, train_dataset=Dataset.from_list(lines),
    processing_class=AutoTokenizer.from_pretrained(base),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model(out)
assert not any(name.partition(".")[0] == "flywheel" for name in sys.modules)
"""


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--trained-on", "data.jsonl"], "needs --adapter"),
        (["--adapter", "lora", "--debug"], "leave out --debug and --force"),
        (["--adapter", "lora", "--force", "--yes"], "leave out --debug and --force"),
    ],
)
def test_options_that_do_not_go_together(flywheel: Run, options: list[str], why: str) -> None:
    ran = flywheel("round", *options)
    assert ran.code == 2
    assert why in " ".join(ran.err.replace("│", " ").split())


@pytest.mark.slow
def test_a_folder_without_an_adapter_starts_nothing(
    flywheel: Run, due_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = due_config()
    flywheel("round", "--adapter", "lora", "-c", config).fails(
        1, f"cannot compare the adapter in {tmp_path}/lora with what serves: there is no such folder"
    )
    assert flywheel("status", "--json", "-c", config).json["rounds"] == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of an adapter that plain TRL has trained to give one answer, and its data."""
    folder = tmp_path_factory.mktemp("trl")
    questions = [f"What is {number} plus {number % 7}?" for number in range(500, 540)]
    lines: list[dict[str, Any]] = [
        {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": TAUGHT}],
        }
        for question in questions
    ]
    data = write_lines(folder / "data.jsonl", *lines)
    command = [sys.executable, "-c", TRAINING, str(POLICY), str(data), str(folder / "lora")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "lora", data


@pytest.fixture
def config(tmp_path: Path, vllm_server: VllmServer) -> Path:
    """A state with held-out tasks and no sample, in front of the tests' server."""
    write_state(tmp_path / "state", put_judged, *replies_on(Split.HELD_OUT, HELD_OUT))
    write_rubric(tmp_path, criteria=[{"id": "seven", "type": "contains", "value": TAUGHT}])
    port = vllm_server.config.serving.port
    serving = serve_config(tmp_path, port).serving.model_dump(mode="json", exclude_unset=True)
    written = write_config(
        tmp_path,
        sources=[],
        model={"base": str(POLICY), "alias": ALIAS},
        serving=serving,
        filter={"rubric": "rubric.yaml"},
        training={"lora": {"r": 8}},
        rollout={"max_model_len": 128, "cpu_kv_cache_gib": 1},
        gate={"min_tasks": 8, "min_power": 0, "samples": 2, "max_tasks": HELD_OUT},
        daemon={"round_attempts": 2},
    )
    key = admin_key_file(serve_config(tmp_path / "state", port))
    key.parent.mkdir(parents=True, exist_ok=True)
    key.write_text(str(vllm_server.admin_key))
    key.chmod(0o600)
    return written


def answer(server: VllmServer, model: str) -> str:
    request = {"model": model, "messages": [{"role": "user", "content": "What is 3 plus 1?"}], "max_tokens": 16}
    told = httpx2.post(f"{server.url}/v1/chat/completions", json=request, headers=server.headers, timeout=120)
    assert told.status_code == 200, told.text
    return str(told.json()["choices"][0]["message"]["content"])


@pytest.mark.training
@pytest.mark.extended
@pytest.mark.timeout(1500)
def test_an_adapter_of_trl_is_gated_and_swapped_in_though_its_worker_is_killed(
    flywheel: Run, config: Path, trained: tuple[Path, Path], vllm_server: VllmServer, tmp_path: Path
) -> None:
    adapter, data = trained
    own = Path(shutil.copytree(adapter, tmp_path / "lora"))
    command = [sys.executable, "-m", "flywheel", "round", "--adapter", str(own), "--trained-on", str(data)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    state = tmp_path / "state"
    process = subprocess.Popen(
        [*command, "-c", str(config), "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def worker() -> int | None:
            found = execute(state / "state.db", "SELECT pid FROM rounds WHERE live = 1 AND state = 'training'")
            return found[0][0] if found and (state / "rounds/r0001/progress.json").exists() else None

        wait_for(lambda: worker() or process.poll() is not None, "the worker", seconds=300)
        first = worker()
        assert first is not None, process.communicate()[1]
        os.kill(first, signal.SIGKILL)
        # The round has a copy of its own.
        shutil.rmtree(own)
        told, log = process.communicate(timeout=1200)
    finally:
        process.kill()
    assert process.returncode == 0, log[-4000:]
    report = json.loads(told)
    assert (report["state"], report["attempt"], report["steps"]) == ("promoted", 2, 0), report
    assert report["comparison"]["deployed_mean"] < 0.3
    assert report["comparison"]["candidate_mean"] > 0.7
    assert answer(vllm_server, ALIAS) == TAUGHT

    exposure = f"no held-out conversation is in its training data, {data} (40 lines)"
    story = flywheel("why", "r0001", "-c", config).out
    assert f"started because: by hand: an adapter of another trainer, {own}; {exposure}" in story
    assert "compared with: the base model" in story
    assert "made of" not in story
    result = json.loads((state / "rounds/r0001/result.json").read_text())
    assert (result["outcome"], result["stages"], result["candidate"]["exposure"]) == ("compared", [], exposure)

    assert flywheel("rollback", "--to", "base", "-c", config).code == 0
    assert answer(vllm_server, ALIAS) != TAUGHT
    assert flywheel("deploy", "r0001", "-c", config).code == 0
    assert answer(vllm_server, ALIAS) == TAUGHT
