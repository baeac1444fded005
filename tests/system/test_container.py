"""Containers, in which no process outlives the first one, are told from machines and from system containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.system.process import in_container


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
