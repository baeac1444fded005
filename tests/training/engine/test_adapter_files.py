"""Adapters as files: what arrives is what was sent, and which ones a round goes on from."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from flywheel.errors import TrainError
from flywheel.records.round import AdapterRef, FrozenTarget
from flywheel.serving.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from flywheel.system.files import file_sha256, tree_sha256
from flywheel.training.engine.policy import AdapterFiles, check_frozen, check_parent


@pytest.fixture
def files(tmp_path: Path) -> AdapterFiles:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / CONFIG_FILE).write_text("{}")
    (folder / WEIGHTS_FILE).write_bytes(os.urandom(1000))
    (folder / "README.md").write_text("of no use for an engine")
    return AdapterFiles.read(folder)


def test_what_arrives_is_what_was_sent(files: AdapterFiles, tmp_path: Path) -> None:
    files.write(tmp_path / "there")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    assert (tmp_path / "there" / WEIGHTS_FILE).read_bytes() == (tmp_path / "made" / WEIGHTS_FILE).read_bytes()
    assert files.sha256[WEIGHTS_FILE] == file_sha256(tmp_path / "made" / WEIGHTS_FILE)


def test_what_is_sent_is_not_copied(files: AdapterFiles, tmp_path: Path) -> None:
    """But for the object store's own copy."""
    sent: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(files, protocol=5, buffer_callback=sent.append)
    assert len(rest) < 1000 < sum(len(each.raw()) for each in sent)
    arrived = pickle.loads(rest, buffers=[memoryview(each.raw()).toreadonly() for each in sent])
    assert arrived == files
    arrived.write(tmp_path / "there")
    assert AdapterFiles.read(tmp_path / "there") == files


def test_what_arrives_changed_is_refused(files: AdapterFiles, tmp_path: Path) -> None:
    weights = bytearray(files.contents[WEIGHTS_FILE])
    weights[500] ^= 1
    changed = replace(files, contents={**files.contents, WEIGHTS_FILE: bytes(weights)})
    with pytest.raises(TrainError, match=f"{WEIGHTS_FILE} arrived changed") as caught:
        changed.write(tmp_path / "there")
    assert caught.value.retryable


def test_a_folder_that_cannot_be_written_is_named(files: AdapterFiles, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=f"write an adapter to {tmp_path}/none/there: No such file"):
        files.write(tmp_path / "none" / "there")


def test_what_is_written_for_a_while_is_gone_afterwards(files: AdapterFiles) -> None:
    with files.written() as folder:
        assert (folder / CONFIG_FILE).read_text() == "{}"
    assert not folder.parent.exists()


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
