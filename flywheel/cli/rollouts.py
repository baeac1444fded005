"""`flywheel rollouts`: the conversations of a round's rollouts, with rewards and failed criteria."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flywheel.cli.app import ConfigOption, JsonOption, app, load_config, print_json
from flywheel.cli.tables import UNBROKEN, short_path, stdout
from flywheel.cli.tasks import turns
from flywheel.errors import StoreError
from flywheel.system.terminal import escape_terminal, excerpt, quantity, score_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from flywheel.config.file import Config

QUESTION_EXCERPT: Final = 60
ANSWER_EXCERPT: Final = 100
"""Characters of an excerpt in the table."""


@app.command()
def rollouts(
    name: Annotated[str, typer.Argument(metavar="ROUND", help="A round (`r0007`), or `debug`.")],
    task: Annotated[str | None, typer.Option(metavar="ID", help="Only rollouts of this task.")] = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only rollouts of this step.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With --json: include tokens and their log-probabilities.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the rollouts of a round: conversations, rewards and failed criteria."""
    if tokens and not as_json:
        raise typer.BadParameter("it requires --json; `flywheel web` shows tokens", param_hint="--tokens")
    directory = _directory(load_config(config), name)
    groups = _groups(directory, task, step)
    if as_json:
        shown = [_without_tokens(group) for group in groups] if not tokens else list(groups)
        print_json({"round": name, "groups": shown})
        return
    console = stdout()
    shown_groups = 0
    for group in groups:
        console.print()
        _print_group(console, escape_terminal(group))
        shown_groups += 1
    if not shown_groups:
        asked = " and ".join(filter(None, (f"task {task}" if task else "", f"step {step}" if step else "")))
        why = f"none is of {asked}" if asked else "there is none yet"
        raise StoreError(f"show rollouts of {name}", why, f"`flywheel rollouts {name}` shows all.")


def table_of(directory: Path) -> list[dict[str, Any]]:
    """Every rollout of a round, in short. Raises StoreError."""
    return [
        {
            "step": group["step"],
            "task_id": group["task_id"],
            "question": group["question"],
            "steps": rollout["steps"],
            "answer": rollout["answer"],
            "reward": rollout["reward"],
            "failed": [item["criterion"] for item in rollout["criteria"] if not item["passed"]],
            "error": rollout["error"],
        }
        for group in _groups(directory, None, None)
        for rollout in group["rollouts"]
    ]


def print_table(console: Console, rollouts: Iterable[Mapping[str, Any]]) -> None:
    """Print question, steps, answer, reward and failed criteria of each rollout; on a terminal a question once."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    on_terminal = console.width < UNBROKEN
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=on_terminal)
    for name, ratio in (("question", 3), ("steps", None), ("answer", 4), ("reward", None), ("failed", 3)):
        justify: Any = "left" if ratio else "right"
        table.add_column(name, ratio=ratio, no_wrap=ratio is None, overflow="fold", justify=justify)
    before = None
    for rollout in escape_terminal(list(rollouts)):
        group = rollout["step"], rollout["task_id"]
        question = "" if on_terminal and group == before else excerpt(rollout["question"], QUESTION_EXCERPT)
        before = group
        cells = (
            question,
            str(len(rollout["steps"])),
            excerpt(rollout["answer"], ANSWER_EXCERPT) or "(empty)",
            score_text(rollout["reward"]),
            ", ".join(rollout["failed"]) or excerpt(rollout["error"], ANSWER_EXCERPT) or "–",
        )
        table.add_row(*map(Text, cells))
    console.print(table)


def _directory(config: Config, name: str) -> Path:
    from flywheel.training.data.rollout_file import rollout_files

    directory = config.state_dir / "rounds" / name
    attempted = f"show rollouts of {name}"
    if not re.fullmatch(r"r\d+|debug", name) or not directory.is_dir():
        why = f"there is no such round in {short_path(config.state_dir)}"
        raise StoreError(attempted, why, "`flywheel status` lists rounds; `debug` is the last debug round.")
    if not rollout_files(directory):
        hint = "A round writes them at the end of each step; retention.keep_days says when they are removed."
        raise StoreError(attempted, f"there is none in {short_path(directory)}", hint)
    return directory


def _groups(directory: Path, task: str | None, step: int | None) -> Iterator[dict[str, Any]]:
    """The rollouts of each prompt, with its conversation as far as the round's specification still has it."""
    from flywheel.training.data.rollout_file import groups, prompts_of, rollout_of

    prompts = prompts_of(directory)
    for group in groups(directory):
        if task not in (None, group.task_id) or step not in (None, group.step):
            continue
        prompt = prompts.get(group.task_id, {})
        members = (rollout_of(group, place) for place in range(len(group.rollouts)))
        yield {
            "step": group.step,
            "task_id": group.task_id,
            "prompt": prompt.get("prompt", []),
            "question": prompt.get("query", ""),
            "dropped": group.dropped,
            "rollouts": [
                {key: value for key, value in item.items() if key not in ("step", "task_id", "group", "dropped")}
                for item in members
            ],
        }


def _without_tokens(group: dict[str, Any]) -> dict[str, Any]:
    kept = [{key: value for key, value in item.items() if key != "samples"} for item in group["rollouts"]]
    return {**group, "rollouts": kept}


def _print_group(console: Console, group: Mapping[str, Any]) -> None:
    from rich.text import Text

    from flywheel.training.data.rollout_file import DROPPED

    members = group["rollouts"]
    rewards = [item["reward"] for item in members if item["reward"] is not None]
    mean = f", mean reward {math.fsum(rewards) / len(rewards):.2f}" if rewards else ", no reward"
    title = f"step {group['step']}, {group['task_id']}: {quantity(len(members), 'rollout')}{mean}"
    console.print(Text(title, style="bold"))
    if group["dropped"]:
        _print_indented(
            console, Text(f"not trained on: {DROPPED.get(group['dropped'], group['dropped'])}", style="yellow"), 2
        )
    _print_section(console, "Prompt", "\n".join(turns(group["prompt"])), 2)
    for number, rollout in enumerate(members, 1):
        console.print(_headline(number, rollout))
        _print_section(console, "Steps", "\n".join(turns(rollout["steps"])), 4)
        _print_section(console, "Answer", rollout["answer"] or "(empty)", 4)
        for item in rollout["criteria"]:
            if not item["passed"]:
                chosen = f": {item['choice']}" if item["choice"] else ""
                line = Text.assemble(("✗ ", "red"), f"{item['criterion']}{chosen}  {item['reason']}".rstrip())
                _print_indented(console, line, 4)
        if rollout["error"]:
            _print_indented(console, Text(f"no reward: {rollout['error']}", style="yellow"), 4)


def _headline(number: int, rollout: Mapping[str, Any]) -> Text:
    from rich.text import Text

    facts = [f"reward {score_text(rollout['reward'])}"]
    if rollout["advantage"] is not None:
        facts.append(f"advantage {rollout['advantage']:+.2f}")
    facts += ["truncated"] if rollout["truncated"] else []
    facts += [rollout["loop"]] if rollout.get("loop") else []
    if program := rollout.get("program"):
        own = {} if program["reward"] is None else {"own reward": program["reward"]}
        facts += [f"{name} {value:.6g}" for name, value in {**own, **program["metrics"]}.items()]
    return Text.assemble(f"  {number}. ", (", ".join(facts), "bold"), f", seed {rollout['seed']}")


def _print_section(console: Console, name: str, text: str, indent: int) -> None:
    from rich.text import Text

    if text:
        console.print(Text(f"{'':{indent}}{name}", style="dim"))
        _print_indented(console, Text(text), indent + 2)


def _print_indented(console: Console, text: Text, indent: int) -> None:
    from rich.text import Text

    for line in text.wrap(console, max(1, console.width - indent), overflow="fold"):
        console.print(Text(" " * indent).append_text(line))
