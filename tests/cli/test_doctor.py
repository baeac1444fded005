"""`flywheel doctor`: each check in its good and its bad case, and nothing is changed by any."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import ServeError
from flywheel.serving.server.vllm_command import check_arguments
from flywheel.system.lock import instance_lock
from tests.cli.conftest import Ran, Run
from tests.cli.terminal import in_terminal
from tests.conftest import POLICY
from tests.factories.config import write_rubric
from tests.factories.documented_json import compare, documented
from tests.factories.judge_server import JudgeServer, form_of
from tests.factories.state import execute
from tests.serving.fake_vllm import BASE, FakeVllm, replica, running, with_middleware

STUDIO = Path(__file__).parent.parent / "data" / "studio"


class Bench:
    """An installation that is well, to be spoilt."""

    def __init__(self, flywheel: Run, folder: Path, judge: JudgeServer, vllm: FakeVllm, url: str) -> None:
        self.run, self.folder, self.judge, self.vllm = flywheel, folder, judge, vllm
        shutil.copytree(POLICY, folder / BASE)
        shutil.copy(STUDIO / "new_v2.sqlite", folder / "studio.sqlite")
        self.settings: dict[str, Any] = {
            "state": {"dir": "state"},
            "sources": [{"path": "studio.sqlite"}],
            "judge": {"base_url": judge.base_url, "model": "judge"},
            "model": {"base": f"./{BASE}", "alias": "agent"},
            "rollout": {"max_completion_tokens": 32, "max_model_len": 256},
            "serving": {"urls": [url]},
        }

    def __call__(self, *arguments: str, **changes: dict[str, Any] | list[Any]) -> dict[str, dict[str, Any]]:
        """The findings by their names, after the configuration was changed in these sections."""
        return {check["name"]: check for check in self.report(*arguments, **changes)[1]["checks"]}

    def report(self, *arguments: str, **changes: dict[str, Any] | list[Any]) -> tuple[Ran, dict[str, Any]]:
        for name, section in changes.items():
            before = self.settings.get(name, {})
            self.settings[name] = {**before, **section} if isinstance(section, dict) else section
        (self.folder / "flywheel.yaml").write_text(json.dumps(self.settings))
        ran = self.run("doctor", "--json", *arguments)
        report = ran.json
        assert report["well"] == (ran.code == 0)
        return ran, report


@pytest.fixture
def bench(flywheel: Run, tmp_path: Path) -> Iterator[Bench]:
    vllm = FakeVllm()
    with JudgeServer() as judge, replica(vllm) as url:
        yield Bench(flywheel, tmp_path, judge, vllm, url)


def assert_failed(finding: dict[str, Any], *words: str, result: str = "failed") -> None:
    assert finding["result"] == result, finding
    assert finding["do"], finding
    told = f"{finding['found']} {finding['do']}"
    for word in words:
        assert word in told


def test_an_installation_that_is_well(bench: Bench) -> None:
    ran, report = bench.report()
    found = {check["name"]: check for check in report["checks"]}
    bad = [check for check in report["checks"] if check["result"] == "failed"]
    assert (ran.code, bad, report["failed"]) == (0, [], 0)
    assert report["config"] == str(bench.folder / "flywheel.yaml")
    assert "generation 2" in found["source"]["found"]
    assert found["source"]["figures"]["spans"] > 0
    assert found["disk"]["figures"]["free_bytes"] > 0
    assert "agent → tiny" in found["server"]["found"]
    assert "it answers and lists judge" in found["judge"]["found"]
    assert found["model"]["figures"]["weight_bytes"] > 0
    assert bench.judge.calls == 0, "nothing was paid for"
    assert sum(report[result] for result in ("ok", "warning", "failed", "skipped")) == len(report["checks"])


def everything(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every file and directory with its time of change and its bytes."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [folder, *folder.rglob("*")]:
        now = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (now.st_mtime_ns, now.st_mode, now.st_size, content)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("with_state", [False, True])
def test_nothing_is_changed(bench: Bench, with_state: bool) -> None:
    execute(bench.folder / "studio.sqlite", "PRAGMA journal_mode = WAL")
    bench()
    if with_state:
        assert bench.run("ingest").code == 0
    bench.settings["sources"].append({"type": "otlp", "listen": "127.0.0.1:4318"})
    (bench.folder / "flywheel.yaml").write_text(json.dumps(bench.settings))
    before = everything(bench.folder)
    for arguments in ([], ["--json"], ["--ask-judge"]):
        bench.run("doctor", *arguments)
        assert everything(bench.folder) == before
    assert (bench.folder / "state").exists() == with_state
    assert bench.vllm.loaded == {}
    assert all(call.startswith("GET ") for call in bench.vllm.calls)


@pytest.mark.slow
def test_nothing_heavy_is_imported(bench: Bench) -> None:
    bench()
    code = (
        "import sys\nfrom flywheel.cli import main\nsys.argv = ['flywheel', 'doctor', '--json']\n"
        "try:\n main()\nexcept SystemExit:\n pass\n"
        "print(sorted({'torch', 'transformers', 'trl', 'peft', 'vllm', 'ray'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=bench.folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_it_looks_beside_the_daemon(bench: Bench) -> None:
    bench()
    with instance_lock(bench.folder / "state"):
        found = bench()
    assert found["state"]["figures"] == {"pid": os.getpid()}


def test_a_wrong_configuration_ends_with_78_and_the_rest_is_told(bench: Bench) -> None:
    (bench.folder / "flywheel.yaml").write_text("judge:\n  modell: x\ntraining: {steps: 0}\n")
    ran = bench.run("doctor", "--json")
    found = {check["name"]: check for check in ran.json["checks"]}
    assert ran.code == 78
    assert_failed(found["configuration"], "line 2: unknown key `judge.modell`", "line 3: `training.steps`")
    assert found.keys() == {"training extra", "configuration"}
    assert bench.run("doctor").code == 78


def test_a_configuration_that_is_not_there(flywheel: Run) -> None:
    ran = flywheel("doctor", "--json", "-c", "no.yaml")
    assert ran.code == 78
    assert "there is no such file" in ran.out


def test_no_configuration_at_all_is_a_warning(flywheel: Run, tmp_path: Path) -> None:
    ran = flywheel("doctor", "--json")
    found = {check["name"]: check for check in ran.json["checks"]}
    assert ran.json["config"] is None
    assert_failed(found["configuration"], "flywheel init", result="warning")
    assert not (tmp_path / "home").exists()


def test_a_state_that_cannot_be(bench: Bench) -> None:
    (bench.folder / "file").write_text("")
    assert_failed(bench(state={"dir": "file/below"})["state"], "is not a directory", "state.dir")


@pytest.mark.slow
def test_a_state_of_another_version(bench: Bench) -> None:
    bench()
    assert bench.run("ingest").code == 0
    assert "schema version" in bench()["state"]["found"]
    execute(bench.folder / "state" / "state.db", "UPDATE meta SET value = 99 WHERE key = 'schema_version'")
    assert_failed(bench()["state"], "version 99", "Upgrade Flywheel")


def test_a_state_that_is_no_database(bench: Bench) -> None:
    (bench.folder / "state").mkdir()
    (bench.folder / "state" / "state.db").write_text("not a database, but long enough to be looked at " * 100)
    assert_failed(bench()["state"], "not a database")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), (b"", "it is empty"), (b"text " * 1000, "not a SQLite database")],
)
def test_a_source_that_cannot_be_read(bench: Bench, content: bytes | None, words: str) -> None:
    path = bench.folder / "studio.sqlite"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    found = bench()["source"]
    assert_failed(found, words)
    assert found["subject"] == str(path)


@pytest.mark.slow
def test_a_source_with_nothing_in_it(bench: Bench) -> None:
    execute(bench.folder / "studio.sqlite", "DELETE FROM span_table")
    assert_failed(bench()["source"], "nothing is in it yet", result="warning")
    assert_failed(bench(sources=[])["source"], "no source is configured", result="warning")
    (bench.folder / "lines" / "older").mkdir(parents=True)
    (bench.folder / "lines" / "a.jsonl.gz").touch()
    lines = {"sources": [{"type": "jsonl", "path": str(bench.folder / "lines")}]}
    found = bench(**lines)["source"]
    assert_failed(found, "not read: 1 compressed file (a.jsonl.gz), 1 subfolder (older)", result="warning")
    assert "nothing is in it yet" not in str(found)
    (bench.folder / "lines" / "B.JSONL").touch()
    assert bench(**lines)["source"]["result"] == "ok"


@pytest.mark.slow
def test_task_files(bench: Bench) -> None:
    lines = bench.folder / "lines"
    lines.mkdir()
    assert_failed(bench(sources=[{"type": "jsonl", "path": "lines"}])["source"], "nothing is in it", result="warning")
    (lines / "one.jsonl").write_text("{}\n")
    assert bench()["source"]["figures"] == {"files": 1, "bytes": 3}
    assert_failed(bench(sources=[{"type": "jsonl", "path": "nowhere"}])["source"], "nowhere")


def test_a_token_that_is_not_set(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"type": "otlp", "listen": "0.0.0.0:0", "token_env": "TOKEN_OF_A_TEST"}
    ran, report = bench.report(sources=[source])
    found = next(check for check in report["checks"] if check["name"] == "source")
    assert_failed(found, "TOKEN_OF_A_TEST, which token_env names, is not set")
    assert ran.code == 1, "no file is wrong"
    monkeypatch.setenv("TOKEN_OF_A_TEST", "a-long-random-text")
    assert "not set" not in bench(sources=[source])["source"]["found"]


def test_a_wrong_rubric_or_chain_ends_with_78(bench: Bench) -> None:
    (bench.folder / "rubric.yaml").write_text("version: 1\nid: x\nthreshold: 7\n")
    ran, report = bench.report(filter={"rubric": "rubric.yaml"})
    assert ran.code == 78
    assert_failed(next(check for check in report["checks"] if check["name"] == "rubric"), "threshold")
    (bench.folder / "chain.yaml").write_text("version: 1\nid: x\nfilters: [{type: nonesuch}]\n")
    ran, report = bench.report(filter={"chain": "chain.yaml"})
    assert ran.code == 78
    assert_failed(next(check for check in report["checks"] if check["name"] == "filters"), "nonesuch")


def test_a_chain_that_is_not_there_is_told_once(bench: Bench) -> None:
    ran, report = bench.report(filter={"chain": "nope.yaml"})
    failed = [check["name"] for check in report["checks"] if check["result"] == "failed"]
    assert (ran.code, failed) == (78, ["filters"])


def test_a_wrong_rubric_does_not_hide_a_judge_that_is_away(bench: Bench, free_port: int) -> None:
    away = {"base_url": f"http://127.0.0.1:{free_port}/v1"}
    ran, report = bench.report(filter={"rubric": "nope.yaml"}, judge=away)
    failed = [check["name"] for check in report["checks"] if check["result"] == "failed"]
    assert (ran.code, failed) == (78, ["rubric", "judge"])


def test_the_shared_rubric_is_looked_at_beside_those_of_targets(bench: Bench) -> None:
    for name in ("plan", "work"):
        write_rubric(bench.folder, name=f"{name}.yaml", id=name)
    targets = {name: {"rubric": f"{name}.yaml"} for name in ("plan", "work")}
    _, report = bench.report(filter={"rubric": "nope.yaml"}, targets=targets)
    found = [check for check in report["checks"] if check["name"] in ("rubric", "judge")]
    assert [(check["name"], check["subject"], check["result"]) for check in found] == [
        ("rubric", "", "failed"), ("rubric", "plan", "ok"), ("rubric", "work", "ok"),
        ("judge", f"judge at {bench.judge.base_url}", "ok"),
    ]  # fmt: skip
    write_rubric(bench.folder, name="own.yaml", id="own")
    (bench.folder / "chain.yaml").write_text(
        "id: x\nfilters: [{type: llm_evaluate, params: {custom_rubrics: [It is right.]}}]\n"
    )
    targets["work"]["rubric"] = "nope.yaml"
    _, report = bench.report(filter={"chain": "chain.yaml"}, targets=targets)
    found = [check for check in report["checks"] if check["name"] == "rubric"]
    assert [(check["subject"], check["result"]) for check in found] == [
        ("", "ok"), ("plan", "ok"), ("work", "failed"),
    ]  # fmt: skip
    assert found[1]["found"].startswith("plan: ")
    assert_failed(found[2], "targets.work.rubric")


def test_suites_are_named(bench: Bench) -> None:
    (bench.folder / "tasks.jsonl").write_text('{"main_query": "What is 2 + 2?"}\n')
    suites = {"math": {"file": "tasks.jsonl"}, "law": {"file": "nope.jsonl"}}
    _, report = bench.report(gate={"suites": suites})
    found = [check for check in report["checks"] if check["name"] == "suite"]
    assert [(check["subject"], check["result"]) for check in found] == [("math", "ok"), ("law", "failed")]
    assert found[0]["found"] == "1 task, reported only"


def test_a_rubric_whose_example_contradicts_it(bench: Bench) -> None:
    (bench.folder / "rubric.yaml").write_text(
        "version: 1\nid: x\nthreshold: 0.5\n"
        "criteria: [{id: boxed, type: contains, value: boxed, required: true}, {id: right, value: It is right.}]\n"
        "examples: [{query: Why, answer: nothing, verdict: accept}]\n"
    )
    assert_failed(bench(filter={"rubric": "rubric.yaml"})["rubric"], "should be accepted", result="warning")


def test_a_judge_that_is_the_trained_model(bench: Bench) -> None:
    bench.judge.models["data"].append({"id": "agent"})
    ran, report = bench.report(judge={"model": "agent"})
    told = [check for check in report["checks"] if check["name"] == "judge"]
    assert_failed(told[0], "it is the model that is trained")
    assert ran.code == 78
    url = bench.settings["serving"]["urls"][0]
    _, report = bench.report(judge={"model": "tiny-2", "base_url": url})
    assert any("trained model's own server" in check["found"] for check in report["checks"])


def test_a_judge_that_is_away(bench: Bench, free_port: int) -> None:
    assert_failed(bench(judge={"base_url": f"http://127.0.0.1:{free_port}/v1"})["judge"], "refused", "judge.base_url")


def test_a_judge_with_another_model(bench: Bench) -> None:
    found = bench(judge={"model": "jugde"})["judge"]
    assert_failed(found, "jugde is not among the 1 models it lists (judge)")


@pytest.mark.parametrize(
    ("listing", "words", "result"),
    [(None, "lists no models", "warning"), ({"hello": "world"}, "lists no models", "warning")],
)
def test_a_judge_that_lists_nothing(bench: Bench, listing: Any, words: str, result: str) -> None:
    bench.judge.models = listing
    assert_failed(bench()["judge"], words, result=result)


@pytest.mark.slow
def test_keys_of_a_judge(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.judge.wants_key = True
    bench.judge.by_key = {"wrong": "401", "none": "401"}
    assert_failed(bench()["judge"], "401", "OPENAI_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert_failed(bench()["judge"], "401", "Put the right key into the environment variable OPENAI_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "right|wrong")
    assert bench()["judge"]["result"] == "ok"
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    assert bench()["judge"]["result"] == "ok"
    ran, _ = bench.report("--ask-judge")
    assert "right" not in ran.err + json.dumps(bench()["judge"])


@pytest.mark.slow
def test_one_question_to_the_judge(bench: Bench) -> None:
    """In the format in which tasks are asked: nothing else would tell that an endpoint ignores it."""
    bench.judge.content = lambda request: {"criteria": {"x": {}}, "opinion": "agree"}  # type: ignore[method-assign]
    bench.judge.models = None
    found = bench("--ask-judge")["judge"]
    assert (found["result"], found["figures"]) == ("ok", {"prompt_tokens": 100, "completion_tokens": 20}), found
    assert [form_of(request) for request in bench.judge.requests] == ["schema"]
    bench.judge.behave("no schema")
    found = bench("--ask-judge")["judge"]
    assert found["result"] == "ok" and "by tool" in found["found"], found
    bench.judge.content = lambda request: {"criteria": {"x": {}}, "is_equal": True}  # type: ignore[method-assign]
    bench.judge.behave("good")
    given = {"response_format": "schema"}
    assert_failed(
        bench("--ask-judge", judge=given)["judge"], "ignores", "schema", "response_format: json", result="warning"
    )
    assert bench("--ask-judge", judge={"response_format": "json"})["judge"]["result"] == "ok"
    bench.judge.behave("no schema")
    found = bench("--ask-judge", judge={"response_format": "auto"})["judge"]
    assert_failed(found, "ignores", "tool", "Set judge.response_format: text, and ask", result="warning")
    bench.judge.requests.clear()
    bench.judge.behave("401")
    assert_failed(bench("--ask-judge")["judge"], "401")
    bench.judge.behave("500")
    assert_failed(bench("--ask-judge")["judge"], "500")
    assert bench.judge.calls == 2


def test_a_backup_is_looked_at_too(bench: Bench) -> None:
    found = bench(judge={"backup": {"model": "other"}})
    assert found["judge"]["result"] == "ok"
    assert_failed(found["judge.backup"], "other is not among", "judge.backup.model")


def test_servers(bench: Bench) -> None:
    bench.vllm.loaded = {f"agent@r000{number}": "/x" for number in range(1, 5)}
    assert bench()["server"]["result"] == "ok"
    bench.vllm.loaded = {}
    bench.vllm.faults = {"/health": (503, "dead")}
    assert_failed(bench()["server"], "not healthy")


@pytest.mark.slow
def test_a_server_of_another_kind(bench: Bench) -> None:
    with replica(bench.vllm, lambda app: app) as url:
        assert_failed(bench(serving={"urls": [url]})["server"], "no alias middleware")
    assert_failed(bench()["server"], "cannot be reached", "flywheel serve")


def test_a_server_of_another_model_and_one_with_a_key(bench: Bench) -> None:
    shutil.copytree(bench.folder / BASE, bench.folder / "larger")
    assert_failed(bench(model={"base": "./larger"})["server"], "it serves tiny, and model.base is larger")
    bench(model={"base": f"./{BASE}"})
    assert_failed(bench(serving={"api_key_env": "NO_SUCH_KEY"})["serve"], "NO_SUCH_KEY, which is not set")
    assert_failed(bench(serving={"admin_key_env": "NO_SUCH_KEY"})["server"], "NO_SUCH_KEY, which is not set")


def test_a_server_on_another_machine_needs_the_variable_of_the_admin_key(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {"urls": ["http://inference.invalid:8000"]}
    assert_failed(bench(serving=elsewhere)["server"], "another machine", "serving.admin_key_env")
    monkeypatch.setenv("ADMIN", "admin-s3cret")
    found = bench(serving={**elsewhere, "admin_key_env": "ADMIN"})["server"]
    assert_failed(found, "cannot be reached")


@pytest.mark.slow
def test_a_server_that_wants_the_admin_key(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"FLYWHEEL_API_KEY": "agents", "FLYWHEEL_ADMIN_KEY": "admin-s3cret"}
    with running(with_middleware(bench.vllm, **keys)) as url:
        assert_failed(bench(serving={"urls": [url]})["server"], "refuses the key", "serving.admin_key_env")
        monkeypatch.setenv("ADMIN", "admin-s3cret")
        assert bench(serving={"admin_key_env": "ADMIN"})["server"]["result"] == "ok"
        key = bench.folder / "state" / "serving" / "admin.key"
        key.parent.mkdir(parents=True, exist_ok=True)
        key.write_text("admin-s3cret\n")
        found = bench(serving={"admin_key_env": None})
    assert found["server"]["result"] == "ok"


@pytest.mark.slow
def test_an_adapter_that_a_restart_would_lose(bench: Bench) -> None:
    assert bench()["serve"]["result"] == "ok"
    file = bench.folder / "state" / "serving" / "aliases-8000.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    saved = {"target": "agent@r0007", "path": str(bench.folder / "gone"), "sha256": "a hash"}
    file.write_text(json.dumps({"agent": saved}))
    assert_failed(bench()["serve"], "agent@r0007 cannot be served again", "from a backup", result="warning")


def test_settings_that_serve_refuses(bench: Bench) -> None:
    assert_failed(bench(serving={"extra_args": ["--port", "1"]})["serve"], "serving.port")


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--default-chat-template-kwargs", "{bad"], "--default-chat-template-kwargs"),
        (["--default-chat-template-kwargs="], "--default-chat-template-kwargs"),
        (["--seed=1", "--override_generation_config=[1]"], "--override-generation-config"),
        (["--default-chat-template-kwargs", '{"thinking": true}', "--override-generation-config={}"], ""),
        (["--default-chat-template-kwargs.thinking", "true"], ""),
    ],
    ids=str,
)
def test_an_argument_that_is_no_json_object_is_named(arguments: list[str], wrong: str) -> None:
    """As every round would name it once it has started, wherever the servers are."""
    if not wrong:
        check_arguments(arguments)
        return
    with pytest.raises(ServeError, match=f"{wrong} in serving.extra_args is no JSON object"):
        check_arguments(arguments)


def test_arguments_are_looked_at_wherever_the_servers_are(bench: Bench) -> None:
    serving = {"urls": ["http://inference.invalid:8000"], "extra_args": ["--default-chat-template-kwargs", "{bad"]}
    assert_failed(bench(serving=serving)["serve"], "is no JSON object")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "lacks a tokenizer"),
        ("chat_template.jinja", "lacks a chat template"),
        ("model.safetensors", "lacks weights"),
    ],
)
def test_a_model_that_lacks_a_file(bench: Bench, file: str, words: str) -> None:
    (bench.folder / BASE / file).unlink()
    assert_failed(bench()["model"], words)


def test_a_model_whose_config_cannot_be_read(bench: Bench) -> None:
    (bench.folder / BASE / "config.json").write_text("{")
    assert_failed(bench()["model"], "lacks a config.json that can be read")


@pytest.mark.slow
def test_a_model_that_is_not_here(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(bench.folder / "hub"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert_failed(bench(model={"base": "some/model"})["model"], "not on this machine yet", result="warning")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_failed(bench()["model"], "HF_HUB_OFFLINE")
    cache = bench.folder / "hub" / "hub" / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    shutil.copytree(POLICY, cache / "snapshots" / "abc")
    assert bench()["model"]["result"] == "ok"
    assert_failed(bench(model={"base": str(bench.folder / "nowhere")})["model"], "there is no directory")


def test_settings_that_do_not_go_together(bench: Bench) -> None:
    assert_failed(bench(serving={"max_lora_rank": 8})["configuration"], "serving.max_lora_rank 8")


@pytest.mark.slow
def test_people_get_a_table(bench: Bench) -> None:
    bench(judge={"model": "jugde"})
    ran = bench.run("doctor")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert any(line.split()[:2] == ["failed", "judge"] for line in lines)
    assert any(line.strip().startswith("→ Correct judge.model") for line in lines)
    assert "1 failed" in lines[-1]
    for columns in (40, 100):
        seen = in_terminal(bench.folder, ["doctor"], columns=columns, home=bench.folder)
        assert seen.code == 1
        assert max(map(len, seen.lines)) <= columns
        assert "…" not in seen.screen


def test_the_plan_has_the_memory_and_what_judging_takes(bench: Bench, tmp_path: Path) -> None:
    prices = {"input_per_million": 0.5, "output_per_million": 2.0, "currency": "EUR"}
    settings = {**bench.settings, "judge": {**bench.settings["judge"], "prices": prices}}
    write_rubric(tmp_path)
    settings["filter"] = {"rubric": "rubric.yaml"}
    (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
    before = bench.run("doctor", "--plan")
    assert before.code == 0
    assert "no verdict of a judge yet" in before.out
    assert not (tmp_path / "state").exists()
    assert bench.run("ingest").code == 0
    used = bench.run("filter", "--json").json["usage"]
    assert used["calls"] > 0
    told = bench.run("doctor", "--plan", "--json").json
    compare(told, documented("doctor --plan"), "doctor --plan")
    names = ("calls", "prompt_tokens", "completion_tokens")
    for part in (told["judging"]["tasks"], told["judging"]["round"]):
        # Each verdict took one call.
        assert part["calls"] == part["answers"]
        for name in names:
            assert part[name] == pytest.approx(used[name] / used["calls"] * part["answers"], abs=1)
        expected = (part["prompt_tokens"] * 0.5 + part["completion_tokens"] * 2.0) / 1e6
        assert part["cost"] == {"amount": pytest.approx(expected, abs=1e-6), "currency": "EUR"}
    assert told["judging"]["tasks"]["answers"] == 1000
    assert told["judging"]["round"]["learned_from"] == used["calls"]
    shown = bench.run("doctor", "--plan").out
    assert "1,000 tasks" in shown and f"at most {told['judging']['round']['answers']:,} answers" in shown
    assert shown.count(" EUR") == 2
