"""Files of old rounds go, and what anything needs stays: whatever serves, fails, or is killed meanwhile."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from flywheel.config.file import Config
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.rounds import retention
from flywheel.daemon.rounds.removal import STAYS
from flywheel.daemon.rounds.retention import Pruned, remove_old, remove_regularly
from flywheel.errors import LockedError, ServeError, StoreError
from flywheel.records.states import RoundState
from flywheel.store import deployments, rounds
from flywheel.store import rounds as records
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import utcnow
from flywheel.store.views import balance, lineage
from flywheel.system.lock import instance_lock
from tests.factories.config import make_config, with_settings
from tests.factories.old_round import LONG_AGO, lay_out, put
from tests.factories.round import put_round
from tests.serving.fake_vllm import BASE, FakeVllm, running, with_middleware


@dataclass
class Old:
    """A state with five rounds of long ago: r0001 to r0004 have adapters, r0005 has failed without one."""

    store: Store
    config: Config
    server: FakeVllm

    async def put(self, number: int, *, adapter: bool = True, finished_at: str = LONG_AGO) -> None:
        directory = self.directory(f"r{number:04d}")
        lay_out(directory, self.server, adapter=adapter)
        await self.store.write(put, directory, number, adapter=adapter, finished_at=finished_at)

    @property
    def deployer(self) -> Deployer:
        return Deployer(self.store, self.config)

    def with_retention(self, **values: Any) -> Config:
        return with_settings(self.config, retention=values)

    def directory(self, name: str) -> Path:
        return self.config.state_dir / "rounds" / name

    def whole(self) -> list[str]:
        """The rounds whose files are all there."""
        return [path.name for path in sorted(self.directory("").iterdir()) if (path / "worker.log").exists()]

    async def served(self, *names: str) -> None:
        for name in names:
            await self.deployer.deploy(name, "test")
        await self.deployer.reconcile()  # which takes what is long out of use from the servers

    async def remove(self, *, dry_run: bool = False, **values: Any) -> Pruned:
        config = self.with_retention(**{"keep_served": 0, **values})
        return await remove_old(self.store, config, 90, "test", dry_run=dry_run)

    async def remove_regularly(self, **values: Any) -> None:
        await remove_regularly(self.store, self.with_retention(**values))


@pytest.fixture
async def state(tmp_path: Path, store: Store, server: tuple[FakeVllm, str]) -> Old:
    app, url = server
    serving = {"urls": [url], "drain_seconds": 0}
    old = Old(store, make_config(tmp_path, model={"base": BASE, "alias": "agent"}, serving=serving), app)
    for number in range(1, 6):
        await old.put(number, adapter=number < 5)
    return old


async def history(store: Store, number: int) -> list[str]:
    events = schema.events
    where = (events.c.kind == "rounds", events.c.subject == str(number))
    query = select(events.c.new).where(*where).order_by(events.c.id)
    return list(await store.read(lambda conn: conn.execute(query).scalars().all()))


async def adapter_state(store: Store, name: str) -> str:
    row = await store.read(rounds.adapter, name)
    return str(row.state)


async def test_what_a_round_was_told_and_measured_stays_and_the_rest_goes(state: Old) -> None:
    done = await state.remove()
    assert [each.round for each in done.removed] == ["r0001", "r0002", "r0003", "r0004", "r0005"]
    assert done.bytes == 5 * 200 + 4 * len("r0001")
    for number in range(1, 6):
        assert {path.name for path in state.directory(f"r{number:04d}").iterdir()} == STAYS
        assert await history(state.store, number) == ["removing files", "files removed"]
    spec = json.loads((state.directory("r0001") / "spec.json").read_text())
    without = {"train": [], "held_out": [], "suites": [], "pool": None}
    assert spec == {"round_id": "r0001", **without}, "the state has the tasks"
    assert await adapter_state(state.store, "r0001") == "removed"
    story = await state.store.read(lineage.why, "r0001")
    assert story["adapter"]["state"] == "removed"
    assert (await state.store.read(balance.balance)).balanced
    assert (await state.remove()).removed == []


async def test_what_serves_and_what_it_can_be_rolled_back_to_stay(state: Old) -> None:
    await state.served("r0001", "r0002", "r0003")
    done = await state.remove()
    assert state.whole() == ["r0002", "r0003"]
    assert {each.round: each.why for each in done.kept} == {
        "r0002": "agent can be rolled back to it",
        "r0003": "it serves as agent",
    }
    target, _ = await state.deployer.rollback()
    assert target == "r0002"


async def test_what_served_last_stays_besides(state: Old) -> None:
    await state.served("r0001", "r0002", "r0003", "r0004")
    done = await state.remove(keep_served=3)
    assert state.whole() == ["r0002", "r0003", "r0004"]
    assert done.kept[0].why == "one of the last 3 that served"
    target, _ = await state.deployer.rollback("r0002")
    assert target == "r0002"


async def test_what_served_under_another_alias_stays(state: Old) -> None:
    await state.served("r0001")
    await remove_old(state.store, with_settings(state.config, model={"alias": "other"}), 90, "test")
    assert state.whole() == ["r0001"]


async def test_a_round_under_way_and_what_it_goes_on_from_stay(state: Old) -> None:
    directory = state.directory("r0006")
    lay_out(directory, state.server, adapter=True)
    await state.store.write(put_round, 6, RoundState.TRAINING, directory, parent="r0002")
    done = await state.remove()
    assert state.whole() == ["r0002", "r0006"]
    assert [each.why for each in done.kept] == ["r0006 goes on from it"]


async def test_what_is_not_old_enough_stays(state: Old) -> None:
    await state.put(6, finished_at=utcnow())
    await state.remove()
    assert state.whole() == ["r0006"]


async def test_what_a_server_still_lists_stays(state: Old) -> None:
    for name in ("r0001", "r0002", "r0003"):
        await state.deployer.deploy(name, "test")
    state.server.loaded["agent@r0001"] = str(state.directory("r0001") / "adapter")
    done = await state.remove()
    assert state.whole() == ["r0001", "r0002", "r0003"]
    assert done.kept[0].why == f"{state.config.serving.urls[0]} still lists it"


async def test_servers_are_asked_with_the_admin_key(state: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("r0001", "r0002", "r0003"):
        await state.deployer.deploy(name, "test")
    state.server.loaded["agent@r0001"] = str(state.directory("r0001") / "adapter")
    monkeypatch.setenv("AGENTS", "agents")
    monkeypatch.setenv("ADMIN", "admin")
    with running(with_middleware(state.server, FLYWHEEL_API_KEY="agents", FLYWHEEL_ADMIN_KEY="admin")) as url:
        found = {}
        for name in (None, "ADMIN"):
            keys = {"urls": [url], "api_key_env": "AGENTS", "admin_key_env": name}
            keyed = replace(state, config=with_settings(state.config, serving=keys))
            found[name] = (await keyed.remove(dry_run=True)).kept[0].why
    assert "refuses the key" in found[None]
    assert found["ADMIN"] == f"{url} still lists it"


async def test_of_what_was_deployed_nothing_goes_while_a_server_cannot_be_asked(state: Old) -> None:
    await state.served("r0001", "r0002", "r0003")
    state.server.faults["/v1/models"] = (503, "starting")
    done = await state.remove()
    assert state.whole() == ["r0001", "r0002", "r0003"], "r0004 and r0005 were never on a server"
    assert "does not say whether it still lists it" in done.kept[0].why


async def test_a_look_removes_nothing_and_says_what_would_go(state: Old) -> None:
    await state.served("r0004")
    look = await state.remove(dry_run=True)
    assert [each.round for each in look.removed] == ["r0001", "r0002", "r0003", "r0005"]
    assert len(state.whole()) == 5
    assert await history(state.store, 1) == []
    assert look.bytes == (await state.remove()).bytes


async def test_a_removed_adapter_is_not_deployed_and_its_files_can_be_put_back(state: Old, tmp_path: Path) -> None:
    shutil.copytree(state.directory("r0001") / "adapter", tmp_path / "backup")
    await state.remove()
    with pytest.raises(ServeError, match=r"were removed.*Restore them from a backup"):
        await state.deployer.deploy("r0001", "by hand")
    assert await adapter_state(state.store, "r0001") == "removed"
    shutil.copytree(tmp_path / "backup", state.directory("r0001") / "adapter")
    assert (await state.remove()).removed == [], "what was put back is not taken away again"
    await state.deployer.deploy("r0001", "by hand")
    assert await adapter_state(state.store, "r0001") == "ready"
    assert (await state.remove()).removed == []
    await state.served("r0001")
    assert (state.directory("r0001") / "adapter" / "weights").exists()


async def test_a_removal_that_was_killed_is_finished(state: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def dies(directory: Path) -> int:
        (directory / ".adapter.removed" / "weights").unlink()
        raise Killed

    monkeypatch.setattr(retention, "remove_leftovers", dies)
    with pytest.raises(Killed):
        await state.remove()
    monkeypatch.undo()
    assert await adapter_state(state.store, "r0001") == "removed", "half an adapter is none"
    assert await history(state.store, 1) == ["removing files"]
    done = await state.remove()
    assert len(done.removed) == 5
    assert await history(state.store, 1) == ["removing files", "files removed"]
    assert state.whole() == []


async def test_an_adapter_that_was_put_back_after_a_kill_is_not_taken_away(state: Old) -> None:
    await state.store.write(records.begin, ["r0001"], 90, 0, "test")
    await state.deployer.deploy("r0001", "by hand")
    await state.remove()
    assert state.whole() == ["r0001"]
    assert (await state.store.read(deployments.active, "agent")).adapter == "r0001"  # type: ignore[union-attr]


async def test_what_a_link_leads_to_is_somebody_elses(state: Old, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(state.directory("r0001") / "adapter", elsewhere)
    (state.directory("r0001") / "adapter").symlink_to(elsewhere)
    await state.remove()
    assert not (state.directory("r0001") / "adapter").is_symlink()
    assert (elsewhere / "weights").read_text() == "r0001"


async def test_files_that_cannot_be_removed_are_tried_again(state: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def refuse(path: Path) -> None:
        if "r0002" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(StoreError, match=r"remove old files from .*r0002: .*Permission denied"):
        await state.remove()
    monkeypatch.undo()
    assert [each.round for each in (await state.remove()).removed] == ["r0002"], "it has held up no other"
    assert state.whole() == []


async def test_a_slow_disk_holds_up_no_swap(state: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is removed is out of the way of swaps before they may go on, and they need not wait until it is gone."""
    seen: list[bool] = []

    def look(directory: Path) -> int:
        with instance_lock(state.config.state_dir, "swap.lock"):
            seen.append((directory / "adapter").exists())
        return 0

    monkeypatch.setattr(retention, "remove_leftovers", look)
    await state.remove()
    assert seen == [False] * 5


async def test_nothing_goes_while_the_alias_is_moved(state: Old) -> None:
    with instance_lock(state.config.state_dir, "swap.lock"):
        with pytest.raises(LockedError):
            await state.remove()
        await state.remove_regularly(keep_served=0)
    assert len(state.whole()) == 5


async def test_the_daemon_removes_by_its_settings(state: Old) -> None:
    await state.remove_regularly(keep_days=None)
    await state.remove_regularly(keep_days=500)
    assert len(state.whole()) == 5
    await state.remove_regularly()
    assert state.whole() == []


@pytest.mark.parametrize("text", ["", "[]", "{half"])
async def test_a_specification_that_is_none_holds_nothing_up(state: Old, text: str) -> None:
    (state.directory("r0001") / "spec.json").write_text(text)
    (state.directory("r0002") / "spec.json").unlink()
    assert len((await state.remove()).removed) == 5
    assert (state.directory("r0001") / "spec.json").read_text() == text
