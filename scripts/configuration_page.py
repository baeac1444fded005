"""Writes docs/reference/configuration.md from the settings' own docstrings: `python -m scripts.configuration_page`.

Also writes the JSON Schemas of files that users edit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flywheel.cli.settings import SCHEMAS, schema_of
from flywheel.config.file import Config
from flywheel.config.section import Section
from flywheel.judge.file_schemas import docstrings
from flywheel.system.yaml_file import sections_in

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "configuration.md"
IN_ONE_ROW = frozenset({"stages"})
"""Keys whose settings are those of other sections."""

HEAD = """# Configuration

One YAML file, given with `-c`, by `$FLYWHEEL_CONFIG`, or as `flywheel.yaml` in the current directory. Every key has a
default, but there is no default judge: replies are sent to none before `judge.base_url` and `judge.model` name it. An
unknown key, or one that is written twice, is an error that names its path. `~` expands, relative paths are relative
to the file, and secrets are never in it: it names the environment variables that hold them.

A configuration, rubric or chain from somebody else cannot take all time or memory. It is a file, also behind links,
or a pipe that is written to its end within 10 s, and has at most 4 MB, 100,000 values (aliases and merges count as
what they stand for), 64 levels, and 100 characters in a number. Another program's file has at most 500
interpolations; each has at most 10,000 characters, before and after, and at most 8 follow from each other. There are
at most 256 `sources`, 64 `targets`, 64 filters, and 256 criteria and 1,000 examples of a rubric. What exceeds a limit
is an error that names it.

`--set KEY=VALUE` sets one key for one command, above the file or without one, and may be repeated. KEY is a dotted
path (`judge.model`; `sources.0.path` for the first item of a list), also in the keys of another program's file
(`ajet.model.path`); a key without effect is an error that names Flywheel's key. VALUE is
YAML and replaces all that stands there. `flywheel config show` prints each setting in effect with its origin: given
in the file, `--set`, or the default.

Configurations made for AgentJet or ASTuner, which have `ajet:`, `astuner:`, `task_reader:` or `feedback_tracing:` at
their root, are read as well: [each of their keys](../how-to/agentjet.md#every-key) is used, refused with the reason,
or named in the log as without effect. Their relative paths start at
[the project root](../how-to/agentjet.md#where-relative-paths-start). Flywheel's own sections may be added and take
precedence. Where `train_output_path` is a file that AgentJet wrote, it is renamed to `tasks-1.jsonl`, and its tasks
are neither judged nor written again.

Those of SAGE's agent training (`sft_config`, `rl_config`, `reward_config`, a preset or a pipeline) are read as well:
[their table](sage.md) says what becomes of each option. One error names all keys that are refused.

`configs/` has files to start from: `flywheel.yaml`, which `flywheel init` writes; `development.yaml` (1.5 billion
parameters, adapters of rank 16) and `production.yaml` (7 billion, rank 64), both with SFT before GRPO; and those of
the demos, `demo.yaml`, `demo-agent.yaml`, `demo-real.yaml` and
`demo-real-agent.yaml`.

This page is generated from the settings themselves (`python -m scripts.configuration_page`); a test compares the two.
"""


def page() -> str:
    return "\n".join([HEAD, *dict.fromkeys(_sections(Config, ""))])


def _sections(model: type[BaseModel], prefix: str) -> list[str]:
    """Each section as a text; those that several kinds of sources have are the same."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        if name in IN_ONE_ROW:
            continue
        key = f"{prefix}{name}"
        listed = getattr(field.annotation, "__origin__", None) is list
        for tag, inner in sections_in(field.annotation).items():
            kind = f" with `type: {tag}`" if tag else ""
            title = f"## `{key}`{' (a list)' if listed else ''}{kind}"
            found.append("\n".join([title, "", *_table(inner), ""]))
            found += _sections(inner, f"{key}.")
    return found


def _table(model: type[Section]) -> list[str]:
    said = docstrings(model)
    rows = [
        f"| `{name}` | {_default(info)} | {' '.join(said.get(name, '').split()).replace('|', chr(92) + '|')} |"
        for name, info in model.model_fields.items()
        if name in IN_ONE_ROW or not sections_in(info.annotation)
    ]
    return ["| key | default | meaning |", "|---|---|---|", *rows] if rows else []


def _default(info: Any) -> str:
    if info.default_factory is not None or info.default is None or info.is_required():
        return "–"
    value = info.default
    if isinstance(value, Path):
        return f"`{value}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def write() -> None:
    PAGE.write_text(page())
    for name, path in SCHEMAS.items():
        (ROOT / path).write_text(json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
