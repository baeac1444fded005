"""What `flywheel doctor` expects of rollouts with tools, from the state alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flywheel.config.file import Config
from flywheel.daemon import recordings_forecast
from flywheel.daemon.checkup import Finding, Result, examine_recordings
from flywheel.errors import ConfigError, TrainError
from flywheel.records.states import Split
from flywheel.records.trace import Reply
from flywheel.store.kernel.database import Store
from tests.factories.config import BOXED_RUBRIC, base_model, round_config
from tests.factories.trace import replies_on, reply
from tests.factories.verdict import put_judged
from tests.training.recorded.recordings import ADD, asked, call, steps, tool


def parsing(tmp_path: Path, **sections: Any) -> Config:
    return round_config(tmp_path, **{"serving": {"tool_call_parser": "hermes"}, **sections})


def called(number: int, name: str = "add", tools: tuple[Any, ...] = (ADD,), **arguments: Any) -> Reply:
    """`What is NUMBER plus 1?`, with one call."""
    return reply(number, tools=tools, trajectory=steps((call(name, arguments), "x")))


async def found(store: Store, config: Config, *replies: Reply) -> Finding:
    if replies:
        await store.write(put_judged, *replies)
    return await examine_recordings(config)


async def test_without_tools_there_is_nothing_to_check(tmp_path: Path, store: Store) -> None:
    finding = await found(store, round_config(tmp_path), *replies_on(Split.TRAIN, 2))
    assert (finding.result, finding.text) == (Result.SKIPPED, "no task was offered tools")
    nowhere = round_config(tmp_path, state={"dir": str(tmp_path / "none")})
    assert (await examine_recordings(nowhere)).result is Result.SKIPPED


async def test_the_expected_hit_rate_is_told_by_tool(tmp_path: Path, store: Store) -> None:
    """Sums are copied from the question; what is looked up is not."""
    both = (ADD, tool("look_up"), tool("never"))
    sums = [called(number, tools=both, a=number, b=1) for number in range(12)]
    finding = await found(store, parsing(tmp_path), *sums, called(20, "look_up", both, about="the weather"))
    assert finding.result is Result.OK
    assert finding.text == (
        "13 tasks with tools: 13 with recorded results; expected hit rate 92% (add 100%, look_up 0%), estimated from"
        " 13 calls by whether their arguments occur in the conversation (no question was asked twice); no recorded"
        " result of never"
    )
    assert finding.figures == {"tools_tasks": 13, "expected_hits_percent": 92, "expected_complete_percent": 92}


@pytest.mark.parametrize("on_miss", ["end", "error"])
async def test_recordings_that_will_hardly_ever_answer_are_a_warning(
    tmp_path: Path, store: Store, on_miss: str
) -> None:
    """A few replies with many calls, whose arguments no other reply would have."""
    calls = [part for n in range(6) for part in (call("look_up", {"about": f"the weather of town {n}"}), "x")]
    replies = [reply(n, tools=(tool("look_up"),), trajectory=steps(*zip(calls[::2], calls[1::2], strict=True)))
               for n in range(2)]  # fmt: skip
    config = parsing(tmp_path, rollout={"tools": {"on_miss": on_miss}})
    finding = await found(store, config, *replies)
    assert "expected hit rate 0% (look_up 0%), estimated from 12 calls" in finding.text
    assert finding.result is Result.WARNING
    assert "recordings will answer few calls" in finding.text
    assert "Collect more traces of the same questions" in finding.remedy


async def test_repeated_questions_are_the_better_estimate(tmp_path: Path, store: Store) -> None:
    one, same = (replace(each, query="What is 1 plus 2?") for each in asked(Split.TRAIN, "3", "3"))
    finding = await found(store, parsing(tmp_path), one, same)
    assert "expected hit rate 100% (add 100%), estimated from 2 calls of other replies to the same" in finding.text


async def test_tasks_without_recordings_are_counted(tmp_path: Path, store: Store) -> None:
    uncalled, unrecorded = reply(1, tools=(ADD,)), reply(2, tools=(ADD,), trajectory=steps((call(), None)))
    undefined = reply(3, trajectory=steps((call(), "3")))
    finding = await found(store, parsing(tmp_path), uncalled, unrecorded, undefined)
    assert finding.text == (
        "3 tasks with tools: 1 without a call, 1 whose calls have no recorded result, 1 without tool definitions in"
        " the trace; no recorded call to estimate the hit rate from; no recorded result of add"
    )
    assert finding.figures == {"uncalled_tasks": 1, "unrecorded_tasks": 1, "undefined_tasks": 1}


@pytest.mark.parametrize(
    ("on_miss", "count", "result"),
    [("end", 12, Result.WARNING), ("error", 12, Result.OK), ("end", 5, Result.OK)],
)
@pytest.mark.parametrize("repeated", [True, False])
async def test_a_rate_that_would_drop_groups_is_a_warning(
    tmp_path: Path, store: Store, on_miss: str, count: int, result: Result, *, repeated: bool
) -> None:
    """A rollout with two calls needs both."""
    replies = [
        reply(
            n,
            query="What is 1 plus 2?" if repeated else f"What is {n} plus 2?",
            tools=(ADD,),
            trajectory=steps(
                (call(arguments={"a": 1 if repeated else n}), "x"), (call(arguments={"b": 99 + n}), "x")
            ),
        )
        for n in range(count)
    ]
    finding = await found(store, parsing(tmp_path, rollout={"tools": {"on_miss": on_miss}}), *replies)
    assert finding.result is result
    assert finding.figures["expected_hits_percent"] == 50
    shares = (
        "rollouts are expected to find all recordings" if repeated else "traces only have calls with copied arguments"
    )
    is_told = f"0% of {shares}, while a group needs 75% to be trained on" in finding.text
    assert is_told == (result is Result.WARNING)
    assert ("rollout.tools.on_miss" in finding.remedy) == (result is Result.WARNING)


@pytest.mark.parametrize(
    ("serving", "is_parsed"),
    [
        ({}, False),
        ({"tool_call_parser": "none"}, False),
        ({"tool_call_parser": "hermes"}, True),
        ({"extra_args": ["--tool-call-parser", "hermes"]}, False),
        ({"extra_args": ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]}, True),
    ],
)
async def test_calls_that_no_parser_reads_are_a_warning(
    tmp_path: Path, store: Store, serving: dict[str, Any], *, is_parsed: bool
) -> None:
    finding = await found(store, round_config(tmp_path, serving=serving), called(1, a=1))
    assert (finding.result is Result.OK) == is_parsed
    if not is_parsed:
        assert "no parser is known for the tool calls of" in finding.text
        assert "serving.tool_call_parser" in finding.remedy


@pytest.mark.parametrize(
    ("template", "writes"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", False),
        ("{# tools #}You use tools.{% for message in messages %}{{ message.content }}{% endfor %}", False),
        ("{%- if custom_tools %}{% endif %}{{ messages }}", False),
        ("{%- if tools %}{{ tools | tojson }}{% endif %}{{ messages }}", True),
        ("{%- set shown = {'a': 1} if tools else none %}{{ messages }}{% generation %}{% endgeneration %}", True),
    ],
)
@pytest.mark.parametrize("where", ["model", "file", "argument"])
async def test_a_template_that_writes_no_tools_fails_the_check(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, template: str, where: str, *, writes: bool
) -> None:
    """As a round ends with an error then. The server's own template counts, not the model's. vLLM is not needed."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    path = Path(base_model(tmp_path), "chat_template.jinja")
    serving: dict[str, Any] = {"tool_call_parser": "hermes"}
    if where == "file":
        path.write_text("{{ messages }}" if writes else "{{ tools }}{{ messages }}")
        path = tmp_path / "own.jinja"
    path.write_text(template)
    if where != "model":
        serving["extra_args"] = ["--chat-template", str(path) if where == "file" else template]
    config = round_config(tmp_path, serving=serving)
    if writes:
        assert (await found(store, config, called(1, a=1), called(2, a=2))).figures["tools_tasks"] == 2
    else:
        with pytest.raises(TrainError, match=r"2 tasks with tools, but .*chat template") as caught:
            await found(store, config, called(1, a=1), called(2, a=2))
        assert (str(path) if where == "file" else "chat template") in caught.value.why
        assert "--chat-template" in caught.value.hint
    left_out = round_config(tmp_path, serving=serving, rollout={"agent": "reply"})
    assert (await examine_recordings(left_out)).result is Result.OK


async def test_rounds_of_single_messages_need_no_recordings(tmp_path: Path, store: Store) -> None:
    finding = await found(store, round_config(tmp_path, rollout={"agent": "reply"}), called(1, a=1))
    assert (finding.result, finding.figures) == (Result.OK, {"tools_tasks": 1})
    assert "rounds leave them out (`rollout.agent: reply`)" in finding.text


async def test_the_sample_is_of_the_newest_and_bounded(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings_forecast, "SAMPLED", 3)
    replies = [called(number, a=number) for number in range(5, 10)] + [called(number, a=0) for number in range(3)]
    finding = await found(store, parsing(tmp_path), *replies)
    assert "8 tasks with tools" in finding.text
    assert finding.figures["expected_hits_percent"] == 33
    monkeypatch.setattr(recordings_forecast, "SAMPLED_CHARACTERS", 1)
    assert "no recorded call to estimate" in (await examine_recordings(parsing(tmp_path))).text


async def test_a_wrong_chain_fails_the_check(tmp_path: Path, store: Store) -> None:
    (tmp_path / "chain.yaml").write_text("no chain")
    wrong = parsing(tmp_path, filter={"rubric": str(BOXED_RUBRIC), "chain": str(tmp_path / "chain.yaml")})
    with pytest.raises(ConfigError, match=r"chain\.yaml"):
        await found(store, wrong, called(1, a=1))
