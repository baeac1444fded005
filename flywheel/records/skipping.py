"""What to change when all replies of a source are skipped for one reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flywheel.records.states import SkipReason

MIN_REPLIES: Final = 5
"""Fewer may all be skipped by chance, as an agent's first tries are."""

AWAITS_TOOLS: Final = "it stopped until "
"""How the detail of an unfinished reply begins that waits for a person, or for a tool elsewhere."""

REMEDIES: Final[Mapping[SkipReason, str]] = {
    SkipReason.NESTED: (
        "If a user sees what these agents answer, name them in `ingest.agents.include`; else trace the agent that"
        " calls them, too."
    ),
    SkipReason.PIPELINE_STAGE: (
        "If a user sees what these stages answer, name their agents in `ingest.agents.include`; else trace the last"
        " stage, too."
    ),
    SkipReason.ERROR: "Mend what fails: nothing was answered.",
    SkipReason.INTERRUPTED: "Find what interrupts the agent before the end of its reply.",
    SkipReason.UNFINISHED: (
        "Let each agent end its span and send it before its process ends, and let the tools that it waits for answer."
    ),
    SkipReason.NO_QUERY: (
        "Record what the agent is asked: `flywheel docs traces` names the attributes of spans that are read, and"
        " `flywheel docs connect/files` the keys of lines."
    ),
    SkipReason.NO_ANSWER: (
        "Record what is answered: `flywheel docs traces` names the attributes of spans that are read, and"
        " `flywheel docs connect/files` the keys of lines."
    ),
    SkipReason.AMBIGUOUS: "Give each batch a folder of its own, with its requests and its responses.",
    SkipReason.TRUNCATED: (
        "Raise the limit on the length of attributes (`OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT`,"
        " `OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT`, or a collector's)."
    ),
    SkipReason.RECORDED: "",
    SkipReason.AGENT_EXCLUDED: "If they are to be tasks, take their agents out of `ingest.agents.exclude`.",
    SkipReason.PRIVATE: (
        "If they may be stored, send them without `x-flywheel-record: no` or `flywheel.record`, and look at"
        " `privacy.exclude`."
    ),
    SkipReason.IN_TASK_FILE: "",
    SkipReason.REFUSED: "Name documents that have the quotes, or another model to write the tasks.",
}
"""What to change, by the reason. Empty where nothing is wrong: another source or file has these replies."""

_QUOTING: Final = frozenset({SkipReason.ERROR, SkipReason.REFUSED})
"""Reasons whose details may quote a text, which an erasure would not find in a warning."""


def warning(skipped: Mapping[str, int], replies: int, detail: str = "") -> str:
    """The warning about a source with so many `replies` that count, if they are all skipped for one reason; else
    empty. `detail` is what most of them lack."""
    if len(skipped) != 1 or sum(skipped.values()) < max(replies, MIN_REPLIES):
        return ""
    reason = SkipReason(*skipped)
    if not (remedy := REMEDIES[reason]):
        return ""
    lacks = f" ({detail})" if detail and reason not in _QUOTING else ""
    return f"all {replies:,} replies are skipped as `{reason}`{lacks}. {remedy}"
