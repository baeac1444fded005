"""What the worker of a round is told of tasks with tools: who acts, and the recordings that answer."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, event, func, insert, select, update

from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds import planner
from flywheel.daemon.rounds.round_tasks import program_line, round_task
from flywheel.errors import TrainError
from flywheel.judge.rubric.checks import check_all
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.round import RoundSpec
from flywheel.records.states import Label, RoundState, Split, TaskState
from flywheel.records.task import TaskLine, task_id, task_line
from flywheel.records.tool_calls import ToolResult
from flywheel.records.trace import Reply
from flywheel.records.verdict import Outcome, Verdict
from flywheel.sources.jsonl.record import entry_of_line
from flywheel.store import claims, labels, samples, verdicts
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, exchange
from flywheel.training.recorded import recordings
from flywheel.training.recorded.recordings import call_key, tools_by_name
from tests.factories.config import round_config, with_chain
from tests.factories.round import planned_round, spec_again
from tests.factories.trace import put_replies, replies_on, reply
from tests.factories.verdict import accepted, put_judged, rejected
from tests.training.recorded.recordings import ADD, SUM, asked, call, said, steps, tool


def key(arguments: dict[str, Any], of: dict[str, Any] = ADD) -> str:
    (found,) = tools_by_name([of]).values()
    return call_key(found, arguments)


async def judged(store: Store, *replies: Reply, **values: Any) -> None:
    await store.write(put_judged, *replies, **values)


def of_row(**line: Any) -> TaskLine:
    """The task of a line of a file."""
    text = json.dumps({"question": "How much?", **line}).encode()
    task: TaskLine = json.loads(entry_of_line(text, Path("rows.jsonl"), datetime.now(UTC)).line)
    return task


def test_the_right_answer_as_the_users_judge_gets_it() -> None:
    answer = r"First \boxed{41}, then \boxed{42}."
    traced = task_line(reply(1, answer=answer), "studio")
    agentjet = of_row(metadata={"answer": answer, "qa_hash": "0" * 64})
    of_a_data_set = of_row(metadata={"answer": "So it is. #### 42"})
    boxed_in_a_data_set = of_row(metadata={"answer": answer})
    explicit = of_row(answer=answer, metadata={"reference": "42 km"})
    for line, is_accepted, right in (
        (traced, True, "42"),
        (traced, False, ""),
        (task_line(reply(1, answer="It is 42."), "studio"), True, "It is 42."),
        (task_line(reply(1, answer=r"\boxed{}"), "studio"), True, r"\boxed{}"),
        (agentjet, True, "42"),
        (of_a_data_set, True, "So it is. #### 42"),
        (boxed_in_a_data_set, True, answer),
        (explicit, True, "42 km"),
        (explicit, False, "42 km"),
    ):
        told = program_line(line, is_accepted=is_accepted)
        assert (told["metadata"]["answer"], told["answer"]) == (right, line["answer"])
    # A task file of ours that is read again still knows what was traced.
    for line, right in ((traced, "42"), (agentjet, "42"), (boxed_in_a_data_set, answer)):
        assert program_line(of_row(**line), is_accepted=True)["metadata"]["answer"] == right


def test_a_call_without_arguments_is_context_of_the_reply_that_is_imitated(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Is it cold in Oslo?"},
        {"role": "assistant", "content": "I call weather_query_001."},
        {"role": "tool", "tool_id": "weather_query_001", "content": "-7"},
        {"role": "assistant", "content": "Yes."},
    ]
    line = json.loads(entry_of_line(json.dumps({"turns": turns}).encode(), Path("a"), datetime.now(UTC)).line)
    config = round_config(tmp_path, training={"stages": ["sft"]})
    reply = round_task(line, config, is_accepted=True).reply
    assert [(message["role"], message.get("weight")) for message in reply] == [
        ("assistant", 0),
        ("tool", None),
        ("assistant", None),
    ]


async def test_a_task_with_recordings_is_told_with_its_steps(tmp_path: Path, store: Store) -> None:
    failed = ("tool add: TimeoutError: none came",)
    thought = {**said(call(arguments=SUM, call_id="c")), "reasoning_content": "I cannot add."}
    answer = {"role": "tool", "tool_call_id": "c", "name": "add", "content": "TimeoutError: none came"}
    with_tools, thinking, plain = replies_on(Split.TRAIN, 3)
    await judged(
        store,
        replace(with_tools, tools=(ADD,), trajectory=steps((call(arguments=SUM), "3"))),
        replace(thinking, tools=(ADD,), trajectory=(thought, answer), errors=failed),
        plain,
        *replies_on(Split.HELD_OUT, 1),
    )
    spec = await planned_round(store, round_config(tmp_path))
    first, second, third = spec.train
    assert [task.agent for task in spec.train] == ["recorded", "recorded", "reply"]
    assert [step["role"] for step in first.steps] == ["assistant", "tool"]
    assert (first.errors, first.sends_reasoning) == ((), False)
    assert (second.steps, second.errors, second.sends_reasoning) == ((thought, answer), tuple(failed), True)
    assert (third.steps, third.errors, third.sends_reasoning) == ((), (), False)
    again = RoundSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    spec = await spec_again(store, round_config(tmp_path, rollout={"agent": "recorded"}))
    assert [task.agent for task in spec.train] == ["recorded"] * 3


@pytest.mark.parametrize("stages", [["sft"], ["grpo"]])
async def test_replies_that_people_accept_are_imitated_whatever_the_judge_said(
    tmp_path: Path, store: Store, stages: list[str]
) -> None:
    """By most people, whose last labels count. A round with a result has such a task once; no label changes one."""
    replies = [*replies_on(Split.TRAIN, 6), *replies_on(Split.HELD_OUT, 2)]
    names = ["right", "disliked", "disputed", "wrong", "liked", "doubtful", "held", "held_liked"]
    keys = {name: task_id(each.trace_id, each.span_id) for name, each in zip(names, replies, strict=True)}
    right = {keys[name] for name in ("right", "disliked", "disputed", "held")}
    await judged(store, *replies, judge=lambda line: accepted() if line["task_id"] in right else rejected())
    for name, label, by in (
        ("disliked", Label.ACCEPT, "ann"), ("disliked", Label.REJECT, "ann"), ("liked", Label.ACCEPT, "ann"),
        ("disputed", Label.ACCEPT, "ann"), ("disputed", Label.REJECT, "bob"), ("doubtful", Label.UNSURE, "ann"),
        ("held_liked", Label.ACCEPT, "ann"),
    ):  # fmt: skip
        await store.write(labels.add, keys[name], label, by)
    await store.write(labels.add, keys["wrong"], Label.ACCEPT, "ann", criterion="correct")
    config = round_config(tmp_path, training={"stages": stages})
    spec = await planned_round(store, config)
    tasks = {task.task_id: task for task in (*spec.train, *spec.held_out)}
    imitated = {name for name, each in keys.items() if each in tasks and tasks[each].reply}
    assert imitated == ({"right", "disputed", "liked", "held", "held_liked"} if stages == ["sft"] else set())
    assert {name for name, each in keys.items() if each in tasks and tasks[each].exchange.reference} == (
        {"right", "disputed", "held", "held_liked"} | ({"liked"} if stages == ["sft"] else set())
    )
    assert (keys["liked"] in tasks) == (stages == ["sft"])
    of_people = await store.read(samples.accepted_by_people, 9)
    assert len(of_people) == 1
    for state, left in ((RoundState.FAILED, of_people), (RoundState.REJECTED, [])):
        await store.write(lambda conn, state=state: conn.execute(update(schema.rounds).values(state=state.value)))
        assert await store.read(samples.accepted_by_people, 9) == (left if stages == ["sft"] else of_people)
    states = await store.read(lambda conn: dict(conn.execute(select(schema.tasks.c.key, schema.tasks.c.state)).all()))
    assert states[keys["liked"]] == states[keys["held_liked"]] == TaskState.REJECTED
    assert states[keys["disliked"]] == TaskState.RESERVED


async def test_people_say_which_reply_of_a_pair_is_the_better_one(tmp_path: Path, store: Store) -> None:
    """Against the judge, whose scores differ the other way around."""
    first, second = (
        replace(one, query="What now?", answer=answer)
        for one, answer in zip(replies_on(Split.TRAIN, 2), ("judge's", "people's"), strict=True)
    )
    replies = (first, second, *replies_on(Split.HELD_OUT, 1))
    await judged(store, *replies, judge=lambda line: rejected() if line["answer"] == "people's" else accepted())
    for one, label in ((first, Label.REJECT), (second, Label.ACCEPT)):
        await store.write(labels.add, task_id(one.trace_id, one.span_id), label, "ann")
    spec = await planned_round(store, round_config(tmp_path, training={"stages": ["dpo"]}))
    pairs = [(task.reply[-1]["content"], task.rejected[-1]["content"]) for task in spec.train]
    assert pairs == [("people's", "judge's")] * 2
    assert {(task.reply_task_id, task.rejected_task_id) for task in spec.train} == {(_id(second), _id(first))}


async def test_the_reasoning_of_an_answer_is_imitated_with_it(tmp_path: Path, store: Store) -> None:
    thought, plain = replies_on(Split.TRAIN, 2)
    await judged(store, replace(thought, reasoning="1 and 1."), plain, *replies_on(Split.HELD_OUT, 1))
    spec = await planned_round(store, round_config(tmp_path, training={"stages": ["sft"]}))
    [[answer], [other]] = (task.reply for task in spec.train)
    assert answer == {"role": "assistant", "content": thought.answer, "reasoning_content": "1 and 1."}
    assert other == {"role": "assistant", "content": plain.answer}


async def test_the_reasoning_of_steps_is_imitated_and_the_agent_does_not_send_it(
    tmp_path: Path, store: Store
) -> None:
    thought = {**said(call(arguments=SUM, call_id="c")), "reasoning_content": "I add.", "reasoning_sent": False}
    result = {"role": "tool", "tool_call_id": "c", "name": "add", "content": "3"}
    [one] = replies_on(Split.TRAIN, 1)
    await judged(store, replace(one, tools=(ADD,), trajectory=(thought, result)), *replies_on(Split.HELD_OUT, 1))
    spec = await planned_round(store, round_config(tmp_path, training={"stages": ["sft"]}))
    [task] = spec.train
    assert task.reply == (thought, result, {"role": "assistant", "content": one.answer})
    assert not task.sends_reasoning


@pytest.mark.parametrize(("arguments", "is_pair"), [(SUM, False), ('{"a": 2, "b": 5}', True)])
async def test_replies_with_the_same_calls_are_no_pair(
    tmp_path: Path, store: Store, arguments: str, is_pair: bool
) -> None:
    """Whatever the ids of these calls: each reply has its own."""
    first, second = (
        replace(one, query="What now?", answer="3", tools=(ADD,), trajectory=tuple(steps((made, "3"))))
        for one, made in zip(
            replies_on(Split.TRAIN, 2),
            (call(arguments=SUM, call_id="c1"), call(arguments=arguments, call_id="c2")),
            strict=True,
        )
    )
    worse = task_id(second.trace_id, second.span_id)
    await judged(
        store, first, second, *replies_on(Split.HELD_OUT, 1),
        judge=lambda line: rejected() if line["task_id"] == worse else accepted(),
    )  # fmt: skip
    spec = await planned_round(store, round_config(tmp_path, training={"stages": ["dpo"]}))
    assert [task.has_pair for task in spec.train] == [is_pair]


async def test_the_users_agent_gets_the_own_keys_of_a_task_without_personal_data(
    tmp_path: Path, store: Store
) -> None:
    own = {"database": "shop.db", "metadata": {"owner": "jane.doe@example.org", "start_page": "/shoes"}}
    await judged(
        store, *(replace(one, extra=own) for one in replies_on(Split.TRAIN, 1)), *replies_on(Split.HELD_OUT, 1)
    )
    program = {"rollout": {"agent": {"command": ["true"]}}}
    spec = await planned_round(store, round_config(tmp_path, **program))
    assert spec.train[0].line["database"] == "shop.db"
    assert spec.train[0].line["metadata"]["owner"] == "jane.doe@example.org"
    assert spec.train[0].line["metadata"]["conversation_id"] == spec.train[0].conversation
    spec = await spec_again(store, round_config(tmp_path, **program, **with_chain(tmp_path, {"type": "pii"})))
    assert spec.train[0].line["metadata"]["owner"] == "[EMAIL_1]"
    assert spec.train[0].line["metadata"]["start_page"] == "/shoes"
    assert (await spec_again(store, round_config(tmp_path))).train[0].line == {}


async def test_a_rollout_is_graded_by_the_ground_truth_of_its_task(tmp_path: Path, store: Store) -> None:
    truth = {"target_tools": ["add"], "optimal_steps": 1}
    own = {"metadata": {"ground_truth": truth, "note": "by hand"}}
    await judged(
        store,
        *(replace(one, extra=own, tools=(ADD,)) for one in asked(Split.TRAIN, "3")),
        *replies_on(Split.HELD_OUT, 1),
    )
    spec = await planned_round(store, round_config(tmp_path))
    # As the worker reads it.
    [task] = RoundSpec.model_validate_json(spec.model_dump_json()).train
    assert task.exchange.line == {"metadata": {"ground_truth": truth}}
    assert spec.held_out[0].exchange.line == {}
    raw = [{"id": "tools", "type": "expected-tools"}, {"id": "steps", "type": "optimal-steps"}]
    rubric = Rubric.model_validate({"id": "r", "criteria": raw})
    for calls, values in ((1, [1, 1]), (2, [1, 0.5]), (0, [0, 0])):
        trajectory = steps(*[(call(arguments=SUM), "3")] * calls)
        shown = exchange(Prompt(task, ()), Completion("3", steps=trajectory))
        assert [each.value for each in check_all(rubric, shown)] == values


async def test_results_of_other_traces_are_those_on_which_two_conversations_agree(
    tmp_path: Path, store: Store
) -> None:
    """Also of rejected answers: the results of their tools are as good. Training reads its own split only."""
    other = tool("look_up")
    train = asked(Split.TRAIN, "3", "3", "3")
    looked_up = {"tools": (ADD, other)}
    held_out = asked(Split.HELD_OUT, "3", "3", **looked_up)
    both = [replace(each, trajectory=(*each.trajectory, *steps((call("look_up", {}), "x")))) for each in held_out]
    spans = {train[1].span_id, both[1].span_id}

    def verdict(line: dict[str, Any]) -> Verdict:
        return rejected() if line["metadata"]["span_id"] in spans else accepted()

    await judged(store, *train, *both, judge=verdict)
    spec = await planned_round(store, round_config(tmp_path))
    assert len(spec.train) == 2 and len(spec.held_out) == 2
    assert spec.shared.results == {key(SUM): ToolResult("3")}
    assert spec.shared_gate.results == {key(SUM): ToolResult("3"), key({}, other): ToolResult("x")}
    # Each says whose it is: it is removed with that task.
    assert {each.task_id for each in spec.shared.results.values()} < {_id(each) for each in train}
    assert spec.shared_gate.results[key({}, other)].task_id in {_id(each) for each in both}


def _id(one: Reply) -> str:
    return task_id(one.trace_id, one.span_id)


async def test_training_reads_no_held_out_trace_whatever_its_line_says(tmp_path: Path, store: Store) -> None:
    """The split in a line is provisional: the ledger decides it."""
    await judged(store, *asked(Split.TRAIN, "3"), *asked(Split.HELD_OUT, "3", "3"))

    def lines_say_train(conn: Connection) -> None:
        changed_line = func.json_set(schema.tasks.c.payload, "$.metadata.split", "train")
        conn.execute(update(schema.tasks).values(payload=changed_line))

    await store.write(lines_say_train)
    spec = await planned_round(store, round_config(tmp_path))
    assert spec.shared.results == {}
    assert spec.shared_gate.results == {key(SUM): ToolResult("3")}


async def test_a_held_out_trace_that_differs_is_seen_by_the_gate_alone(tmp_path: Path, store: Store) -> None:
    await judged(store, *asked(Split.TRAIN, "3", "3"), *asked(Split.HELD_OUT, "4"))
    spec = await planned_round(store, round_config(tmp_path))
    assert spec.shared.results == {key(SUM): ToolResult("3")}
    assert spec.shared_gate.results == {}


@pytest.mark.parametrize(("tools", "shares"), [({}, True), ({"share": "off"}, False)])
async def test_sharing_can_be_off(tmp_path: Path, store: Store, tools: dict[str, Any], *, shares: bool) -> None:
    await judged(store, *asked(Split.TRAIN, "3", "3"), *asked(Split.HELD_OUT, "3"))
    spec = await planned_round(store, round_config(tmp_path, rollout={"tools": tools}))
    assert bool(spec.shared.results) == bool(spec.shared_gate.results) == shares
    assert RoundSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize("rollout", [{}, {"agent": "reply"}])
async def test_without_recorded_tasks_no_recording_is_read(
    tmp_path: Path, store: Store, rollout: dict[str, Any]
) -> None:
    plain = replies_on(Split.TRAIN, 6)[4:]
    of_gate = replies_on(Split.HELD_OUT, 6)[4:]
    none = asked(Split.TRAIN, None, None) if not rollout else asked(Split.TRAIN, "3", "3")
    await judged(store, *plain, *of_gate, *none)
    config = round_config(tmp_path, rollout=rollout)
    rubric = rubric_of(config)
    row = await store.write(planner.plan, config, rubric, config.state_dir / "rounds", "test")

    def statements(conn: Connection) -> list[str]:
        found: list[str] = []
        event.listen(conn, "before_cursor_execute", lambda *told: found.append(told[2]))
        spec = planner.spec_of(conn, row, config, rubric)
        assert (len(spec.train), spec.shared.results, spec.shared_gate.results) == (2, {}, {})
        return found

    assert not any("LIKE" in each for each in await store.read(statements))


async def test_recordings_are_redacted_as_the_tasks_of_the_round_are(tmp_path: Path, store: Store) -> None:
    """A policy that sees redacted questions makes calls with redacted arguments."""
    to_jo = {"a": "jo@example.com"}
    told = [
        replace(each, trajectory=steps((call(arguments=to_jo), "sent to jo@example.com")))
        for each in asked(Split.TRAIN, "", "") + asked(Split.HELD_OUT, "", "")
    ]
    await judged(store, *told)
    spec = await planned_round(store, round_config(tmp_path, **with_chain(tmp_path, {"type": "pii"})))
    assert "jo@example.com" not in spec.model_dump_json()
    expected = {key({"a": "[EMAIL_1]"}): ToolResult("sent to [EMAIL_1]")}
    assert spec.shared.results == spec.shared_gate.results == expected


async def test_what_a_filter_or_a_person_set_aside_is_no_recording_but_repetitions_are(
    tmp_path: Path, store: Store
) -> None:
    """A repeated question is set aside because there is another one like it. Undecided tasks are none either."""
    first, by_filter, repeated, pending = asked(Split.TRAIN, "3", "3", "3", "3")

    def set_aside(conn: Connection) -> None:
        put_replies(conn, first, by_filter, repeated, *asked(Split.HELD_OUT, "3"))
        tasks = claims.claim(conn, 1000, "r", "j")
        stopped = Verdict(Outcome.REJECTED, 0.0, reason="pii: an email address")
        for place, task in enumerate(tasks):
            verdict = stopped if place in (1, 2) else accepted()
            verdicts.store(conn, task.id, verdict, "chain:c" if place in (1, 2) else "r", "j")
            claims.apply(conn, task.id, verdict, 0.0)
        put_replies(conn, pending, rowid=9)

    def repeats(conn: Connection) -> None:
        ids = list(conn.execute(select(schema.tasks.c.id).order_by(schema.tasks.c.id)).scalars())
        about = {"similarity": 1.0, "method": "exact", "created_at": "2026-01-01"}
        conn.execute(insert(schema.duplicates).values(task_id=ids[2], original_id=ids[0], **about))

    await store.write(set_aside)
    config = round_config(tmp_path)
    spec = await planned_round(store, config)
    assert spec.shared.results == {}
    await store.write(repeats)
    assert (await spec_again(store, config)).shared.results == {key(SUM): ToolResult("3")}


async def test_a_task_whose_calls_are_all_of_finish_tools_is_left_out_with_the_reason(
    tmp_path: Path, store: Store
) -> None:
    """Which functions finish is known when the round starts, not when the trace was read."""
    submit = tool("submit", text={"type": "string"})
    submitted = [
        replace(each, trajectory=steps((call("submit", {"text": "3"}), "thanks")))
        for each in asked(Split.TRAIN, "", tools=(ADD, submit)) + asked(Split.HELD_OUT, "", "", tools=(ADD, submit))
    ]
    (added,) = asked(Split.TRAIN, None, "3")[1:]
    await judged(store, *submitted, added)
    names = await store.read(lambda conn: conn.execute(select(schema.tasks.c.key, schema.tasks.c.split)).all())
    rollout = {"finish_tools": ["generate_response", "submit"]}
    config = round_config(tmp_path, rollout=rollout)
    spec = await planned_round(store, config)
    left_out = next(row.key for row in names if row.split == "train" and row.key not in {spec.train[0].task_id})
    assert spec.left_out == {left_out: "the agent called no tool but those of `rollout.finish_tools`"}
    assert len(spec.train) == 1
    # Accepted answers without another call are questions for the gate.
    assert len(spec.held_out) == 2
    use = round_config(tmp_path, rollout={**rollout, "tools": {"uncalled": "use"}})
    assert len((await spec_again(store, use)).train) == 2
    every = round_config(tmp_path, rollout={"finish_tools": ["submit", "add"]})
    with pytest.raises(TrainError, match=r"start r0001: none of its 2 tasks can be used: the agent called no tool"):
        await spec_again(store, every)


async def test_the_gate_leaves_out_what_was_rejected_and_has_no_other_call(tmp_path: Path, store: Store) -> None:
    submit = tool("submit", text={"type": "string"})
    held_out = [
        replace(each, trajectory=steps((call("submit", {"text": "3"}), "thanks")))
        for each in asked(Split.HELD_OUT, "", "", tools=(ADD, submit))
    ]

    def verdict(line: dict[str, Any]) -> Verdict:
        return rejected() if line["metadata"]["span_id"] == held_out[0].span_id else accepted()

    await judged(store, *asked(Split.TRAIN, "3"), *held_out, judge=verdict)
    spec = await planned_round(store, round_config(tmp_path, rollout={"finish_tools": ["submit"]}))
    assert len(spec.held_out) == 1
    assert spec.left_out == {}


async def test_tasks_of_a_planned_round_are_not_asked_if_rollouts_are_single_messages_now(
    tmp_path: Path, store: Store
) -> None:
    await judged(store, *asked(Split.TRAIN, "3"), *replies_on(Split.TRAIN, 2)[1:], *replies_on(Split.HELD_OUT, 1))
    await planned_round(store, round_config(tmp_path))
    spec = await spec_again(store, round_config(tmp_path, rollout={"agent": "reply"}))
    assert [task.agent for task in spec.train] == ["reply"]
    assert list(spec.left_out.values()) == [
        "the agent called tools, and with `rollout.agent: reply` a rollout is a single message"
    ]


async def test_a_specification_has_room_for_the_most_frequent_results(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = "x" * 60, "y" * 30

    def sums(each: Reply, *numbers: int) -> Reply:
        made_calls = ((call(arguments={"a": number}), short if number != 1 else long) for number in numbers)
        return replace(each, trajectory=steps(*made_calls))

    first, second, third = asked(Split.TRAIN, "", "", "")
    told = sums(first, *range(8)), sums(second, *range(8)), sums(third, 0, 2)
    await judged(store, *told, *asked(Split.HELD_OUT, "3"))
    monkeypatch.setattr(recordings, "MAX_BYTES", 70)
    spec = await planned_round(store, round_config(tmp_path))
    assert spec.shared.results == {key({"a": 0}): ToolResult(short), key({"a": 2}): ToolResult(short)}


@pytest.mark.slow
async def test_the_specification_stays_small_however_many_tasks_there_are(tmp_path: Path, store: Store) -> None:
    """It is kept for ever. 20,000 traces of two conversations each have 20 MB of results that agree."""
    number = "8" * 9
    (one,) = asked(Split.TRAIN, "x")
    (gate,) = asked(Split.HELD_OUT, "x")
    made_steps = steps((call(arguments={"a": int(number)}), f"{number} {'x' * 2000}"))
    await judged(store, replace(one, trajectory=made_steps, conversation_id=f"c-{number}"), gate)

    def multiply(conn: Connection) -> None:
        columns = [each.name for each in schema.tasks.c if each.name not in ("id", "key", "payload", "split")]
        conn.exec_driver_sql(
            "WITH RECURSIVE n(i) AS (SELECT 10 UNION ALL SELECT i + 1 FROM n WHERE i < 20009) "
            f"INSERT INTO tasks (id, key, payload, split, {', '.join(columns)}) SELECT i, 't-' || i, "
            f"replace(replace(payload, 'c-{number}', 'c-' || i), '{number}', printf('%d', 100000000 + i / 2)), "
            f"'train', {', '.join(columns)} FROM n, tasks WHERE tasks.id = 1"
        )

    await store.write(multiply)
    spec = await planned_round(store, round_config(tmp_path, training={"steps": 50}))
    assert len(spec.train) == 400
    assert len(spec.shared.results) == recordings.MAX_BYTES // 2010
    assert len(spec.model_dump_json()) < 2.5 * recordings.MAX_BYTES


async def test_the_tasks_of_the_gate_are_chosen_when_the_round_is_planned(tmp_path: Path, store: Store) -> None:
    """By their traces and verdicts, before any adapter has answered: those with recordings, right or wrong, and those
    without a call whose answers were accepted."""
    recorded, wrong, uncalled, wrong_uncalled, late = asked(Split.HELD_OUT, "3", "3", None, None, "3")
    (plain,) = replies_on(Split.HELD_OUT, 6)[5:]
    spans = {wrong.span_id, wrong_uncalled.span_id}

    def verdict(line: dict[str, Any]) -> Verdict:
        return rejected() if line["metadata"]["span_id"] in spans else accepted()

    train = asked(Split.TRAIN, "3")
    await judged(store, *train, recorded, wrong, uncalled, wrong_uncalled, plain, judge=verdict)
    config = round_config(tmp_path)
    first = await planned_round(store, config)
    keys = {each.span_id: task_id(each.trace_id, each.span_id) for each in (recorded, wrong, uncalled, plain)}
    assert {task.task_id for task in first.held_out} == set(keys.values())
    answers = {task.task_id: task.exchange.reference for task in first.held_out}
    assert answers[keys[wrong.span_id]] == "" and answers[keys[uncalled.span_id]]
    agents = {task.task_id: task.agent for task in first.held_out}
    assert agents == {**dict.fromkeys(keys.values(), "recorded"), keys[plain.span_id]: "reply"}
    await judged(store, late)
    assert (await spec_again(store, config)).held_out == first.held_out


async def test_the_judge_of_rollouts_is_given_the_history_that_the_judge_of_traces_had(
    tmp_path: Path, store: Store
) -> None:
    """Behind the question, the model may have been sent more, like AgentScope's reminder."""
    [one] = replies_on(Split.TRAIN, 1)
    history = ({"role": "system", "content": "Add."},)
    reminder = {"role": "user", "content": "<system-reminder>It is noon.</system-reminder>"}
    prompt = (*history, {"role": "user", "content": one.query}, reminder)
    await judged(store, replace(one, history=history, prompt=prompt), *replies_on(Split.HELD_OUT, 1))
    spec = await planned_round(store, round_config(tmp_path))
    assert spec.train[0].prompt == list(prompt)
    assert exchange(Prompt(spec.train[0], ()), Completion("3")).history == history


@pytest.mark.parametrize(("scores", "is_pair"), [((0.9, 0.6, 0.3, 0.5), True), ((0.62, 0.6, 0.59, 0.58), False)])
async def test_the_best_and_the_worst_recorded_reply_to_a_prompt_are_a_pair(
    tmp_path: Path, store: Store, scores: tuple[float, ...], is_pair: bool
) -> None:
    answers = [
        replace(one, query="What now?", answer=f"answer {n}") for n, one in enumerate(replies_on(Split.TRAIN, 4))
    ]
    alone = replies_on(Split.TRAIN, 5)[4:]
    by_answer = dict(zip([one.answer for one in answers], scores, strict=True))

    def verdict(line: dict[str, Any]) -> Verdict:
        score = by_answer[line["answer"]]
        return Verdict(Outcome.ACCEPTED if score >= 0.6 else Outcome.REJECTED, score, calls=1)

    await judged(store, *answers, judge=verdict)
    await judged(store, *alone, *replies_on(Split.HELD_OUT, 1))
    training = {"training": {"stages": ["dpo"]}}
    spec = await planned_round(store, round_config(tmp_path, **training))
    texts = [tuple(part[-1]["content"] for part in (task.reply, task.rejected) if part) for task in spec.train]
    own = [("answer 0", "answer 2")] * 2 if is_pair else [("answer 0",), ("answer 1",)]
    assert texts == [*own, (alone[0].answer,)]
    assert all(task.rejected == () for task in spec.held_out)
