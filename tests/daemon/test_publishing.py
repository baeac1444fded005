"""What is published of an adapter, and that a server starts with it when there is no daemon."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from flywheel.config.file import Config
from flywheel.daemon.deployer import ABTestRequest, Deployer
from flywheel.daemon.publishing import model_card, publish
from flywheel.records.round import StageResult
from flywheel.records.states import RoundState
from flywheel.serving.adapter_files import FILES
from flywheel.serving.alias_target import AliasTarget
from flywheel.serving.server.alias_table import read_aliases
from flywheel.serving.server.vllm_command import adopt, alias_file, command, sent_adapters
from flywheel.store.kernel.database import Store
from flywheel.system.files import tree_sha256
from tests.factories.adapter import put_adapter_files
from tests.factories.config import make_config, with_settings
from tests.factories.round import GUARDED, comparison, put_tested_round, put_trained
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, replica, running, with_middleware

R1, R2 = "agent@r0001", "agent@r0002"


@dataclass
class Published:
    """A daemon with one server, and the folder that it publishes in."""

    folder: Path
    config: Config
    store: Store
    app: FakeVllm

    @property
    def current(self) -> Any:
        return json.loads((self.folder / "current.json").read_bytes())

    @property
    def deployer(self) -> Deployer:
        return Deployer(self.store, self.config)

    def pod(self) -> Config:
        """The configuration of a server with an empty state."""
        serving = {"start": "wait", "adopt": self.folder}
        return with_settings(self.config, state={"dir": self.folder.parent / "pod"}, serving=serving)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "published"


@pytest.fixture
async def published(
    tmp_path: Path, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Published]:
    monkeypatch.setenv("ADMIN_KEY", "a-key-of-administrators")
    app = FakeVllm({BASE: PROBE.second.base})
    for number in (1, 2):
        await store.write(put_trained, number, put_adapter_files(tmp_path / f"r{number:04d}", rank=8 * number), app)
    with replica(app) as url:
        serving = {"urls": [url], "drain_seconds": 0, "admin_key_env": "ADMIN_KEY"}
        config = make_config(
            tmp_path, sources=[], model={"base": BASE, "alias": "agent"}, serving=serving,
            deploy={"publish": str(folder), "watch": {"new_share": 1}},
        )  # fmt: skip
        yield Published(folder, config, store, app)


async def test_what_is_deployed_is_published(published: Published, tmp_path: Path) -> None:
    await published.deployer.deploy("r0001", "test")
    sha256 = tree_sha256(tmp_path / "r0001")
    assert published.current == {"agent": {"target": R1, "path": f"r0001-{sha256[:12]}", "sha256": sha256}}
    place = published.folder / f"r0001-{sha256[:12]}"
    assert sorted(each.name for each in place.iterdir()) == ["README.md", *FILES]
    for name in FILES:
        assert (place / name).read_bytes() == (tmp_path / "r0001" / name).read_bytes()
    await published.deployer.deploy("r0002", "test")
    assert published.current["agent"]["target"] == R2
    assert place.is_dir(), "what was published stays"
    assert not list(published.folder.glob(".*"))


async def test_a_rollback_is_published_by_the_next_reconciliation(published: Published) -> None:
    for name in ("r0001", "r0002"):
        await published.deployer.deploy(name, "test")
    await published.deployer.rollback()
    await published.deployer.reconcile()
    assert published.current["agent"]["target"] == R1
    await published.deployer.rollback("base")
    await published.deployer.reconcile()
    assert published.current == {"agent": {"target": BASE, "path": None, "sha256": None}}


async def test_a_folder_that_cannot_be_written_fails_no_swap(
    published: Published, caplog: pytest.LogCaptureFixture
) -> None:
    published.folder.touch()
    deployer = published.deployer
    await deployer.deploy("r0001", "test")
    await deployer.reconcile()
    assert [each.message for each in caplog.records if "is not published" in each.message] != []
    assert len([each for each in caplog.records if "is not published" in each.message]) == 1
    published.folder.unlink()
    await deployer.reconcile()
    assert published.current["agent"]["target"] == R1


async def test_a_copy_that_cannot_be_finished_is_not_named(published: Published) -> None:
    """`current.json` is written last: it never names a folder that is not whole."""
    await published.deployer.deploy("r0001", "test")
    before = published.current
    source = published.folder.parent / "r0002"
    sha256 = tree_sha256(source)
    (source / FILES[1]).unlink()
    with pytest.raises(FileNotFoundError):
        publish(published.folder, "agent", AliasTarget(R2, str(source), sha256), {R2: "a card"})
    assert published.current == before
    assert not (published.folder / f"r0002-{sha256[:12]}").exists()


async def test_a_copy_that_was_cut_off_is_made_again(published: Published) -> None:
    published.folder.mkdir()
    sha256 = tree_sha256(published.folder.parent / "r0001")
    left = published.folder / f".r0001-{sha256[:12]}.new"
    left.mkdir()
    (left / FILES[0]).write_bytes(b"{")
    await published.deployer.deploy("r0001", "test")
    place = published.folder / published.current["agent"]["path"]
    assert (place / FILES[0]).read_bytes() != b"{"
    assert not left.exists()
    shutil.rmtree(place)
    await published.deployer.reconcile()
    assert place.is_dir(), "a folder that was removed is written again"


async def test_the_card_is_in_the_hubs_form(published: Published, tmp_path: Path, store: Store) -> None:
    seen = comparison(0.2)
    about: Any = {"gate": GUARDED, "parent": "r0001"}
    about["stages"] = [StageResult(stage=name, outcome="trained") for name in ("sft 1", "sft 2", "grpo")]
    await store.write(put_tested_round, 3, RoundState.PROMOTED, tmp_path, seen, **about)
    card = await store.read(model_card, "agent", "r0003")
    _, front, text = card.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["base_model"] == "a/base"
    assert about["library_name"] == "peft"
    assert about["tags"] == ["lora", "agentscope-flywheel", "sft", "grpo"]
    for shown in (
        "# agent, adapter r0003", "## Data", "0 samples", "trained on from r0001", "## Gate", "gain +0.200",
        "+0.100 to +0.300", "20 held-out tasks", "criterion safe", "## Files", "0" * 64, "## Limits",
    ):  # fmt: skip
        assert shown in text
    local = await store.read(model_card, "agent", "r0001")
    assert "It was not compared" in local


def started(config: Config, app: FakeVllm) -> Any:
    """The middleware of a server that starts with the settings, and has loaded what its command says."""
    adopt(config)
    arguments, environment = command(config)
    if "--lora-modules" in arguments:
        modules = arguments[arguments.index("--lora-modules") + 1 :]
        for module in (json.loads(each) for each in modules if each.startswith("{")):
            app.loaded[module["name"]] = module["path"]
    return with_middleware(app, **{name: value for name, value in environment.items() if name.startswith("FLYWHEEL")})


@pytest.mark.slow
@pytest.mark.training
async def test_a_pod_starts_with_what_is_published_and_without_the_daemon(published: Published) -> None:
    """It is ready, and the daemon's reconciliation confirms, and later corrects, what it serves."""
    await published.deployer.deploy("r0001", "test")
    pod, app = published.pod(), FakeVllm({BASE: PROBE.second.base})
    sha256 = published.current["agent"]["sha256"]
    app.weights = {str(sent_adapters(pod) / sha256): PROBE.second.adapter} | published.app.weights
    with running(started(pod, app)) as url:
        ready = httpx2.get(f"{url}/flywheel/ready")
        assert (ready.status_code, ready.json()["aliases"]) == (200, {"restored": 1})
        both = with_settings(published.config, serving={"urls": [*published.config.serving.urls, url]})
        report = await Deployer(published.store, both).reconcile()
        assert not report.errors
        assert not report.changed, "it is what was deployed"
        assert report.replicas[1].probe is not None, "and proven"
        await Deployer(published.store, both).deploy("r0002", "test")
        assert [each.serves for each in (await Deployer(published.store, both).reconcile()).replicas] == [R2, R2]


@pytest.mark.training
async def test_what_cannot_be_adopted_waits(published: Published, caplog: pytest.LogCaptureFixture) -> None:
    pod = published.pod()
    adopt(pod)
    assert not alias_file(pod).exists(), "nothing is published yet"
    await published.deployer.deploy("r0001", "test")
    place = published.folder / published.current["agent"]["path"]
    weights = (place / FILES[1]).read_bytes()
    (place / FILES[1]).write_bytes(weights + b"!")
    adopt(pod)
    assert "are not those that were evaluated" in caplog.text
    assert not alias_file(pod).exists()
    assert list(sent_adapters(pod).iterdir()) == []
    (place / FILES[1]).write_bytes(weights)
    (published.folder / "current.json").write_bytes(b"{")
    adopt(pod)
    assert "cannot be read" in caplog.text
    assert not alias_file(pod).exists()


async def test_an_ab_test_is_published_with_both_versions(published: Published) -> None:
    await published.deployer.deploy("r0001", "test")
    await published.deployer.deploy("r0002", "test", ABTestRequest(0.5, "salt"))
    entry = published.current["agent"]
    assert (entry["target"], entry["ab_test"]["target"], entry["ab_test"]["share"]) == (R2, R1, 0.5)
    for each in (entry, entry["ab_test"]):
        assert (published.folder / each["path"] / "README.md").is_file()
    pod = published.pod()
    adopt(pod)
    adopted = read_aliases(alias_file(pod))[0]["agent"]
    assert [each.name for each in adopted.versions] == [R2, R1]
    for version in adopted.versions:
        assert version.path == str(sent_adapters(pod) / (version.sha256 or ""))
        assert tree_sha256(Path(version.path)) == version.sha256
    await published.deployer.end_ab_test("test")
    await published.deployer.reconcile()
    assert "ab_test" not in published.current["agent"]


async def test_a_servers_own_record_is_not_replaced(published: Published, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await published.deployer.deploy("r0001", "test")
    pod = published.pod()
    adopt(pod, {"agent": R2})
    assert not alias_file(pod).exists(), "its state knows another deployment"
    adopt(pod)
    assert "agent starts with agent@r0001" in caplog.text
    before = alias_file(pod).read_bytes()
    await published.deployer.deploy("r0002", "test")
    adopt(pod)
    assert alias_file(pod).read_bytes() == before
