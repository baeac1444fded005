"""An engine whose memory holds less than the server's context: real vLLM in a real Ray actor."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from flywheel.errors import TrainError
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import Engine
from tests.factories.engine import settings
from tests.factories.round import POLICY

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.filterwarnings("ignore")]


def test_a_context_that_memory_does_not_hold_is_cut_and_one_that_the_round_needs_is_refused(
    tmp_path: Path, shared_engine: Any
) -> None:
    """A token takes half a megabyte here, so that a gigabyte holds a quarter of the model's context."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shared_engine.end()
    wide = tmp_path / "wide"
    shutil.copytree(POLICY, wide)
    config = AutoConfig.from_pretrained(POLICY)
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "num_hidden_layers": 16}
    for name, value in {**heads, "layer_types": ["full_attention"] * 16, "max_position_embeddings": 8192}.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(wide)
    actor = ray_cluster.start(Engine, settings(str(wide)), gpus=0)
    [about] = ray_cluster.wait([actor.start.remote()])
    assert 1000 < about.context < 4000
    ray_cluster.stop([actor])
    ray.kill(actor)
    actor = ray_cluster.start(Engine, replace(settings(str(wide)), max_model_len=6000), gpus=0)
    with pytest.raises(TrainError, match=r"memory holds a context of \d+ tokens, and rollout\.max_model_len is 6000"):
        ray_cluster.wait([actor.start.remote()])
    ray_cluster.stop([actor])
    ray.kill(actor)
