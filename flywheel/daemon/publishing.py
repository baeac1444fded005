"""A folder with the adapters that were deployed, each with a model card in the Hub's form, and `current.json`, which
says what each alias stands for (`deploy.publish`). Adapters in it are never changed or removed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from sqlalchemy import Connection

from flywheel import __version__
from flywheel.records.round import GateDecision, RoundResult
from flywheel.serving.adapter_files import CURRENT_FILE, FILES
from flywheel.serving.alias_target import ABTest, AliasTarget
from flywheel.serving.client.adapter_swap import version_name
from flywheel.serving.server.alias_table import read_aliases, write_aliases
from flywheel.store import deployments, gate_tests, rounds
from flywheel.store.views.lineage import ancestors, samples
from flywheel.system.terminal import quantity
from flywheel.training.engine.policy import appear

HASH_SHOWN: Final = 12
"""Digits of the hash in the name of a folder: two states may have an r0007 each."""


def publish(folder: Path, alias: str, target: AliasTarget, cards: Mapping[str, str]) -> bool:
    """Write the adapters that an alias stands for, unless they are there, and then `current.json`; whether something
    was written. `cards` are their model cards by served name. Raises OSError, and ValueError for a `current.json`
    that cannot be read."""
    file, placed = folder / CURRENT_FILE, _placed(target)
    current, damage = read_aliases(file)
    if damage:
        raise ValueError(damage)
    missing = [
        (Path(each.path), folder / place.path, cards[each.name])
        for each, place in zip(target.versions, placed.versions, strict=True)
        if each.path and place.path and not (folder / place.path).is_dir()
    ]
    if current.get(alias) == placed and not missing:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    for source, place, card in missing:
        appear(place, partial(_write, source, card))
    write_aliases(file, {**current, alias: placed}, mode=0o666)
    return True


def deployed_target(conn: Connection, alias: str, base: str) -> tuple[AliasTarget, dict[str, str]] | None:
    """What an alias stands for, and the model cards of its versions by served name; None before the first swap. The
    base model is served as `base`."""

    def version(adapter: str | None, ab_test: ABTest | None = None) -> AliasTarget:
        if (ref := rounds.adapter_ref(conn, adapter)) is None:
            return AliasTarget(base, ab_test=ab_test)
        return AliasTarget(version_name(alias, ref.name), ref.path, ref.sha256, ab_test)

    if (active := deployments.active(conn, alias)) is None:
        return None
    test = active.ab_test
    target = version(active.adapter, test and ABTest(version(test["other"]), test["share"], test["salt"]))
    adapters = {each.name: each.name.rpartition("@")[2] for each in target.versions if each.path}
    return target, {name: model_card(conn, alias, adapter) for name, adapter in adapters.items()}


def _placed(target: AliasTarget) -> AliasTarget:
    """The target with paths relative to the folder."""
    ab_test = target.ab_test and replace(target.ab_test, other=_placed(target.ab_test.other))
    name = f"{target.name.rpartition('@')[2]}-{(target.sha256 or '')[:HASH_SHOWN]}"
    return replace(target, path=name if target.path else None, ab_test=ab_test)


def _write(source: Path, card: str, beside: Path) -> None:
    beside.mkdir()
    for name in FILES:
        shutil.copyfile(source / name, beside / name)
    (beside / "README.md").write_text(card, encoding="utf-8")


def model_card(conn: Connection, alias: str, adapter: str) -> str:
    """The model card of an adapter: YAML for the Hub, then what is known about it in Markdown."""
    row, round_row = rounds.adapter(conn, adapter), rounds.by_name(conn, adapter)
    assert row is not None
    assert round_row is not None
    result = RoundResult.model_validate(round_row.result) if round_row.result else None
    decision = gate_tests.decision_of(conn, row.round_id)
    is_local = Path(row.base_model).is_absolute()
    base = Path(row.base_model).name if is_local else row.base_model
    # Without the number that a stage has which occurs twice.
    stages = [each.stage.split()[0] for each in result.stages if each.outcome == "trained"] if result else []
    front: dict[str, Any] = {
        **({} if is_local else {"base_model": base}),  # The Hub takes names of models there only.
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "agentscope-flywheel", *dict.fromkeys(stages)],
    }
    parents = ancestors(conn, adapter)
    data = (
        f"It was made by another trainer: {result.candidate.summary}."
        if result is not None and result.candidate is not None
        else f"Round {round_row.name} trained it on {quantity(samples(conn, [row.round_id])[row.round_id], 'sample')}"
        " of recorded conversations with agents, which a judge accepted."
    )
    if parents:
        data += f" It was trained on from {', then '.join(parents)}, whose data it has seen, too."
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items()) if result else ""
    sections = {
        "Data": data,
        "Gate": _gate(result, decision),
        "Files": f"- SHA-256 of both files together (`tree_sha256`): `{row.sha256}`\n"
        f"- made {row.created_at}, published by Flywheel {__version__}"
        + (f"; trained with {versions}" if versions else ""),
        "Limits": "- It was compared with the version before it on tasks of the same agents and on the suites named"
        " above: nothing is known about other uses, or about safety beyond what the rubric asks.\n"
        "- It was trained on conversations of users and can repeat parts of them: treat the weights as that data.\n"
        f"- It is for {base} and no other base model.",
    }  # fmt: skip
    text = "".join(f"\n## {title}\n\n{content}\n" for title, content in sections.items())
    yaml_text = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return f"---\n{yaml_text}---\n\n# {alias}, adapter {adapter}\n\nA LoRA adapter for `{base}`.\n{text}"


def _gate(result: RoundResult | None, decision: GateDecision | None) -> str:
    seen = result.comparison if result is not None else None
    if seen is None:
        return "It was not compared with another adapter."
    lines = [
        f"Decision: {decision.reason}." if decision is not None else "No decision is recorded.",
        f"- {seen.tasks} held-out tasks of {seen.conversations} conversations, {seen.samples} answers each;"
        f" {seen.undecided} more are undecided",
        f"- mean reward {seen.candidate_mean:.3f}, of the version before it {seen.deployed_mean:.3f}",
        f"- gain {seen.gain:+.3f}, interval {seen.lower:+.3f} to {seen.upper:+.3f} at the level {seen.confidence:.4f}"
        f" ({seen.method})",
        *(
            f"- {kind} {name}: gain {each.gain:+.3f}, interval {each.lower:+.3f} to {each.upper:+.3f}"
            for kind, found in (
                ("criterion", [(each.criterion, each) for each in seen.criteria]),
                ("suite", [(each.name, each) for each in seen.suites]),
            )
            for name, each in found
        ),
    ]
    return f"{lines[0]}\n\n" + "\n".join(lines[1:])
