"""Configurations made for AgentJet or ASTuner, read with their own key names.

Their section `feedback_tracing` (at the root, or in `task_reader` below `ajet` or `astuner`) says where Studio's
database is, where tasks go, which model judges, and how. What they hold beside it is for another program.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from flywheel.errors import ConfigError

log = logging.getLogger(__name__)

ROOTS: Final = ("ajet", "astuner")
SECTION: Final = "feedback_tracing"
KEYS: Final = (
    "base_url",
    "train_output_path",
    "alien_llm_model",
    "alien_llm_response_length",
    "filters",
    "train_ratio",
    "split_seed",
)


def section_in(raw: Any) -> tuple[str, Any] | None:
    """The path of the section and what it holds; None if this is no such configuration."""
    if not isinstance(raw, Mapping):
        return None
    if SECTION in raw:
        return SECTION, raw[SECTION]
    for root in ROOTS:
        if isinstance(below := raw.get(root), Mapping):
            reader = below.get("task_reader")
            if isinstance(reader, Mapping) and SECTION in reader:
                return f"{root}.task_reader.{SECTION}", reader[SECTION]
            return f"{root}.{SECTION}", below.get(SECTION)
    return None


def filters_in(raw: Any) -> Any:
    """The filters of such a configuration as a chain, or `raw` as it is."""
    found = section_in(raw)
    if found is None or not isinstance(found[1], Mapping):
        return raw
    return {"version": 1, "id": "agentjet", "filters": found[1].get("filters") or []}


def translated(raw: Mapping[str, Any], known: Collection[str], name: str, file: Path | None) -> Mapping[str, Any]:
    """Such a configuration in Flywheel's keys; any other as it is. Raises ConfigError.

    `known` are Flywheel's own sections, which may stand beside theirs and count more.
    """
    found = section_in(raw)
    if found is None:
        return raw
    place, section = found
    attempted = f"use configuration {name}"
    if not isinstance(section, Mapping):
        raise ConfigError(
            attempted, f"`{place}` is missing: nothing says where the traces are", "Add it, with a `base_url`."
        )
    if unknown := [str(key) for key in section if key not in KEYS]:
        close = difflib.get_close_matches(unknown[0], KEYS, n=1)
        meant = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(KEYS)}"
        raise ConfigError(attempted, f"unknown key `{place}.{unknown[0]}` ({meant})", "Correct the file.")
    _tell_of_the_rest(raw, known, place, name)
    own = {key: value for key, value in raw.items() if key in known}
    return {
        **own,
        "sources": own.get("sources", [_given({"path": section.get("base_url")})]),
        "ingest": _given(
            {
                "output": section.get("train_output_path"),
                "train_ratio": section.get("train_ratio"),
                "split_seed": section.get("split_seed"),
            },
            own.get("ingest"),
        ),
        "judge": _given(
            {"model": section.get("alien_llm_model"), "max_tokens": section.get("alien_llm_response_length")},
            own.get("judge"),
        ),
        "filter": _given({"chain": str(file) if file and section.get("filters") else None}, own.get("filter")),
    }


def _given(values: Mapping[str, Any], own: Any = None) -> Any:
    if own is not None and not isinstance(own, Mapping):
        return own  # which is told of as it would be beside any other section
    return {key: value for key, value in values.items() if value is not None} | dict(own or {})


def _tell_of_the_rest(raw: Mapping[str, Any], known: Collection[str], place: str, name: str) -> None:
    root = place.partition(".")[0]
    rest = [str(key) for key in raw if key not in known and key != root]
    if root in ROOTS:
        below = raw[root]
        rest += [f"{root}.{key}" for key in below if key not in ("task_reader", SECTION)]
        if isinstance(reader := below.get("task_reader"), Mapping):
            rest += [f"{root}.task_reader.{key}" for key in reader if key not in (SECTION, "type")]
    if rest:
        log.warning("%s: only `%s` is used; these keys are for another program: %s", name, place, ", ".join(rest))
