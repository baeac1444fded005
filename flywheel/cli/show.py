"""`flywheel show`: one task in full: conversation, question, steps, answer, verdict with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from flywheel.cli.app import ConfigOption, JsonOption, app, load_config, print_json, read_state, run_async
from flywheel.errors import StoreError
from flywheel.system.terminal import escape_terminal, moment


@app.command()
def show(
    subject: Annotated[str, typer.Argument(metavar="ID", help="A task, span, trace or conversation.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a task in full, and its verdict with the reasons."""
    from flywheel.store.views.task_list import detail, of_subject

    found = run_async(read_state(load_config(config), lambda conn: of_subject(conn, subject)))
    if not found:
        raise StoreError(
            f"show {subject}",
            "no task, span, trace or conversation with a task has this id",
            "`flywheel tasks` lists tasks; `flywheel why ID` says why a reply is none.",
        )
    tasks = [detail(row) for row in found]
    if as_json:
        print_json({"tasks": tasks})
        return
    typer.echo("\n\n".join(_text(task) for task in escape_terminal(tasks)))


def _text(task: dict[str, Any]) -> str:
    who = [f"agent {task['agent']}" if task["agent"] else "", task["adapter"] or task["model"]]
    facts = ", ".join(filter(None, (task["split"], *who, f"{moment(task['started_at'])} UTC")))
    parts = [f"{task['task_id']}: {task['state']} ({facts})"]
    sections = {
        "History": "\n".join(turns(task["history"])),
        "Question": task["question"],
        "Steps": "\n".join(turns(task["steps"])),
        "Answer": task["answer"] or "(empty)",
        "Reference": task["reference"],
        "Verdict": "\n".join(_verdict(task["verdict"])),
    }
    parts += [f"{name}\n{_indented(text)}" for name, text in sections.items() if text]
    return "\n\n".join(parts)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Messages as lines: who says what, and who calls which tool."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") or call
            yield f"[{message.get('role')} calls {function.get('name')}] {function.get('arguments')}"
        if message.get("content"):
            # Some agents give each message a name, their users' and systems' that of the role.
            name = f" {message['name']}" if message.get("name") not in (None, "", message.get("role")) else ""
            yield f"[{message.get('role')}{name}] {message['content']}"


def _verdict(verdict: dict[str, Any] | None) -> Iterator[str]:
    if verdict is None:
        yield "not judged yet"
        return
    score = "" if verdict["score"] is None else f", score {verdict['score']:.2f}"
    yield f"{verdict['outcome']}{score} ({moment(verdict['at'])} UTC)"
    for each in verdict["criteria"]:
        chosen = f": {each['choice']}" if each["choice"] else ""
        yield f"{'✓' if each['passed'] else '✗'} {each['criterion']}{chosen}  {each['reason']}".rstrip()
    if verdict["reason"] and not any(each["reason"] for each in verdict["criteria"]):
        yield verdict["reason"]
