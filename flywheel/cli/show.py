"""`flywheel show`, `why` and `rollouts`: what an id names, with its texts, or with what became of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from flywheel.cli.app import ConfigOption, JsonOption, app, load_config, print_json, read_state, run_async
from flywheel.cli.tables import criterion_lines
from flywheel.config.file import Config
from flywheel.daemon import evaluation_log
from flywheel.errors import StoreError
from flywheel.records.round import RoundSelection
from flywheel.store.views import erased_samples, lineage
from flywheel.store.views.task_list import detail, of_subject
from flywheel.system.terminal import escape_terminal, excerpt, moment, quantity, score_text
from flywheel.training.data.rollout_file import DROPPED, conversations

EXCERPT: Final = 60
"""Characters of a question or an answer in the list of a debug round."""
PROMPT_SHOWN: Final = 300
"""Characters of a system prompt."""

TaskOption = Annotated[str | None, typer.Option(metavar="ID", help="Only rollouts of this task.")]
StepOption = Annotated[int | None, typer.Option(metavar="N", min=1, help="Only rollouts of this step.")]
TokensOption = Annotated[
    bool, typer.Option("--tokens", help="With --json: include tokens and their log-probabilities of rollouts.")
]


@app.command()
def show(
    subject: Annotated[
        str,
        typer.Argument(metavar="ID", help="A task, span, trace, conversation, round (`r0007`), adapter, or `debug`."),
    ],
    rollouts: Annotated[bool, typer.Option("--rollouts", help="The rollouts of a round.")] = False,
    task: TaskOption = None,
    step: StepOption = None,
    tokens: TokensOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a task in full with its verdict, what became of a reply that is none, or a round with its adapter."""
    settings = load_config(config)
    given = {"--task": task, "--step": step, "--tokens": tokens or None}
    is_debug = subject == "debug"
    rows: Sequence[Any] = ()
    if not rollouts:
        rows = run_async(read_state(settings, lambda conn: of_subject(conn, subject), warn=False))
    if not rows and (rollouts or is_debug):
        _show_rollouts(settings, subject.rpartition("@")[2], task, step, tokens=tokens, as_json=as_json)
        return
    if misplaced := [name for name, value in given.items() if value is not None]:
        raise typer.BadParameter("it goes with --rollouts", param_hint=misplaced[0])
    if not rows:
        _show_story(settings, subject, f"show {subject}", as_json=as_json)
    elif as_json:
        print_json({"tasks": [detail(row) for row in rows]})
    else:
        typer.echo("\n\n".join(_whole(escape_terminal(detail(row))) for row in rows))


@app.command()
def why(
    subject: Annotated[
        str, typer.Argument(metavar="ID", help="An adapter, round, task, trace, span or conversation.")
    ],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the conversations that an adapter was trained on, or the outcome of a trace."""
    _show_story(load_config(config), subject, f"explain {subject}", as_json=as_json)


@app.command()
def rollouts(
    name: Annotated[str, typer.Argument(metavar="ROUND", help="A round (`r0007`), or `debug`.")],
    task: TaskOption = None,
    step: StepOption = None,
    tokens: TokensOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the rollouts of a round, as `show --rollouts`: conversations, rewards and failed criteria."""
    _show_rollouts(load_config(config), name, task, step, tokens=tokens, as_json=as_json)


def _show_story(settings: Config, subject: str, attempted: str, *, as_json: bool) -> None:
    """What an adapter was trained on, or what became of replies."""
    story = run_async(read_state(settings, lambda conn: lineage.why(conn, subject, settings.takes)))
    if story is None:
        raise StoreError(
            attempted,
            "no round, adapter, task, trace, span or conversation has this id",
            "Ids are in tasks.jsonl, in `flywheel tasks`, `flywheel filter` and `flywheel status`.",
        )
    if story["kind"] == "round":
        adapter = story["adapter"]
        story["evaluations"] = evaluation_log.read(settings.state_dir, adapter["sha256"]) if adapter else []
        every = run_async(read_state(settings, erased_samples.affected, warn=False))
        erased = next((each for each in every if each.adapter == story["id"]), None)
        story["erased"] = erased and {"sentence": erased.sentence, **erased.as_json()}
    names = [reply.pop("name") for reply in story.get("replies", ())]
    if as_json:
        print_json(story)
        return
    names, story = escape_terminal((names, story), one_line=True)
    lines = _round_lines(story) if story["kind"] == "round" else map(_outcome, names, story["replies"])
    for line in lines:
        typer.echo(line)


def _show_rollouts(
    settings: Config, name: str, task: str | None, step: int | None, *, tokens: bool, as_json: bool
) -> None:
    """The rollouts of a round by their prompts, each with the conversation, the reward and the failed criteria."""
    if tokens and not as_json:
        raise typer.BadParameter("it requires --json; `flywheel web` shows tokens", param_hint="--tokens")
    groups = conversations(settings.state_dir, name, task, step, with_samples=tokens)
    if as_json:
        print_json({"round": name, "groups": list(groups)})
        return
    is_empty = True
    for group in groups:
        typer.echo("\n".join(_group_lines(escape_terminal(group))))
        is_empty = False
    if is_empty:
        asked = " and ".join(filter(None, (f"task {task}" if task else "", f"step {step}" if step else "")))
        why = f"none is of {asked}" if asked else "there is none yet"
        raise StoreError(f"show rollouts of {name}", why, f"`flywheel rollouts {name}` shows all.")


def short_lines(rollouts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Reward, number of steps, failed criteria, question and answer of each rollout."""
    for each in escape_terminal(list(rollouts)):
        failed = ", ".join(each["failed"]) or excerpt(each["error"], EXCERPT)
        facts = (f"reward {score_text(each['reward'])}", quantity(len(each["steps"]), "step"), failed)
        yield ", ".join(filter(None, facts))
        yield f"  {excerpt(each['question'], EXCERPT)} → {excerpt(each['answer'], EXCERPT) or '(empty)'}"


def _section(name: str, text: str, indent: str = "") -> list[str]:
    """A text below its name; nothing without a text."""
    return [f"{indent}{name}", *(f"{indent}  {line}" for line in text.splitlines())] if text else []


def turns(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as lines: who says what, and who calls which tool."""
    lines = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") or call
            lines.append(f"[{message.get('role')} calls {function.get('name')}] {function.get('arguments')}")
        if message.get("content"):
            # Some agents give each message a name, their users' and systems' that of the role.
            name = f" {message['name']}" if message.get("name") not in (None, "", message.get("role")) else ""
            lines.append(f"[{message.get('role')}{name}] {message['content']}")
    return "\n".join(lines)


def _criterion(result: Mapping[str, Any]) -> str:
    chosen = f": {result['choice']}" if result["choice"] else ""
    return f"{'✓' if result['passed'] else '✗'} {result['criterion']}{chosen}  {result['reason']}".rstrip()


def _whole(task: dict[str, Any]) -> str:
    """A task in full."""
    who = [f"agent {task['agent']}" if task["agent"] else "", task["adapter"] or task["model"]]
    facts = ", ".join(filter(None, (task["split"], *who, f"{moment(task['started_at'])} UTC")))
    sections = {
        "History": turns(task["history"]),
        "Question": task["question"],
        "Steps": turns(task["steps"]),
        "Answer": task["answer"] or "(empty)",
        "Reference": task["reference"],
        f"Quotes of {task.get('document')}": "\n".join(f"“{quote}”" for quote in task.get("quotes", ())),
        "Verdict": "\n".join(_verdict(task["verdict"])),
    }
    parts = ["\n".join(_section(name, text)) for name, text in sections.items()]
    return "\n\n".join([f"{task['task_id']}: {task['state']} ({facts})", *filter(None, parts)])


def _verdict(verdict: dict[str, Any] | None) -> Iterator[str]:
    if verdict is None:
        yield "not judged yet"
        return
    score = "" if verdict["score"] is None else f", score {verdict['score']:.2f}"
    yield f"{verdict['outcome']}{score} ({moment(verdict['at'])} UTC)"
    yield from map(_criterion, verdict["criteria"])
    if verdict["reason"] and not any(each["reason"] for each in verdict["criteria"]):
        yield verdict["reason"]


def _group_lines(group: Mapping[str, Any]) -> Iterator[str]:
    """The rollouts of one prompt."""
    members = group["rollouts"]
    rewards = [item["reward"] for item in members if item["reward"] is not None]
    mean = f", mean reward {math.fsum(rewards) / len(rewards):.2f}" if rewards else ", no reward"
    yield f"\nstep {group['step']}, {group['task_id']}: {quantity(len(members), 'rollout')}{mean}"
    if group["dropped"]:
        yield f"  not trained on: {DROPPED.get(group['dropped'], group['dropped'])}"
    yield from _section("Prompt", turns(group["prompt"]), "  ")
    for number, rollout in enumerate(members, 1):
        facts = [f"reward {score_text(rollout['reward'])}"]
        if rollout["advantage"] is not None:
            facts.append(f"advantage {rollout['advantage']:+.2f}")
        facts += filter(None, ("truncated" if rollout["truncated"] else "", rollout.get("loop")))
        if program := rollout.get("program"):
            own = {} if program["reward"] is None else {"own reward": program["reward"]}
            facts += [f"{name} {value:.6g}" for name, value in {**own, **program["metrics"]}.items()]
        yield f"  {number}. {', '.join(facts)}, seed {rollout['seed']}"
        yield from _section("Steps", turns(rollout["steps"]), "    ")
        yield from _section("Answer", rollout["answer"] or "(empty)", "    ")
        yield from (f"    {_criterion(item)}" for item in rollout["criteria"] if not item["passed"])
        if rollout["error"]:
            yield f"    no reward: {rollout['error']}"


def _round_lines(story: dict[str, Any]) -> Iterator[str]:

    yield f"{story['id']}: {story['state']}{' – ' + story['reason'] if story['reason'] else ''}"
    yield f"started because: {story['trigger']}; attempt {story['attempt']}, seed {story['seed']}"
    if target := story.get("target"):
        yield f"trained for: {target}"
    # Without samples, the round has only compared another trainer's adapter with its parent.
    trains = story["samples"] or story["left_out"] or not story["held_out"]
    yield f"{'continues' if trains else 'compared with'}: {story['parent'] or 'the base model'}"
    if adapter := story["adapter"]:
        removed = ", its files were removed" if adapter["state"] == "removed" else ""
        yield f"adapter: {adapter['path']} (sha256 {adapter['sha256'][:12]}…{removed})"
    if story["erased"]:
        yield story["erased"]["sentence"]
    if comparison := story["comparison"]:
        means = f"{comparison['deployed_mean']:.3f} → {comparison['candidate_mean']:.3f}"
        gain = f"{comparison['gain']:+.3f} ({comparison['lower']:+.3f} … {comparison['upper']:+.3f})"
        yield f"held-out: {means} on {quantity(comparison['tasks'], 'task')}, gain {gain}"
        yield from criterion_lines(comparison)
    if evaluations := story["evaluations"]:
        yield evaluation_log.sentence(evaluations)
    if usage := story["usage"]:
        tokens = f"{usage['judge_prompt_tokens']:,} tokens sent, {usage['judge_completion_tokens']:,} received"
        yield f"judged: {usage['judge_calls']:,} calls for {usage['rollouts']:,} rollouts, {tokens}"
    yield from _sampling_lines(story["sampling"], story["selection"])
    for entry in story["deployments"]:
        yield f"deployed as {entry['alias']}: {entry['state']} since {entry['activated_at'] or '–'}"
    for watch in story["watches"]:
        until = f"until {watch['ended_at']}" if watch["ended_at"] else "now"
        reason = f" – {watch['reason']}" if watch["reason"] else ""
        yield f"watched beside {watch['other'] or 'the base model'} {until}: {watch['state']}{reason}"
    if not trains:
        return
    conversations = quantity(len(story["conversations"]), "conversation")
    yield f"made of {quantity(len(story['samples']), 'sample')} from {conversations}:"
    for sample in story["samples"]:
        replayed = "  replayed" if sample["replayed"] else ""
        yield f"  {sample['task_id']}  {sample['conversation_id']}  {sample['agent']}{replayed}"
    if released := story["released"]:
        yield f"released {quantity(released, 'sample')} of its pool: it took others, by their loss or diversity"
    yield from (f"excluded {task}: {reason}" for task, reason in story["left_out"].items())


def _sampling_lines(sampling: dict[str, Any] | None, selection: dict[str, Any] | None) -> Iterator[str]:

    if selection is not None:
        yield from (f"selected {each}" for each in RoundSelection.model_validate(selection).sentences)
    if sampling is None:
        return
    steps, prompts = quantity(sampling["steps"], "step"), quantity(sampling["prompts"], "prompt")
    size, temperature = quantity(sampling["group_size"], "rollout"), sampling["temperature"]
    yield f"rollouts: {steps} × {prompts} × {size}, temperature {temperature:g}"
    for found in sampling["system_prompts"]:
        text = excerpt(found["text"], PROMPT_SHOWN) or "(none)"
        yield f"system prompt of {quantity(found['rollouts'], 'rollout')}: {text}"
    if further := sampling["further_system_prompts"]:
        yield f"and {quantity(further, 'further system prompt')}"


def _outcome(name: str, reply: dict[str, Any]) -> str:
    """What became of a reply."""
    whose = ", ".join(filter(None, (reply["agent"], reply["source"])))
    lines = [f"{name} of trace {reply['trace_id']} ({whose})"]
    if (task := reply["task"]) is None:
        return "\n".join([*lines, f"  {reply['state']}: {reply['skip_reason'] or ''} {reply['detail']}".rstrip()])
    of = f" of {task['target']}" if task.get("target") else ""
    lines.append(f"  task {task['task_id']}{of}: {task['state']}, {task['split']}")
    if repeats := task["repeats"]:
        lines.append(f"  repeats {repeats['task_id']} ({repeats['method']}, {repeats['similarity']:.2f})")
    lines += [f"  excluded from rounds: {each['why']}" for each in task["left_out"]]
    for verdict in task["verdicts"]:
        reason = verdict["reason"] or verdict["error"]
        lines.append(f"  verdict: {verdict['outcome']} ({score_text(verdict['score'])}) {reason}")
    for used in task["rounds"]:
        replayed = ", replayed" if used["replayed"] else ""
        lines.append(f"  {used['round']} ({used['state']}): {used['split']}{replayed}")
    return "\n".join(lines)
