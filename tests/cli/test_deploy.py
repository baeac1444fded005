"""`flywheel deploy` and `rollback` at a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from flywheel.store.database import Store
from tests.cli.conftest import Run
from tests.daemon.test_deployer import PROBE, put_adapter
from tests.serving.fake_vllm import BASE, FakeVllm, replica


@pytest.fixture
def server() -> Iterator[tuple[FakeVllm, str]]:
    app = FakeVllm({BASE: PROBE.base_logprobs})
    with replica(app) as url:
        yield app, url


@pytest.fixture
def config(tmp_path: Path, server: tuple[FakeVllm, str]) -> Path:
    path = tmp_path / "flywheel.yaml"
    path.write_text(
        f"sources: []\nstate: {{dir: state}}\nmodel: {{base: {BASE}, alias: agent}}\n"
        f"serving: {{urls: ['{server[1]}'], drain_seconds: 0}}\n"
    )
    return path


@pytest.fixture
def two_adapters(tmp_path: Path, server: tuple[FakeVllm, str]) -> None:
    async def fill() -> None:
        store = await Store.open(tmp_path / "state")
        for number in (1, 2):
            path = tmp_path / f"r{number:04d}"
            path.mkdir()
            (path / "weights").write_text(str(number))
            server[0].weights[str(path)] = PROBE.adapter_logprobs
            await store.write(put_adapter, number, path)
        await store.close()

    asyncio.run(fill())


@pytest.mark.parametrize(
    "command", [("deploy", "r0001"), ("deploy", "base"), ("rollback",), ("rollback", "--to", "r1")]
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_state_that_is_not_there_is_not_made(
    flywheel: Run, config: Path, tmp_path: Path, command: tuple[str, ...], as_json: bool
) -> None:
    ran = flywheel(*command, "-c", config, *(["--json"] if as_json else []))
    assert ran.code == 1
    assert f"there is no state at {tmp_path / 'state' / 'state.db'}" in ran.err
    assert "state.dir" in ran.err
    assert not (tmp_path / "state").exists()


@pytest.mark.usefixtures("two_adapters")
def test_deploying_and_going_back(flywheel: Run, config: Path) -> None:
    assert flywheel("deploy", "r0001", "-c", config).out == "agent is now answered by r0001\n"
    assert flywheel("deploy", "agent@r0002", "-c", config, "--json").json["adapter"] == "r0002"
    assert flywheel("rollback", "-c", config).out == "agent is now answered by r0001\n"
    assert flywheel("rollback", "--to", "r0002", "-c", config, "--json").json["adapter"] == "r0002"
    assert flywheel("rollback", "--to", "base", "-c", config).out == "agent is now answered by the base model\n"


@pytest.mark.usefixtures("two_adapters")
@pytest.mark.parametrize("name", ["", "agent@", "other@r0001", "r0009", "../r0001", "r0001\x1b[2J", "r0001 "])
def test_a_name_that_no_adapter_has_moves_nothing(flywheel: Run, config: Path, name: str) -> None:
    """An empty one above all, which a script's unset variable leaves."""
    flywheel("deploy", "r0001", "-c", config)
    flywheel("deploy", "r0002", "-c", config)
    for command in (("deploy", name), ("rollback", "--to", name)):
        ran = flywheel(*command, "-c", config)
        assert ran.code == 1
        assert ran.out == ""
        assert any(why in ran.err for why in ("no such adapter", "no adapter is named", "no version of agent"))
        assert "\x1b" not in ran.err
    assert flywheel("status", "-c", config, "--json").json["deployment"]["adapter"] == "r0002"
