"""The command line and environment of the server, and what is refused before it starts."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.ports import held_port
from flywheel.config.file import Config, parse
from flywheel.config.privacy import ExcludeSettings, PrivacySettings
from flywheel.errors import ConfigError, ServeError
from flywheel.serving.server import vllm_command
from flywheel.serving.server.vllm_command import alias_file
from flywheel.system import own_package
from flywheel.system.files import tree_sha256
from tests.factories.adapter import put_adapter_files
from tests.serving.fake_vllm import settings_in


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    base = tmp_path / "tiny"
    base.mkdir()
    (base / "config.json").write_text("{}")

    def config(base: str = str(base), alias: str = "agent", **serving: Any) -> Config:
        raw = {"state": {"dir": "state"}, "model": {"base": base, "alias": alias}, "serving": serving}
        return parse(raw, "test", tmp_path)

    return config


def after(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


@pytest.mark.training
def test_the_command(make: Callable[..., Config]) -> None:
    config = make(port=8123, max_loras=3, max_lora_rank=32, max_model_len=777, extra_args=["--enforce-eager"])
    arguments, environment = vllm_command.command(config)
    assert after(arguments, "--served-model-name") == "tiny"
    assert after(arguments, "--model") == config.model.base
    assert after(arguments, "--port") == "8123"
    assert after(arguments, "--host") == "127.0.0.1"
    # The CPU build, which the tests run on, wants one slot that stays empty.
    assert after(arguments, "--max-loras") == "4"
    assert int(after(arguments, "--max-cpu-loras")) >= 3
    assert after(arguments, "--max-lora-rank") == "32"
    assert after(arguments, "--max-model-len") == "777"
    assert after(arguments, "--middleware") == "flywheel.serving.server.middleware.AliasMiddleware"
    assert "--enable-lora" in arguments
    assert "--lora-modules" not in arguments
    assert arguments[-1] == "--enforce-eager"
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert environment["VLLM_NO_USAGE_STATS"] == environment["DO_NOT_TRACK"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["FLYWHEEL_ALIAS"] == "agent"
    assert environment["FLYWHEEL_BASE_MODEL"] == "tiny"
    assert environment["FLYWHEEL_ALIAS_FILE"] == str(alias_file(config))
    assert settings_in(environment)["max_body_bytes"] == 32000000


def test_a_hub_name_keeps_the_hub(make: Callable[..., Config]) -> None:
    arguments, environment = vllm_command.command(make(base="Qwen/Qwen3-4B"))
    assert after(arguments, "--served-model-name") == "Qwen/Qwen3-4B"
    assert "HF_HUB_OFFLINE" not in environment


def test_the_key_is_handed_over_by_environment_only(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    monkeypatch.setenv("ADMIN", "admin-s3cret")
    arguments, environment = vllm_command.command(make(host="0.0.0.0", api_key_env="MY_KEY", admin_key_env="ADMIN"))
    assert environment["FLYWHEEL_API_KEY"] == "s3cret"
    assert environment["FLYWHEEL_ADMIN_KEY"] == "admin-s3cret"
    internal = environment["VLLM_API_KEY"]
    assert len(internal) >= 32
    assert "--api-key" not in arguments
    assert not any(secret in " ".join(arguments) for secret in ("s3cret", internal))
    assert vllm_command.command(make())[1]["VLLM_API_KEY"] != internal


def test_who_has_vllm_ask_for_a_key_means_the_agents(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert vllm_command.command(make())[1]["FLYWHEEL_API_KEY"] == ""
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    environment = vllm_command.command(make())[1]
    assert environment["FLYWHEEL_API_KEY"] == "s3cret"
    assert environment["VLLM_API_KEY"] != "s3cret"


def test_the_agents_key_cannot_be_the_admin_key(make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "s3cret")
    monkeypatch.setenv("TWO", "s3cret")
    with pytest.raises(ServeError, match="every agent could load adapters") as refused:
        vllm_command.command(make(api_key_env="ONE", admin_key_env="TWO"))
    assert "s3cret" not in str(refused.value)


def test_an_admin_key_is_made_once_and_for_its_owner_alone(make: Callable[..., Config]) -> None:
    config = make()
    file = config.state_dir / "serving" / "admin.key"
    before = os.umask(0)
    try:
        vllm_command.prepare(config)
    finally:
        os.umask(before)
    key = file.read_text()
    assert len(key) > 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.chmod(0o644)
    vllm_command.prepare(config)
    assert file.read_text() == key
    assert file.stat().st_mode & 0o777 == 0o600
    assert vllm_command.command(config)[1]["FLYWHEEL_ADMIN_KEY_FILE"] == str(file)
    assert [path.name for path in file.parent.iterdir()] == ["admin.key"]


def test_an_admin_key_of_ones_own(make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN", "admin-s3cret")
    config = make(admin_key_env="ADMIN")
    vllm_command.prepare(config)
    assert list((config.state_dir / "serving").iterdir()) == []
    assert "FLYWHEEL_ADMIN_KEY_FILE" not in vllm_command.command(config)[1]


def test_hosts_are_looked_at_on_loopback_alone(make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    def hosts(**serving: Any) -> Any:
        return settings_in(vllm_command.command(make(**serving))[1])["allowed_hosts"]

    assert set(hosts()) == {"localhost", "127.0.0.1", "::1"}
    assert set(hosts(host="127.0.0.2", allowed_hosts=["Agents.Internal", "[::2]"])) == {
        "localhost", "127.0.0.1", "::1", "127.0.0.2", "agents.internal", "::2",
    }  # fmt: skip
    monkeypatch.setenv("MY_KEY", "s3cret")
    assert hosts(host="0.0.0.0", api_key_env="MY_KEY") is None


@pytest.mark.parametrize("name", ["http://agents", "agents:8000", "*", "", "a b"])
def test_what_is_no_host_name(make: Callable[..., Config], name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        make(allowed_hosts=[name])


def test_what_the_middleware_is_told(make: Callable[..., Config]) -> None:
    environment = vllm_command.command(make(max_body_mb=1.5, open_metrics=True, port=8123))[1]
    assert settings_in(environment)["max_body_bytes"] == 1500000
    assert settings_in(environment)["open_metrics"]
    assert settings_in(environment)["address"] == "http://127.0.0.1:8123"
    encrypted = make(extra_args=["--ssl_certfile=/etc/cert.pem", "--ssl-keyfile", "/etc/key.pem"])
    assert settings_in(vllm_command.command(encrypted)[1])["address"] == "https://127.0.0.1:8000"
    assert not settings_in(vllm_command.command(make())[1])["open_metrics"]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "inference.local"])
def test_no_open_server_without_a_key(make: Callable[..., Config], host: str) -> None:
    with pytest.raises(ServeError, match="no key is set") as refused:
        vllm_command.command(make(host=host))
    assert "serving.api_key_env" in refused.value.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_key(make: Callable[..., Config], host: str) -> None:
    vllm_command.command(make(host=host))


def test_a_key_that_is_not_there(make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ServeError, match="MY_KEY, which is not set"):
        vllm_command.command(make(api_key_env="MY_KEY"))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--api-key", "x"], "serving.api_key_env"),
        (["--port=9"], "serving.port"),
        (["--data-parallel-size", "2"], "one server per replica"),
        (["--api-server-count=2"], "one server per replica"),
        (["--api_key", "x"], "serving.api_key_env"),
        (["--tool-call-parser", "hermes"], "serving.tool_call_parser"),
        (["--reasoning-parser=qwen3"], "serving.reasoning_parser"),
        (["--api-k", "x"], "serving.api_key_env"),
        (["--por=9"], "serving.port"),
        (["--max_loras", "1"], "serving.max_loras"),
        (["--data_parallel_size=2"], "one server per replica"),
        (["-dp=2"], "one server per replica"),
        (["--lora-modules", "a=b"], "Leave it out"),
        (["--no_enable_lora"], "Leave it out"),
        (["--uds", "/run/vllm"], "Leave it out"),
    ],
)
def test_arguments_that_would_break_the_promises(
    make: Callable[..., Config], arguments: list[str], hint: str
) -> None:
    with pytest.raises(ServeError) as refused:
        vllm_command.command(make(extra_args=arguments))
    assert hint in refused.value.hint


@pytest.mark.parametrize("argument", ["--model-impl", "--max-num-seqs", "--dtype=float32", "--middleware", "-O3"])
def test_other_arguments_are_passed_on(make: Callable[..., Config], argument: str) -> None:
    assert vllm_command.command(make(extra_args=[argument]))[0][-1] == argument


def test_parsers_by_family_and_by_setting(make: Callable[..., Config], tmp_path: Path) -> None:
    assert "--enable-auto-tool-choice" not in vllm_command.command(make())[0], "nothing is known of this model"
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "qwen3"}')
    arguments, _ = vllm_command.command(make())
    assert "--enable-auto-tool-choice" in arguments
    assert after(arguments, "--tool-call-parser") == "hermes"
    assert after(arguments, "--reasoning-parser") == "qwen3"
    arguments, _ = vllm_command.command(make(tool_call_parser="pythonic", reasoning_parser="none"))
    assert after(arguments, "--tool-call-parser") == "pythonic"
    assert "--reasoning-parser" not in arguments
    arguments, _ = vllm_command.command(make(tool_call_parser="none"))
    assert "--enable-auto-tool-choice" not in arguments


@pytest.mark.training
def test_a_model_whose_tool_calls_nobody_can_read_is_named(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free_port: int
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: None)
    vllm_command.serve(make(port=free_port))
    assert "serving.tool_call_parser" in caplog.text
    caplog.clear()
    vllm_command.serve(make(port=free_port, tool_call_parser="hermes"))
    assert "parser" not in caplog.text


@pytest.mark.training
def test_the_call_log_is_announced_with_its_place(
    make: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    free_port: int,
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, _arguments, environment: started.append(environment))
    with caplog.at_level("INFO", logger="flywheel"):
        vllm_command.serve(make(port=free_port, call_log={"keep_days": 3}))
    path = tmp_path / "state" / "serving" / f"calls-{free_port}.db"
    assert f"requests to agent and their responses are recorded in {path}: for 3 days, up to 5 GB" in caplog.text
    assert settings_in(started[-1])["call_log"] == {"path": str(path), "keep_days": 3, "max_bytes": 5 * 10**9}
    caplog.clear()
    with caplog.at_level("INFO", logger="flywheel"):
        vllm_command.serve(make(port=free_port, call_log=False))
    assert "recorded" not in caplog.text
    assert settings_in(started[-1])["call_log"] is None


@pytest.mark.training
def test_the_server_knows_of_whom_nothing_is_recorded(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, _arguments, environment: started.append(environment))
    vllm_command.serve(make(port=free_port))
    assert settings_in(started[-1])["not_recorded"] == {"users": [], "conversations": []}
    names = ExcludeSettings(users=["ana"], conversations=["c-1"], agents=["A"])
    privacy = {"privacy": PrivacySettings(exclude=names)}
    vllm_command.serve(make(port=free_port).model_copy(update=privacy))
    assert settings_in(started[-1])["not_recorded"] == {"users": ["ana"], "conversations": ["c-1"]}


def save(config: Config, entries: Any) -> None:
    file = alias_file(config)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(entries))


def test_no_more_is_loaded_again_than_there_are_slots_for(
    make: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Aliases that the configuration names come before those of earlier ones."""
    config = make(max_loras=2)
    path = str(put_adapter_files(tmp_path / "r0007"))
    save(config, {alias: {"target": f"{alias}@r0007", "path": path} for alias in ("former", "older", "agent")})
    _, environment = vllm_command.command(config)
    assert settings_in(environment)["loaded"] == ["agent@r0007", "former@r0007"]
    assert settings_in(environment)["max_adapters"] == 2
    assert environment["FLYWHEEL_CPU_LORA"] == "1"
    assert "older@r0007 cannot be served again: all 2 slots for adapters are taken" in caplog.text


def test_what_was_deployed_is_loaded_again(make: Callable[..., Config], tmp_path: Path) -> None:
    config = make()
    path = str(put_adapter_files(tmp_path / "a,=b" / "r0007"))
    save(config, {"agent": {"target": "agent@r0007", "path": path}, "spare": {"target": "tiny", "path": None}})
    arguments, environment = vllm_command.command(config)
    assert json.loads(after(arguments, "--lora-modules")) == {"name": "agent@r0007", "path": path}
    assert settings_in(environment)["loaded"] == ["agent@r0007"]


def test_both_versions_of_an_ab_test_are_loaded_again_or_the_one_that_is_whole(
    make: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make(max_loras=2)
    folders = [put_adapter_files(tmp_path / name) for name in ("r0008", "r0007")]
    new, old = ({"target": f"agent@{each.name}", "path": str(each)} for each in folders)
    save(config, {"agent": {**new, "ab_test": {**old, "share": 0.5, "salt": "s"}}})

    def loaded() -> tuple[Any, Any]:
        _, environment = vllm_command.command(config)
        return tuple(settings_in(environment)[name] for name in ("loaded", "waiting"))

    assert loaded() == (["agent@r0008", "agent@r0007"], {})
    assert caplog.text == ""
    (folders[0] / "adapter_config.json").unlink()
    assert loaded() == (["agent@r0007"], {})
    assert "agent: only the other version of the A/B test answers: agent@r0008 cannot be served again" in caplog.text
    (folders[1] / "adapter_config.json").unlink()
    adapters, waiting = loaded()
    assert (adapters, list(waiting)) == ([], ["agent"])
    assert waiting["agent"].count("cannot be served again") == 2


@pytest.mark.training
def test_one_server_has_the_aliases_of_all_targets(make: Callable[..., Config], tmp_path: Path) -> None:
    config = make()
    raw = config.model_dump(mode="json", exclude={"model": {"alias"}}) | {
        "targets": {"planner": {"alias": "plan"}, "doer": {}}
    }
    config = parse(raw, "test", tmp_path)
    paths = {name: str(put_adapter_files(tmp_path / name)) for name in ("r0007", "r0008")}
    save(config, {a: {"target": f"{a}@{n}", "path": paths[n]} for a, n in (("plan", "r0007"), ("doer", "r0008"))})
    arguments, environment = vllm_command.command(config)
    assert environment["FLYWHEEL_ALIAS"].splitlines() == ["plan", "doer"]
    assert after(arguments, "--max-loras") == str(2 * config.serving.max_loras + 1)
    assert settings_in(environment)["loaded"] == ["plan@r0007", "doer@r0008"]
    loaded = arguments[arguments.index("--lora-modules") + 1 :][:2]
    assert [json.loads(each)["path"] for each in loaded] == list(paths.values())


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "No such file"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "No such file"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b""), "no readable adapter"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 100), "no readable adapter"),
        (lambda folder: os.truncate(folder / "adapter_model.safetensors", 60), "adapter"),
        (lambda folder: os.truncate(folder / "adapter_model.safetensors", 100), "cut short"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "no readable adapter"),
        (lambda folder: (folder / "adapter_model.bin").touch(), "adapter_model.bin can hold code"),
        (lambda folder: (folder / "optimizer.PT").touch(), "only safetensors"),
        (lambda folder: (folder / "adapter_config.json").write_text('{"r": 128}'), "128 > serving.max_lora_rank 64"),
    ],
)
def test_a_damaged_adapter_is_left_out_loudly(
    make: Callable[..., Config],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
    why: str,
) -> None:
    config = make()
    folder = put_adapter_files(tmp_path / "r0007")
    damage(folder)
    save(config, {"agent": {"target": "agent@r0007", "path": str(folder)}})
    arguments, environment = vllm_command.command(config)
    assert "--lora-modules" not in arguments
    assert settings_in(environment)["loaded"] == []
    (waits,) = settings_in(environment)["waiting"].items()
    assert waits[0] == "agent"
    assert "agent@r0007 cannot be served again" in waits[1]
    assert why in waits[1]
    assert f"agent is not answered until the daemon or `flywheel deploy` sets its target: {waits[1]}" in caplog.text


def test_an_adapter_of_another_base_model_is_left_out_until_it_is_proven(
    make: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make()
    folder = put_adapter_files(tmp_path / "r0007")
    (tmp_path / "link").symlink_to(config.model.base)
    save(config, {"agent": {"target": "agent@r0007", "path": str(folder)}})
    for base, fits in ((config.model.base, True), (str(tmp_path / "link"), True), ("Qwen/Qwen3-4B", False)):
        told = {"r": 8, "base_model_name_or_path": base}
        (folder / "adapter_config.json").write_text(json.dumps(told))
        arguments, _ = vllm_command.command(config)
        assert ("--lora-modules" in arguments) is fits
    assert f"it was trained on Qwen/Qwen3-4B, and model.base is {config.model.base}" in caplog.text


def test_files_that_were_changed_since_they_were_proven_are_left_out_loudly(
    make: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make()
    folder = put_adapter_files(tmp_path / "r0007")
    save(config, {"agent": {"target": "agent@r0007", "path": str(folder), "sha256": tree_sha256(folder)}})
    assert "--lora-modules" in vllm_command.command(config)[0]
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    arguments, environment = vllm_command.command(config)
    assert "--lora-modules" not in arguments
    assert settings_in(environment)["loaded"] == []
    assert f"the files in {folder} are not those that were evaluated" in caplog.text
    assert "agent is not answered" in caplog.text


def waiting(config: Config, **versions: str) -> Any:
    return settings_in(vllm_command.command(config, versions)[1])["waiting"]


def test_without_a_record_of_a_deployment_the_base_model_answers_or_waits(make: Callable[..., Config]) -> None:
    assert waiting(make()) == {}
    assert "serving.start: wait" in waiting(make(start="wait"))["agent"]
    with pytest.raises(ConfigError, match=r"serving\.start"):
        make(start="never")


@pytest.mark.parametrize("start", ["auto", "wait"])
def test_a_version_that_only_the_state_knows_is_waited_for(make: Callable[..., Config], start: str) -> None:
    """The server's own file is missing: it has another port now, say."""
    assert "agent@r0007 is deployed" in waiting(make(start=start), agent="agent@r0007")["agent"]


@pytest.mark.parametrize("start", ["auto", "wait"])
def test_what_the_servers_own_file_names_is_not_waited_for(
    make: Callable[..., Config], tmp_path: Path, start: str
) -> None:
    config = make(start=start)
    save(config, {"agent": {"target": "tiny", "path": None}})
    assert waiting(config, agent="agent@r0007") == {}
    alias_file(config).write_text(
        json.dumps({"agent": {"target": "agent@r0007", "path": str(put_adapter_files(tmp_path / "r0007"))}})
    )
    assert waiting(config, agent="agent@r0008") == {}


@pytest.mark.training
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_listening_on_ipv6(make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: became.extend(arguments))
    with held_port("::1") as port:
        vllm_command.serve(make(host="::1", port=port))
    assert after(became[1], "--host") == "::1"
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"listen on \[::1\]:{port}: Address already in use"):
            vllm_command.serve(make(host="::1", port=port))


@pytest.mark.training
def test_a_host_that_has_no_address(make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    with pytest.raises(ServeError, match=r"listen on no-such-host\.invalid:8000: (?!Unknown error)"):
        vllm_command.serve(make(host="no-such-host.invalid", api_key_env="MY_KEY"))


@pytest.mark.training
def test_a_port_in_use(make: Callable[..., Config]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match="Address already in use") as refused:
            vllm_command.serve(make(port=port))
    assert str(port) in refused.value.attempted
    assert "serving.port" in refused.value.hint


@pytest.mark.training
@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_a_model_that_is_not_there(make: Callable[..., Config], tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ServeError, match=r"no such folder|no config\.json"):
        vllm_command.serve(make(base=str(tmp_path / folder)))


def test_vllm_is_not_installed(make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ServeError, match="vLLM is not installed") as refused:
        vllm_command.serve(make())
    assert f"pip install {own_package.requirement('gpu')}" in refused.value.hint


@pytest.mark.training
def test_serve_becomes_the_server(
    make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    became: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: became.extend(arguments))
    monkeypatch.setenv("FROM_OUTSIDE", "kept")
    config = make(port=free_port)
    vllm_command.serve(config)
    program, arguments, environment = became
    assert program == arguments[0]
    assert environment["FROM_OUTSIDE"] == "kept"
    assert environment["FLYWHEEL_ALIAS"] == "agent"
    assert (alias_file(config).parent / "admin.key").is_file()
