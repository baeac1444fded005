"""`flywheel evaluate` of a model at an endpoint: what it is sent, failures, going on, comparisons and the bar."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml

from flywheel.daemon import evaluation_log
from flywheel.daemon.evaluation import is_evaluation
from flywheel.daemon.evaluation_answers import answers_in
from flywheel.daemon.rounds.removal import erase_from_files
from flywheel.errors import EXIT_CONFIG, EXIT_QUALITY, EXIT_UNAVAILABLE, EXIT_USAGE
from flywheel.store import gate_tests
from tests import warm
from tests.cli.conftest import Ran, Run
from tests.cli.filter_bench import Bench
from tests.cli.terminal import in_terminal
from tests.factories.config import BOXED_RUBRIC
from tests.factories.documented_json import compare, documented
from tests.factories.judge_server import JudgeServer
from tests.factories.model_endpoint import Endpoint, calls, says
from tests.factories.state import read_state
from tests.judge.rubric.steps import made
from tests.waiting import SOON, wait_for

KEY = "a-secret-key-of-the-endpoint"
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


def question(request: dict[str, Any]) -> str:
    return str(request["messages"][-1]["content"])


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(lambda request, _: says("good: \\boxed{1}")) as server:
        yield server


@pytest.fixture
def evaluate(bench: Bench, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Evaluates the model of the endpoint on ten questions."""
    monkeypatch.setenv("MODEL_KEY", KEY)
    benchmark(bench, 10)
    bench.settings |= {"max_thread": 3}

    def run(*arguments: str | Path, model: str = "small", url: str = endpoint.base_url) -> Ran:
        named = ["--model", model, "--base-url", url, "--api-key-env", "MODEL_KEY"]
        return bench("evaluate", *named, "--benchmark", bench.folder / "tasks.jsonl", *arguments)

    return run


def benchmark(bench: Bench, count: int, **more: Any) -> None:
    rows = [{"task_id": f"t{n}", "main_query": f"What is {n} plus 1?", **more} for n in range(count)]
    (bench.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_model_at_an_endpoint_is_measured(evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench) -> None:
    endpoint.reply = lambda request, _: says("bad" if "What is 3" in question(request) else "good: \\boxed{1}")
    ran = evaluate("--json")
    assert ran.code == 0, ran.err
    found = ran.json
    assert (found["answers"], found["accepted"], found["rejected"], found["undecided"]) == (10, 9, 1, 0)
    assert found["model"] == {"name": "small", "base_url": endpoint.base_url}
    score, correct = found["metrics"]["score"], found["metrics"]["correct"]
    assert score["mean"] == pytest.approx(0.9)
    assert (correct["mean"], correct["count"], correct["conversations"]) == (pytest.approx(0.9), 10, 10)
    assert score["lower"] < 0.9 < score["upper"]
    assert found["metrics"]["tool_selection_accuracy"]["mean"] is None
    assert found["usage"]["calls"] == bench.judge.calls == 10
    assert found["usage"]["tokens_generated"] == 50
    assert KEY not in ran.out
    assert {*endpoint.keys} == {f"Bearer {KEY}"}
    assert {question(request) for request in endpoint.requests} == {f"What is {n} plus 1?" for n in range(10)}
    # What some endpoints reject is not sent.
    assert {name for request in endpoint.requests for name in request} == {"model", "messages", "stream"}
    assert {request["model"] for request in endpoint.requests} == {"small"}


def answered(found: Any) -> dict[str, Any]:
    """The lines of the answers by their tasks."""
    lines = (Path(found["directory"]) / "answers.jsonl").read_text().splitlines()
    return {line["task_id"]: line for line in map(json.loads, lines)}


def test_reasoning_in_an_answer_is_no_part_of_it(evaluate: Callable[..., Ran], endpoint: Endpoint) -> None:
    """Where the answer begins with a start marker or has none: up to the first end marker; and that of a part."""
    said = [
        ("<think>bad</think>good: \\boxed{1}", "good: \\boxed{1}"),
        ("\n<thinking>bad\n</thinking>\n\ngood: \\boxed{1}", "good: \\boxed{1}"),
        ("bad</think>good: \\boxed{1}", "good: \\boxed{1}"),
        ("[THINK]bad[/THINK]good", "good"),
        ("◁think▷bad◁/think▷good", "good"),
        ("<seed:think>bad</seed:think>good", "good"),
        ("<|channel|>analysis<|message|>bad<|end|><|start|>assistant<|channel|>final<|message|>good", "good"),
        # What stands behind the first end marker is the answer's own, and so are markers in a text.
        ("<think>bad</think>good: </think> ends a thought", "good: </think> ends a thought"),
        ("good: write <think>a thought</think> first", "good: write <think>a thought</think> first"),
        ("<think>bad, and it never ends", ""),
    ]
    endpoint.reply = lambda request, _: says(said[int(question(request).split()[2])][0])
    found = answered(evaluate("--json").json)
    assert {key: line["answer"].strip() for key, line in found.items()} == {
        f"t{number}": answer for number, (_, answer) in enumerate(said)
    }
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "bad"}]}
    endpoint.reply = lambda *_: says("", content=[thought, {"type": "text", "text": "good"}])
    assert {line["answer"].strip() for line in answered(evaluate("--json").json).values()} == {"good"}


AGENT = """
import json, urllib.request
async def run(task, model):
    model = task['openai']
    for text in (task['main_query'], 'Again, in short.'):
        body = json.dumps({'model': model['model'], 'messages': [{'role': 'user', 'content': text}]}).encode()
        headers = {'Content-Type': 'application/json'}
        sent = urllib.request.Request(model['base_url'] + '/chat/completions', body, headers)
        with urllib.request.urlopen(sent) as answer:
            said = json.load(answer)['choices'][0]['message']['content']
"""


def cut(text: str) -> tuple[int, Any]:
    """A message that ended at its limit of tokens."""
    status, body = says(text)
    return status, {**body, "choices": [{**body["choices"][0], "finish_reason": "length"}]}


@pytest.mark.parametrize(("text", "field"), [("<think>I think, and", {}), ("", {"reasoning": "I think, and"})])
def test_answers_that_were_cut_off_without_text_are_named_and_miss_the_bar(
    evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench, text: str, field: dict[str, str]
) -> None:
    def reply(request: dict[str, Any], _: int) -> tuple[int, Any]:
        status, body = cut(text)
        body["choices"][0]["message"] |= field
        return (status, body) if int(question(request).split()[2]) < 6 else says("good: \\boxed{1}")

    endpoint.reply = reply
    junit = bench.folder / "report.xml"
    missed = evaluate("--json", "--fail-under", "0.1", "--junit", junit)
    assert missed.code == EXIT_QUALITY, missed.err
    assert (missed.json["cut_off"], missed.json["rejected"]) == (6, 6)
    said = "6 of 10 answers of small were cut off without text: the endpoint's own limit of tokens"
    assert said in missed.err and said in missed.json["quality"]["failures"][0]
    assert "cut off without text" in junit.read_text()
    without_bar = evaluate()
    assert without_bar.code == 0, without_bar.err
    assert f"warning: {said}" in without_bar.err


def test_a_few_answers_that_were_cut_off_without_text_are_a_warning(
    evaluate: Callable[..., Ran], endpoint: Endpoint
) -> None:
    endpoint.reply = lambda request, _: (
        cut("" if "What is 3" in question(request) else "good, but it does not")
        if int(question(request).split()[2]) < 5
        else says("good: \\boxed{1}")
    )
    ran = evaluate("--json", "--quiet", "--fail-under", "0.1")
    assert ran.code == 0, ran.err
    assert ran.json["cut_off"] == 1
    assert "warning: 1 of 10 answers of small was cut off without text" in ran.err


def test_an_answer_that_its_turns_ended_names_their_setting(
    evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench
) -> None:
    steps = [*made("search", "{}", "7 °C"), *made("search", "{}", "7 °C"), *made("search", "{}", "7 °C")]
    row = {
        "task_id": "Oslo",
        "tools": [TOOL],
        "messages": [{"role": "user", "content": "How cold?"}, *steps, {"role": "assistant", "content": "7"}],
    }
    (bench.folder / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    endpoint.reply = lambda *_: calls("search")
    ran = evaluate("--json", "--set", "rollout.max_turns=2")
    assert (ran.json["cut_off"], ran.code) == (1, 0), ran.err
    assert "rollout.max_turns" in ran.err and "limit of tokens" not in ran.err


@pytest.mark.slow
def test_people_see_metrics_that_were_measured(evaluate: Callable[..., Ran]) -> None:
    ran = evaluate()
    assert ran.code == 0, ran.err
    assert "small on " in ran.out
    assert "10 answers to 10 tasks" in ran.out
    assert "end_to_end_success" in ran.out
    assert "tool_selection_accuracy" not in ran.out
    ran = evaluate("--metrics", "tool_accuracy")
    assert "tool_selection_accuracy  not measured" in ran.out
    assert evaluate("--metrics", "retrieval").code == EXIT_CONFIG


@pytest.mark.slow
def test_an_endpoint_that_fails_one_call_in_ten_is_asked_again(
    evaluate: Callable[..., Ran], endpoint: Endpoint
) -> None:
    faults = [(503, {}), (429, {"error": {"message": "slower"}}), (200, {"choices": []}), (200, b"<html>")]
    endpoint.reply = lambda _, before: (
        faults[before // 10 % len(faults)] if before % 10 == 4 else says("good: \\boxed{1}")
    )
    found = evaluate("--samples", "4", "--json").json
    assert (found["answers"], found["accepted"], found["failed"]) == (40, 40, 0)
    assert len(endpoint.requests) > 40


def test_an_answer_that_fails_counts_0(evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench) -> None:
    too_long = 400, {"error": {"message": "the context is too short"}}
    endpoint.reply = lambda request, _: too_long if "What is 3" in question(request) else says("good: \\boxed{1}")
    junit = bench.folder / "report.xml"
    found = evaluate("--json", "--junit", junit).json
    assert (found["accepted"], found["rejected"], found["failed"]) == (9, 1, 1)
    assert [found["metrics"][name]["mean"] for name in ("score", "correct", "end_to_end_success")] == [0.9] * 3
    [failure] = [case for suite in JUnitXml.fromfile(str(junit)) for case in suite if case.result]
    assert failure.name == "t3"
    assert "the context is too short" in failure.result[0].message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ((401, {"error": {"message": "bad key"}}), "environment variable that --api-key-env names"),
        ((404, {"error": {"message": "no such model"}}), "Check --model and --base-url"),
        ((200, b"<html>"), "8 calls in a row have failed"),
    ],
)
def test_an_endpoint_that_never_answers_is_an_error(
    evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench, reply: tuple[int, Any], complaint: str
) -> None:
    endpoint.reply = lambda *_: reply
    ran = evaluate("--json")
    assert ran.code == EXIT_UNAVAILABLE, ran.err
    assert complaint in ran.err
    assert complaint in ran.json["error"]
    assert bench.judge.calls == 0


@pytest.mark.slow
def test_a_run_that_was_ended_by_its_endpoint_goes_on(
    evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench
) -> None:
    benchmark(bench, 30)
    endpoint.reply = lambda _, before: says("good: \\boxed{1}") if before < 5 else (403, {})
    assert evaluate().code == EXIT_UNAVAILABLE
    judged, asked = bench.judge.calls, len(endpoint.requests)
    assert judged <= 5
    endpoint.reply = lambda *_: says("good: \\boxed{1}")
    ran = evaluate()
    assert ran.code == 0, ran.err
    assert "reusing the answers of an earlier run" in ran.err
    assert "30 accepted" in ran.out
    # At most those that were in flight are asked again.
    assert len(endpoint.requests) - asked <= 30 - judged + 3
    assert bench.judge.calls <= 30 + 3
    # A further run asks anew: the model behind the name may be another one.
    before = len(endpoint.requests)
    assert evaluate().code == 0
    assert len(endpoint.requests) == before + 30


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench) -> None:
    benchmark(bench, 40)

    is_killed = threading.Event()

    def reply(*_: Any) -> tuple[int, Any]:
        if bench.judge.calls >= 8:
            is_killed.wait(SOON)
        return says("good: \\boxed{1}")

    endpoint.reply = reply
    assert evaluate("--estimate").code == 0  # writes the configuration
    command = [sys.executable, "-m", "flywheel", "evaluate", "-c", str(bench.folder / "flywheel.yaml"), "--model"]
    command += ["small", "--base-url", endpoint.base_url, "--api-key-env", "MODEL_KEY"]
    command += ["--benchmark", str(bench.folder / "tasks.jsonl")]
    with warm.Popen(command, cwd=bench.folder) as process:
        wait_for(lambda: bench.judge.calls >= 8, "calls of the judge")
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    is_killed.set()
    judged, asked = bench.judge.calls, len(endpoint.requests)
    ran = evaluate()
    assert ran.code == 0, ran.err
    assert "40 accepted" in ran.out
    assert bench.judge.calls <= 40 + 3
    assert len(endpoint.requests) - asked <= 40 - judged + 6


@pytest.mark.slow
def test_the_stored_answers_of_a_task_can_be_erased(
    evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench
) -> None:
    """Of an evaluation that ended, and of one that was stopped."""
    benchmark(bench, 30)
    endpoint.reply = lambda request, before: says(f"good: {question(request)}") if before < 6 else (403, {})
    assert evaluate().code == EXIT_UNAVAILABLE
    benchmark(bench, 10)
    endpoint.reply = lambda request, _: says(f"good: \\boxed{{1}} to {question(request)}")
    assert evaluate().code == 0
    state = next(bench.folder.rglob("evaluations")).parent
    gone = "What is 3 plus 1?"

    def files_with(text: str) -> list[str]:
        return [path.name for path in state.glob("evaluations/*/*") if text in path.read_text()]

    assert {"spec.json", "answers.jsonl"} <= set(files_with(gone))
    before = files_with("What is 4 plus 1?")
    assert erase_from_files(state, {"t3"}, []) >= 3
    assert files_with(gone) == []
    assert set(files_with("What is 4 plus 1?")) == {*before} - {"partial.jsonl"}
    [ended] = [path for path in (state / "evaluations").iterdir() if path.is_dir() and is_evaluation(path)]
    answers = answers_in(ended)
    assert len(answers.every) == 9 and "t3" not in answers.by_task


@pytest.mark.slow
def test_two_models_are_compared_on_the_same_tasks(
    evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench
) -> None:
    benchmark(bench, 30)

    def reply(request: dict[str, Any], _: int) -> tuple[int, Any]:
        number = int(question(request).split()[2])
        good = number % 3 == 0 if request["model"] == "small" else number % 3 < 2
        return says("good: \\boxed{1}" if good else "bad")

    endpoint.reply = reply
    against = ("--against", "small", "--against-base-url", endpoint.base_url)
    found = evaluate(*against, "--json", model="large").json
    compare(found, documented("evaluate"), "evaluate")
    compared = found["against"]
    assert (found["metrics"]["score"]["mean"], compared["metrics"]["score"]["mean"]) == (
        pytest.approx(2 / 3),
        pytest.approx(1 / 3),
    )
    difference = compared["differences"]["score"]
    assert difference["difference"] == pytest.approx(1 / 3)
    assert 0 < difference["lower"] < 1 / 3 < difference["upper"]
    assert {flip["task_id"] for flip in compared["flips"]} == {f"t{n}" for n in range(30) if n % 3 == 1}
    assert all(flip["ours"]["accepted"] and not flip["theirs"]["accepted"] for flip in compared["flips"])
    # An earlier evaluation, by the directory of its files: no model is asked again for it.
    before = len(endpoint.requests)
    shown = evaluate("--against", found["directory"], model="small")
    assert shown.code == 0, shown.err
    assert len(endpoint.requests) == before + 30
    assert "10 flip: 0 to accepted, 10 to rejected" in shown.out
    assert re.search(r"score +-0\.333 \(-0\.\d+ to -0\.\d+\) on 30 tasks", shown.out)


def test_tools_are_answered_from_recordings(evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench) -> None:
    truth = {"target_tools": ["search"], "optimal_steps": 1}
    rows = [
        {
            "task_id": name,
            "tools": [TOOL],
            "messages": [
                {"role": "user", "content": f"How cold is it in {name}?"},
                *made("search", "{}", "7 °C"),
                {"role": "assistant", "content": "good: \\boxed{7}"},
            ],
            "metadata": {"ground_truth": truth},
        }
        for name in ("Oslo", "Rome", "Bonn", "Nice")
    ]
    (bench.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def reply(request: dict[str, Any], _: int) -> tuple[int, Any]:
        asked = next(each["content"] for each in request["messages"] if each["role"] == "user")
        if request["messages"][-1]["role"] == "tool":
            return says(f"good: \\boxed{{{request['messages'][-1]['content']}}}")
        if "Rome" in asked:
            return says("good: \\boxed{I guess}")
        return calls("search", '{"where": "there"}' if "Bonn" in asked else "{}")

    endpoint.reply = reply
    found = evaluate("--json").json
    assert (found["accepted"], found["failed"]) == (3, 1)
    metrics = {name: each["mean"] for name, each in found["metrics"].items()}
    # Bonn has a call that no recording answers: it failed.
    assert metrics["tool_selection_accuracy"] == metrics["plan_success_rate"] == 0.5
    assert metrics["end_to_end_success"] == 0.75
    assert [request["tools"] for request in endpoint.requests if "tools" in request] == [[TOOL]] * len(
        endpoint.requests
    )


@pytest.mark.slow
def test_an_agent_of_ones_own_answers(evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench) -> None:
    ending = "    if '3' in task['main_query']:\n        raise RuntimeError('the shop is closed')\n"
    (bench.folder / "agent.py").write_text(f"{AGENT}{ending}    return {{'response': said + ' (checked)'}}\n")
    ran = evaluate("--workflow", bench.folder / "agent.py:run", "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["accepted"], ran.json["rejected"], ran.json["failed"]) == (9, 1, 1)
    assert {question(request) for request in endpoint.requests} > {"Again, in short."}
    lines = answered(ran.json).values()
    assert {line["answer"] for line in lines if not line["error"]} == {"good: \\boxed{1} (checked)"}
    [why] = {line["error"] for line in lines if line["error"]}
    assert "the shop is closed" in why


LOOP = "good: \\boxed{1}. " + "I say it once more. " * 60


def test_an_answer_that_loops_to_its_limit_has_the_score_0(
    evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench
) -> None:
    endpoint.reply = lambda request, _: (cut if "What is 3" in question(request) else says)(LOOP)
    found = evaluate("--json").json
    assert found["metrics"]["score"]["mean"] == pytest.approx(0.9)
    assert {key: line["loop"] for key, line in answered(found).items() if line["loop"]} == {
        "t3": "'. I say it once more' is repeated 60 times"
    }


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "score"), [("-1", -1.0), ("null", 1.0)])
def test_the_reward_of_a_workflow_is_checked_too(
    evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench, setting: str, score: float
) -> None:
    """Its second message is right. The first one looped to its limit of tokens."""
    endpoint.reply = lambda _, before: cut(LOOP) if before == 0 else says("good: \\boxed{1}")
    benchmark(bench, 1)
    (bench.folder / "agent.py").write_text(f"{AGENT}    return {{'reward': float('boxed{{1}}' in said)}}\n")
    ran = evaluate(
        "--workflow", bench.folder / "agent.py:run", "--json", "--set", "rollout.reward={rubric: 0, workflow: 1}",
        "--set", f"rollout.loop_reward={setting}",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["metrics"]["score"]["mean"] == score
    assert len(endpoint.requests) == 2


@pytest.mark.slow
def test_the_bar_of_ci(evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench) -> None:
    endpoint.reply = lambda request, _: says("bad" if "What is 3" in question(request) else "good: \\boxed{1}")
    assert evaluate("--fail-under", "0.9", "--quiet").out == ""
    missed = evaluate("--fail-under", "0.95", "--summary", bench.folder / "summary.md")
    assert missed.code == EXIT_QUALITY
    assert "9 of 10 decided replies accepted" in missed.err
    assert "below the quality bar" in (bench.folder / "summary.md").read_text()
    assert evaluate("--fail-under", "0.9", "--confidence", "0.95").code == EXIT_QUALITY
    # A judge that does not answer is no bad model.
    bench.settings |= {"max_attempts": 1}
    for behaviour in ("401", "500"):
        bench.judge.behave(behaviour)
        ran = evaluate("--fail-under", "0.5", "--set", "training.judge_wait_seconds=0.1")
        assert ran.code == EXIT_UNAVAILABLE, ran.err


def test_an_estimate_asks_nobody(evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench) -> None:
    ran = evaluate(
        "--estimate", "--samples", "2", "--set", "judge.prices={input_per_million: 1, output_per_million: 2}"
    )
    assert ran.code == 0, ran.err
    assert "10 tasks, 20 answers to generate" in ran.out
    assert "20 calls" in ran.out
    assert "USD" in ran.out
    both = evaluate("--estimate", "--against", "large", "--against-base-url", endpoint.base_url, "--json").json
    compare(both, documented("evaluate --estimate"), "evaluate --estimate")
    assert (both["estimate"]["tasks"], both["estimate"]["answers"], both["estimate"]["calls"]) == (10, 20, 20)
    assert (bench.judge.calls, endpoint.requests) == (0, [])
    assert evaluate("--estimate", "--fail-under", "0.5").code == EXIT_USAGE


@pytest.mark.slow
def test_a_terminal_shows_how_far_it_is_and_what_it_has_cost(
    evaluate: Callable[..., Ran], endpoint: Endpoint, bench: Bench, tmp_path: Path
) -> None:
    bench.settings |= {"max_thread": 1, "prices": {"input_per_million": 1000, "output_per_million": 2000}}
    bench.judge.delay_seconds = 0.2
    assert evaluate("--estimate").code == 0  # writes the configuration
    named = ["--model", "small", "--base-url", endpoint.base_url, "--benchmark", bench.folder / "tasks.jsonl"]
    command = ["evaluate", "-c", bench.folder / "flywheel.yaml", *named]
    key = {"OPENAI_API_KEY": "key"}
    seen = in_terminal(bench.folder, command, columns=160, home=tmp_path, variables=key)
    assert seen.code == 0, seen.screen
    costs = re.findall(r"evaluating, \d+ of 10 rollouts.*?about ([\d.]+) USD", seen.screen)
    assert len({*costs}) > 1, seen.screen
    assert "small on " in seen.screen and "10 accepted" in seen.screen


def test_what_cannot_be_evaluated_is_named(evaluate: Callable[..., Ran], bench: Bench) -> None:
    assert "no HTTP URL" in evaluate(url="localhost:8000").err
    nothing = bench("evaluate", "--model", "r0009", "--benchmark", bench.folder / "tasks.jsonl")
    assert nothing.code == EXIT_CONFIG
    assert "no folder, alias or adapter of the state" in nothing.err
    missing = bench("evaluate", "--model", "base", "--benchmark", "nowhere.jsonl")
    assert missing.code == EXIT_CONFIG
    assert "nowhere.jsonl" in missing.err


@pytest.mark.slow
def test_a_look_at_held_out_tasks_is_recorded(flywheel: Run, due_config: Callable[..., Path], tmp_path: Path) -> None:
    with Endpoint(lambda *_: says("\\boxed{1}")) as endpoint, JudgeServer() as judge:
        config = due_config(
            judge={"base_url": judge.base_url, "model": "judge"}, filter={"rubric": str(BOXED_RUBRIC)}
        )
        named = ("--model", "small", "--base-url", endpoint.base_url, "--benchmark", "held-out", "-c", config)
        ran = flywheel("evaluate", *named, "--json")
        assert ran.code == 0, ran.err
        assert flywheel("evaluate", *named, "--limit", "2").code == 0
    assert (ran.json["benchmark"]["name"], ran.json["answers"]) == ("held-out", 4)
    looks = evaluation_log.read(tmp_path / "state")
    assert [each["score"]["count"] for each in looks] == [4, 2]
    assert looks[0]["model"] == {"name": "small", "base_url": endpoint.base_url}
    said = evaluation_log.sentence(looks)
    assert said.startswith("Measured by hand on held-out tasks 2 times, last small at ")
    # The gate's budget is untouched.
    assert read_state(tmp_path / "state", gate_tests.spent, 10) == []
    assert evaluation_log.read(tmp_path / "state", "of-another-adapter") == []
