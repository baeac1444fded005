"""The trainer's process: what it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

STARTED = """
import sys, tempfile
from flywheel.training.optim.trainer import Trainer
from tests.factories.round import round_spec
Trainer(round_spec(), tempfile.gettempdir(), threads=1).start(None)
import flywheel.training.optim.dpo
assert "trl.trainer.grpo_trainer" in sys.modules and "trl.trainer.dpo_trainer" in sys.modules
print([name for name in sys.modules if name.partition(".")[0] == "vllm"])
"""


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.extended
def test_the_trainer_does_not_load_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-3000:]
