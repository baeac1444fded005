"""`flywheel doctor`: each check in its good and its bad case, and nothing is changed by any."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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


def puts(name: str, content: str | bytes, **sections: Any) -> Spoil:
    """A file with this content, and these settings."""

    def put(bench: Bench) -> dict[str, Any]:
        path = bench.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return sections

    return put


def lacks(name: str) -> Spoil:
    """A file that is missing."""
    return lambda bench: (bench.folder / name).unlink() or {}


def sets(**sections: Any) -> Spoil:
    """These settings."""
    return lambda bench: sections


def empty_folder(bench: Bench) -> dict[str, Any]:
    (bench.folder / "lines").mkdir()
    return LINES


def folder_of_others(bench: Bench) -> dict[str, Any]:
    (bench.folder / "lines" / "older").mkdir(parents=True)
    (bench.folder / "lines" / "a.jsonl.gz").touch()
    return LINES


def lists(models: Any) -> Spoil:
    return lambda bench: setattr(bench.judge, "models", models) or {}  # type: ignore[func-returns-value]


def unhealthy(bench: Bench) -> dict[str, Any]:
    bench.vllm.faults = {"/health": (503, "dead")}
    return {}


def larger(bench: Bench) -> dict[str, Any]:
    shutil.copytree(bench.folder / BASE, bench.folder / "larger")
    return {"model": {"base": "./larger"}}


def no_spans(bench: Bench) -> dict[str, Any]:
    execute(bench.folder / "studio.sqlite", "DELETE FROM span_table")
    return {}


LINES = {"sources": [{"type": "jsonl", "path": "lines"}]}


ELSEWHERE = {"urls": ["http://inference.invalid:8000"]}


BAD_ARGUMENTS = ["--default-chat-template-kwargs", "{bad"]


CONTRADICTED = (
    "version: 1\nid: x\nthreshold: 0.5\n"
    "criteria: [{id: boxed, type: contains, value: boxed, required: true}, {id: right, value: It is right.}]\n"
    "examples: [{query: Why, answer: nothing, verdict: accept}]\n"
)


@pytest.mark.parametrize(
    ("spoil", "check", "words"),
    [
        (puts("file", "", state={"dir": "file/below"}), "state", ("is not a directory", "state.dir")),
        (puts("state/state.db", "not a database, but long enough to be looked at " * 100), "state", "not a database"),
        (lacks("studio.sqlite"), "source", "no such file"),
        (puts("studio.sqlite", ""), "source", "it is empty"),
        (puts("studio.sqlite", "text " * 1000), "source", "not a SQLite database"),
        (no_spans, "source?", "nothing is in it yet"),
        (sets(sources=[]), "source?", "no source is configured"),
        (empty_folder, "source?", "nothing is in it"),
        (folder_of_others, "source?", "not read: 1 compressed file (a.jsonl.gz), 1 subfolder (older)"),
        (sets(sources=[{"type": "jsonl", "path": "nowhere"}]), "source", "nowhere"),
        (puts("own.yaml", "id: x\nthreshold: 7\n", filter={"rubric": "own.yaml"}), "rubric 78", "threshold"),
        (puts("own.yaml", CONTRADICTED, filter={"rubric": "own.yaml"}), "rubric?", "should be accepted"),
        (
            puts("own.yaml", "id: x\nfilters: [{type: nonesuch}]\n", filter={"chain": "own.yaml"}),
            "filters 78",
            "nonesuch",
        ),
        (sets(filter={"chain": "nope.yaml"}), "filters 78", "nope.yaml"),
        (sets(judge={"model": "jugde"}), "judge", "jugde is not among the 1 models it lists (judge)"),
        (lists(None), "judge?", "lists no models"),
        (lists({"hello": "world"}), "judge?", "lists no models"),
        (sets(judge={"backup": {"model": "other"}}), "judge.backup", ("other is not among", "judge.backup.model")),
        (unhealthy, "server", "not healthy"),
        (larger, "server", "it serves tiny, and model.base is larger"),
        (sets(serving={"admin_key_env": "NO_SUCH_KEY"}), "server", "NO_SUCH_KEY, which is not set"),
        (sets(serving=ELSEWHERE), "server", ("another machine", "serving.admin_key_env")),
        (sets(serving={"api_key_env": "NO_SUCH_KEY"}), "serve", "NO_SUCH_KEY, which is not set"),
        (sets(serving={"extra_args": ["--port", "1"]}), "serve", "serving.port"),
        # As every round would name it once it has started, wherever the servers are.
        (sets(serving={**ELSEWHERE, "extra_args": BAD_ARGUMENTS}), "serve", "is no JSON object"),
        (lacks(f"{BASE}/config.json"), "model", "has no config.json"),
        (lacks(f"{BASE}/tokenizer.json"), "model", "lacks a tokenizer"),
        (lacks(f"{BASE}/chat_template.jinja"), "model", "lacks a chat template"),
        (lacks(f"{BASE}/model.safetensors"), "model", "lacks weights"),
        (puts(f"{BASE}/config.json", "{"), "model", "lacks a config.json that can be read"),
        (sets(serving={"max_lora_rank": 8}), "configuration", "serving.max_lora_rank 8"),
    ],
)
def test_what_is_wrong_is_the_only_finding_and_says_what_to_do(
    bench: Bench, spoil: Spoil, check: str, words: str | tuple[str, ...]
) -> None:
    """`?` marks what is a warning, 78 what ends with that code."""
    is_warning, (name, *code) = check.endswith("?"), check.removesuffix("?").split()
    ran, report = bench.report(**spoil(bench))
    found = {each["name"]: each for each in report["checks"]}
    assert_failed(
        found[name],
        *((words,) if isinstance(words, str) else words),
        result="warning" if is_warning else "failed",
    )
    if code:
        assert ran.code == 78
    if name not in ("server", "serve", "state", "model", "configuration"):
        assert [each for each, told in found.items() if told["result"] == "failed"] == ([] if is_warning else [name])


@pytest.mark.slow
def test_task_files_are_counted(bench: Bench) -> None:
    folder_of_others(bench)
    (bench.folder / "lines" / "B.JSONL").write_text("{}\n")
    found = bench(**LINES)["source"]
    assert (found["result"], found["figures"]) == ("ok", {"files": 1, "bytes": 3})


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
    ran = bench.run("doctor", "--json", "-c", "no.yaml")
    assert (ran.code, "there is no such file" in ran.out) == (78, True)
    (bench.folder / "flywheel.yaml").unlink()
    [found] = [each for each in bench.run("doctor", "--json").json["checks"] if each["name"] == "configuration"]
    assert_failed(found, "flywheel init", result="warning")
    assert not (bench.folder / "home").exists()


def test_targets_suites_and_a_judge_that_is_away_are_each_a_finding(bench: Bench, free_port: int) -> None:
    for name in ("plan", "work"):
        write_rubric(bench.folder, name=f"{name}.yaml", id=name)
    targets = {name: {"rubric": f"{name}.yaml"} for name in ("plan", "work")}
    away = {"base_url": f"http://127.0.0.1:{free_port}/v1"}
    ran, report = bench.report(filter={"rubric": "nope.yaml"}, targets=targets, judge=away)
    found = [check for check in report["checks"] if check["name"] in ("rubric", "judge")]
    assert [(check["name"], check["subject"], check["result"]) for check in found] == [
        ("rubric", "", "failed"), ("rubric", "plan", "ok"), ("rubric", "work", "ok"),
        ("judge", f"judge at {away['base_url']}", "failed"),
    ]  # fmt: skip
    assert (ran.code, found[1]["found"].startswith("plan: ")) == (78, True)
    assert_failed(found[3], "refused", "judge.base_url")
    targets["work"]["rubric"] = "nope.yaml"
    assert_failed(bench(filter={"rubric": "plan.yaml"}, targets=targets)["rubric"], "targets.work.rubric")
    del bench.settings["targets"]
    (bench.folder / "tasks.jsonl").write_text('{"main_query": "What is 2 + 2?"}\n')
    _, report = bench.report(gate={"suites": {"math": {"file": "tasks.jsonl"}, "law": {"file": "nope.jsonl"}}})
    found = [check for check in report["checks"] if check["name"] == "suite"]
    assert [(check["subject"], check["result"]) for check in found] == [("math", "ok"), ("law", "failed")]
    assert found[0]["found"] == "1 task, reported only"


Spoil = Callable[[Bench], dict[str, Any]]


@pytest.mark.slow
def test_a_state_of_another_version(bench: Bench) -> None:
    bench()
    assert bench.run("ingest").code == 0
    assert "schema version" in bench()["state"]["found"]
    execute(bench.folder / "state" / "state.db", "UPDATE meta SET value = 99 WHERE key = 'schema_version'")
    assert_failed(bench()["state"], "version 99", "Upgrade Flywheel")


def test_a_token_that_is_not_set(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"type": "otlp", "listen": "0.0.0.0:0", "token_env": "TOKEN_OF_A_TEST"}
    ran, report = bench.report(sources=[source])
    found = next(check for check in report["checks"] if check["name"] == "source")
    assert_failed(found, "TOKEN_OF_A_TEST, which token_env names, is not set")
    assert ran.code == 1, "no file is wrong"
    monkeypatch.setenv("TOKEN_OF_A_TEST", "a-long-random-text")
    assert "not set" not in bench(sources=[source])["source"]["found"]


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


def test_a_judge_that_is_the_trained_model(bench: Bench) -> None:
    bench.judge.models["data"].append({"id": "agent"})
    ran, report = bench.report(judge={"model": "agent"})
    told = [check for check in report["checks"] if check["name"] == "judge"]
    assert_failed(told[0], "it is the model that is trained")
    assert ran.code == 78
    url = bench.settings["serving"]["urls"][0]
    _, report = bench.report(judge={"model": "tiny-2", "base_url": url})
    assert any("trained model's own server" in check["found"] for check in report["checks"])


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


@pytest.mark.slow
def test_a_server_that_wants_the_admin_key(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with replica(bench.vllm, lambda app: app) as url:
        assert_failed(bench(serving={"urls": [url]})["server"], "no alias middleware")
    assert_failed(bench()["server"], "cannot be reached", "flywheel serve")
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
    assert_failed(bench(serving={**ELSEWHERE, "admin_key_env": "ADMIN"})["server"], "cannot be reached")


@pytest.mark.slow
def test_an_adapter_that_a_restart_would_lose(bench: Bench) -> None:
    assert bench()["serve"]["result"] == "ok"
    file = bench.folder / "state" / "serving" / "aliases-8000.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    saved = {"target": "agent@r0007", "path": str(bench.folder / "gone"), "sha256": "a hash"}
    file.write_text(json.dumps({"agent": saved}))
    assert_failed(bench()["serve"], "agent@r0007 cannot be served again", "from a backup", result="warning")


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--default-chat-template-kwargs="], "--default-chat-template-kwargs"),
        (["--seed=1", "--override_generation_config=[1]"], "--override-generation-config"),
        (["--default-chat-template-kwargs", '{"thinking": true}', "--override-generation-config={}"], ""),
        (["--default-chat-template-kwargs.thinking", "true"], ""),
    ],
    ids=str,
)
def test_an_argument_that_is_no_json_object_is_named(arguments: list[str], wrong: str) -> None:
    with (
        pytest.raises(ServeError, match=f"{wrong} in serving.extra_args is no JSON object")
        if wrong
        else nullcontext()
    ):
        check_arguments(arguments)


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


@pytest.mark.slow
def test_people_get_a_table(bench: Bench) -> None:
    bench(judge={"model": "jugde"})
    ran = bench.run("doctor")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert any(line.split()[:2] == ["failed", "judge"] for line in lines)
    assert any(line.strip().startswith("→ Correct judge.model") for line in lines)
    assert "1 failed" in lines[-1]
    seen = in_terminal(bench.folder, ["doctor"], columns=40, home=bench.folder)
    assert seen.code == 1
    assert max(map(len, seen.lines)) <= 40
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
