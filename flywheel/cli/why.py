"""`flywheel why`: which conversations made an adapter, or what became of a trace."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from flywheel.cli.app import ConfigOption, JsonOption, app, load_config, print_json, read_state, run_async
from flywheel.cli.tables import criterion_lines
from flywheel.errors import StoreError
from flywheel.system.terminal import escape_terminal, quantity, score_text

SHOWN: Final = 300
"""Characters of a system prompt."""


@app.command()
def why(
    subject: Annotated[str, typer.Argument(metavar="ID", help="An adapter, task, trace, span or conversation.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the conversations that an adapter was trained on, or the outcome of a trace."""
    from flywheel.daemon import evaluation_log
    from flywheel.store.views import erased_samples, lineage

    settings = load_config(config)
    story = run_async(read_state(settings, lambda conn: lineage.why(conn, subject, settings.takes)))
    if story is None:
        raise StoreError(
            f"explain {subject}",
            "no adapter, task, trace, span or conversation has this id",
            "Ids are in tasks.jsonl, in `flywheel filter` and in `flywheel status`.",
        )
    if story["kind"] == "round":
        adapter = story["adapter"]
        story["evaluations"] = evaluation_log.read(settings.state_dir, adapter["sha256"]) if adapter else []
        every = run_async(read_state(settings, erased_samples.affected, warn=False))
        erased = next((each for each in every if each.adapter == story["id"]), None)
        story["erased"] = erased and {"sentence": erased.sentence, **erased.as_json()}
    if as_json:
        print_json(story)
        return
    story = escape_terminal(story, one_line=True)
    if story["kind"] == "round":
        _print_round(story)
    else:
        for reply in story["replies"]:
            _print_reply(reply)


def _print_round(story: dict[str, Any]) -> None:
    from flywheel.daemon import evaluation_log

    typer.echo(f"{story['id']}: {story['state']}{' – ' + story['reason'] if story['reason'] else ''}")
    typer.echo(f"started because: {story['trigger']}; attempt {story['attempt']}, seed {story['seed']}")
    if target := story.get("target"):
        typer.echo(f"trained for: {target}")
    # Without samples, the round has only compared another trainer's adapter with its parent.
    trains = story["samples"] or story["left_out"] or not story["held_out"]
    typer.echo(f"{'continues' if trains else 'compared with'}: {story['parent'] or 'the base model'}")
    if story["adapter"]:
        removed = ", its files were removed" if story["adapter"]["state"] == "removed" else ""
        typer.echo(f"adapter: {story['adapter']['path']} (sha256 {story['adapter']['sha256'][:12]}…{removed})")
    if story["erased"]:
        typer.echo(story["erased"]["sentence"])
    if comparison := story["comparison"]:
        means = f"{comparison['deployed_mean']:.3f} → {comparison['candidate_mean']:.3f}"
        gain = f"{comparison['gain']:+.3f} ({comparison['lower']:+.3f} … {comparison['upper']:+.3f})"
        typer.echo(f"held-out: {means} on {quantity(comparison['tasks'], 'task')}, gain {gain}")
        for line in criterion_lines(comparison):
            typer.echo(line)
    if evaluations := story["evaluations"]:
        typer.echo(escape_terminal(evaluation_log.sentence(evaluations)))
    if usage := story["usage"]:
        typer.echo(
            f"judged: {usage['judge_calls']:,} calls for {usage['rollouts']:,} rollouts,"
            f" {usage['judge_prompt_tokens']:,} tokens sent, {usage['judge_completion_tokens']:,} received"
        )
    _print_sampling(story["sampling"], story["selection"])
    for entry in story["deployments"]:
        typer.echo(f"deployed as {entry['alias']}: {entry['state']} since {entry['activated_at'] or '–'}")
    _print_watches(story["watches"])
    if not trains:
        return
    conversations = quantity(len(story["conversations"]), "conversation")
    typer.echo(f"made of {quantity(len(story['samples']), 'sample')} from {conversations}:")
    for sample in story["samples"]:
        replayed = "  replayed" if sample["replayed"] else ""
        typer.echo(f"  {sample['task_id']}  {sample['conversation_id']}  {sample['agent']}{replayed}")
    if released := story["released"]:
        typer.echo(f"released {quantity(released, 'sample')} of its pool: others have a higher loss, or differ more")
    for task, reason in story["left_out"].items():
        typer.echo(f"excluded {task}: {reason}")


def _print_watches(watches: list[dict[str, Any]]) -> None:
    for watch in watches:
        until = f"until {watch['ended_at']}" if watch["ended_at"] else "now"
        why = f" – {watch['reason']}" if watch["reason"] else ""
        typer.echo(f"watched beside {watch['other'] or 'the base model'} {until}: {watch['state']}{why}")


def _print_sampling(sampling: dict[str, Any] | None, selection: dict[str, Any] | None) -> None:
    from flywheel.records.round import RoundSelection

    if selection is not None:
        for sentence in RoundSelection.model_validate(selection).sentences:
            typer.echo(f"selected {sentence}")
    if sampling is None:
        return
    steps, prompts = quantity(sampling["steps"], "step"), quantity(sampling["prompts"], "prompt")
    size, temperature = quantity(sampling["group_size"], "rollout"), sampling["temperature"]
    typer.echo(f"rollouts: {steps} × {prompts} × {size}, temperature {temperature:g}")
    for found in sampling["system_prompts"]:
        text = found["text"] if len(found["text"]) <= SHOWN else f"{found['text'][: SHOWN - 1]}…"
        typer.echo(f"system prompt of {quantity(found['rollouts'], 'rollout')}: {text or '(none)'}")
    if further := sampling["further_system_prompts"]:
        typer.echo(f"and {quantity(further, 'further system prompt')}")


def _print_reply(reply: dict[str, Any]) -> None:
    whose = ", ".join(filter(None, (reply["agent"], reply["source"])))
    typer.echo(f"span {reply['span_id']} of trace {reply['trace_id']} ({whose})")
    task = reply["task"]
    if task is None:
        typer.echo(f"  {reply['state']}: {reply['skip_reason'] or ''} {reply['detail']}".rstrip())
        return
    of = f" of {task['target']}" if task.get("target") else ""
    typer.echo(f"  task {task['task_id']}{of}: {task['state']}, {task['split']}")
    if repeats := task["repeats"]:
        typer.echo(f"  repeats {repeats['task_id']} ({repeats['method']}, {repeats['similarity']:.2f})")
    for left_out in task["left_out"]:
        typer.echo(f"  excluded from rounds: {left_out['why']}")
    for verdict in task["verdicts"]:
        score = score_text(verdict["score"])
        typer.echo(f"  verdict: {verdict['outcome']} ({score}) {verdict['reason'] or verdict['error']}")
    for used in task["rounds"]:
        typer.echo(f"  {used['round']} ({used['state']}): {used['split']}{', replayed' if used['replayed'] else ''}")
