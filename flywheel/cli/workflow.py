"""`flywheel workflow`: try the user's own agent, and make an environment for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    absolute,
    command_group,
    load_config,
    print_error,
    print_json,
    run_async,
)
from flywheel.cli.tables import short_path
from flywheel.config.file import Config
from flywheel.daemon import workflow_check
from flywheel.errors import EXIT_FAILED
from flywheel.records.program_run import RunResult
from flywheel.system.terminal import escape_terminal, excerpt, quantity
from flywheel.training.engine.endpoint import listed
from flywheel.training.program import agentscope_1
from flywheel.training.program.program_pool import decided_reward

SHOWN: Final = 3
"""Tasks that are named for each reason."""

FunctionArgument = Annotated[
    str | None,
    typer.Argument(metavar="FILE:FUNCTION", help="A workflow. Default: rollout.agent of the configuration."),
]

workflow = command_group("workflow", "Check that your own agent works in rollouts, and make an environment for it.")


@workflow.command()
def check(
    function: FunctionArgument = None,
    config: ConfigOption = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="FILE|ID", help="A file of tasks, whose first line is used, or a task's id."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="The server, without /v1. Default: the first of serving.urls.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model to ask. Default: the aliases.")] = None,
    answers: Annotated[
        int, typer.Option(min=0, help="Maximum number of accepted answers for the judge (`rollout.reward_function`).")
    ] = 200,
    as_json: JsonOption = False,
) -> None:
    """Run your own agent on a task against the server, and report what it did.

    If its first run works, it does the same task three times in one process and three times in fresh ones. That
    shows whether state of one run reaches the next.

    Without --task, it runs on the task that a round would use first. `rollout.reward_function` also gets the newest
    accepted traced answers of the state, which it should reward. Exit 1 if a round would fail.
    """
    settings = load_config(config)
    checked = run_async(workflow_check.check(settings, function, task, url, model, answers))
    if as_json:
        print_json(checked)
    else:
        for text in _lines(checked, settings):
            typer.echo(escape_terminal(text))
        for problem in checked["problems"]:
            print_error(f"flywheel: {problem}")
    if checked["problems"]:
        raise typer.Exit(EXIT_FAILED)


@workflow.command()
def env(
    function: FunctionArgument = None,
    config: ConfigOption = None,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of the environment, which must not exist.")
    ] = Path("agentscope-1"),
    requirement: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Also install the packages in this file of pip's requirements. Repeatable.",
        ),
    ] = None,
) -> None:
    """Make a virtual environment with AgentScope 1.0.21 for your own agent, and print the setting for it.

    It also names the modules that the agent's files import and that the environment lacks. They are not installed,
    because a package can have another name than its module: name the packages with --requirement.
    """
    rollout = workflow_check.with_function(load_config(config), function).rollout.model_dump(mode="json")
    python, missing = agentscope_1.make(rollout, absolute(output), [absolute(file) for file in requirement or ()])
    for module, files in missing.items():
        named = f"{', '.join(map(short_path, files))} imports" if files else "the settings name"
        typer.echo(escape_terminal(f"missing: {module}, which {named}"))
    typer.echo(escape_terminal(f"rollout.agent.python: {python}"))


def _lines(checked: Mapping[str, Any], config: Config) -> Iterator[str]:
    response, reward, calls = checked["response"], checked["reward"], checked["calls"]
    yield checked["function"]
    yield f"task {checked['task_id']}"
    yield f"{quantity(len(calls), 'call')} of the model{':' if calls else ''}"
    for number, call in enumerate(calls, 1):
        tools = f", tools {' '.join(call['tools'])}" if call["tools"] else ""
        tokens = f"{call['prompt_tokens']} + {call['completion_tokens']} tokens, "
        tokens = tokens if call["prompt_tokens"] is not None else ""
        ended = call["finish_reason"] if call["status"] == 200 else f"HTTP status {call['status']}: {call['error']}"
        stream = ", as a stream" if call["stream"] else ""
        yield (
            f"  {number}. {call['model']}: {quantity(call['messages'], 'message')}{tools}{stream}; {tokens}{ended},"
            f" {call['seconds']:.1f} s"
        )
    if checked["models"]:
        yield f"models    {listed(checked['models'])}"
    if response is not None:
        yield f"response  {excerpt(response)}"
    if reward is not None:
        unused = " (not used: rollout.reward.workflow is 0)" if not config.rollout.weights.workflow else ""
        if config.rollout.reward is None:
            unused = f" ({decided_reward(RunResult(reward, response))[1]})"
        yield f"reward    {reward:g}{unused}"
    if checked["metrics"]:
        yield f"metrics   {', '.join(f'{name} {value:g}' for name, value in checked['metrics'].items())}"
    if (judge := checked["judge"]) is not None:
        rewarded = judge["answers"] - sum(map(len, judge["unmatched"].values()))
        yield f"judge     rewards {rewarded} of {quantity(judge['answers'], 'accepted answer')}"
        for why, tasks in judge["unmatched"].items():
            more = ", …" if len(tasks) > SHOWN else ""
            yield f"  {len(tasks)} not: {why} ({', '.join(tasks[:SHOWN])}{more})"
    if (found := checked["isolation"]) is not None:
        yield (
            f"isolation first message of runs in one process and in fresh ones: {found['first_message']};"
            f" rollout.agent.isolation: run costs {found['process_seconds']:.1f} s per run"
        )
    for note in checked["notes"]:
        yield f"note      {note}"
    yield f"took      {checked['seconds']:.1f} s, {checked['peak_bytes'] / 1e6:.0f} MB"
    if not checked["problems"]:
        yield "A round can use it."
