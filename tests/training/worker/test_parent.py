"""Which adapters a round goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.errors import TrainError
from flywheel.records.round import AdapterRef, FrozenTarget
from flywheel.system.files import tree_sha256
from flywheel.training.engine.policy import check_frozen, check_parent


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "optimizer.pkl"])
def test_pickled_weights_are_not_trained_further(tmp_path: Path, name: str) -> None:
    """Not even if they are what the round of the adapter wrote down."""
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_text("{}")
    check_parent(AdapterRef(name="r0001", path=str(tmp_path), sha256=tree_sha256(tmp_path)))
    (tmp_path / name).touch()
    with pytest.raises(TrainError, match="only safetensors") as refused:
        check_parent(AdapterRef(name="r0001", path=str(tmp_path), sha256=tree_sha256(tmp_path)))
    assert refused.value.hint


def test_the_adapters_of_other_targets_must_be_there_and_unchanged(tmp_path: Path) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_text("{}")
    adapter = AdapterRef(name="r0002", path=str(tmp_path), sha256=tree_sha256(tmp_path))
    others = [
        FrozenTarget(target="writer", alias="write", adapter=adapter),
        FrozenTarget(target="critic", alias="criticize", adapter=None),
    ]
    check_frozen(others)
    (tmp_path / "adapter_model.safetensors").write_text("{ }")
    with pytest.raises(TrainError, match="cannot let the target writer answer with its adapter r0002: the files in"):
        check_frozen(others)
