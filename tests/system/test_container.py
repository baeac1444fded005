"""Containers, in which no process outlives the first one, are told from machines and from system containers; and what
systemd ends with a service."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.system.process import in_container, kill_mode


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def machine(root: Path, first: str, **files: str) -> Path:
    (root / "proc/1").mkdir(parents=True)
    (root / "proc/1/comm").write_text(f"{first}\n")
    for name, text in files.items():
        path = root / {"environ": "proc/1/environ", "docker": ".dockerenv", "podman": "run/.containerenv"}[name]
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "files",
    [{"docker": ""}, {"podman": ""}, {"environ": "PATH=/bin\0container=oci\0"}],
    ids=lambda files: next(iter(files)),
)
def test_a_container(tmp_path: Path, files: dict[str, str]) -> None:
    assert in_container(machine(tmp_path, "flywheel", **files))


def test_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert in_container(machine(tmp_path, "flywheel"))


def test_a_machine_and_a_system_container(tmp_path: Path) -> None:
    assert not in_container(machine(tmp_path / "machine", "systemd"))
    assert not in_container(machine(tmp_path / "other", "init", environ="PATH=/bin\0no_container=x\0"))
    assert not in_container(machine(tmp_path / "lxc", "systemd", environ="container=lxc\0"))
    assert not in_container(tmp_path / "nothing to read")


def test_systemd_says_what_it_ends_with_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup, program = tmp_path / "cgroup", tmp_path / "systemctl"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cgroup.write_text("0::/system.slice/flywheel.service\n")
    program.write_text('#!/bin/sh\necho "$@" >>"$0.log"\necho mixed\n')
    program.chmod(0o700)
    assert kill_mode(cgroup) == "mixed"
    cgroup.write_text("0::/user.slice/user-7.slice/user@7.service/app.slice/flywheel@two.service\n")
    assert kill_mode(cgroup) == "mixed"
    asked = Path(f"{program}.log").read_text().splitlines()
    said = "--property=KillMode --value"
    assert asked == [f"show flywheel.service {said}", f"--user show flywheel@two.service {said}"]
    program.write_text("#!/bin/sh\nexit 1\n")
    assert kill_mode(cgroup) == ""
    cgroup.write_text("0::/user.slice/user-7.slice/session-1.scope\n")
    assert kill_mode(cgroup) == kill_mode(tmp_path / "nothing to read") == ""
