"""Writes docs/reference/configuration.md from the settings' own docstrings: `python -m scripts.configuration_page`.

Also writes the JSON Schemas of files that users edit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

This page is generated from the settings (`python -m scripts.configuration_page`).

The configuration is one YAML file, given with `-c`, by `$FLYWHEEL_CONFIG`, or as `flywheel.yaml` in the current
directory. Every key has a default, but no reply is sent to a judge before `judge.base_url` and `judge.model` name
one. An unknown key, or one that is written twice, is an error that names its path. `~` expands, and relative paths
start at the file. Numbers of seconds, days and the like are in the unit that the key ends in.

`--set KEY=VALUE` sets one key for one command, above the file or without one. KEY is a dotted path (`judge.model`;
`sources.0.path` for the first item of a list), also in the keys of another program's file (`ajet.model.path`).
VALUE is YAML and replaces all that stands there. `flywheel config show` prints each setting in effect with its
origin. Keys and passwords are masked there, so its output can be shared.

The daemon reads configuration, rubric, filter chain and their functions when it starts. Restart it after a change.

Files to start from are in `configs/`. `flywheel init` writes `flywheel.yaml`. `development.yaml` (1.5 billion
parameters) and `production.yaml` (7 billion) have SFT before GRPO. `demo.yaml`, `demo-agent.yaml`, `demo-real.yaml`
and `demo-real-agent.yaml` are those of the demos. The first line of each names a JSON
Schema for editors with a YAML language server; `flywheel config schema` prints it.

Files of AgentJet, ASTuner and SAGE are read as well: [moving in](../migrate.md).

Limits: a configuration, rubric or chain has at most 4 MB, 100,000 values (with aliases and merges), 64 levels, and
100 characters in a number. A pipe must end within 10 s. There are at most 256 `sources`, 64 `targets`, 64 filters,
and 256 criteria and 1,000 examples of a rubric. Another program's file has at most 500 interpolations of 10,000
characters, at most 8 of which follow from each other.
"""

ENVIRONMENT = """## Environment variables

- `FLYWHEEL_CONFIG`: the configuration file, unless `-c` is given
- `FLYWHEEL_HOME`: the state directory, unless `state.dir` is set; default `$XDG_STATE_HOME/flywheel`, else
  `~/.local/state/flywheel`
- `FLYWHEEL_LOG`, `FLYWHEEL_LOG_FORMAT`: level and format of the log, as `--log-level` and `--log-format`
- `FLYWHEEL_TRAINER_PYTHON`: the interpreter that trains in `flywheel train` and the [Python API](python.md), and
  reads data sets; default: the one that runs them
- `OPENAI_API_KEY`: the judge's key, unless `judge.api_key_env` names another variable; the key of embeddings
- `OPENAI_BASE_URL`: the endpoint of judge and embeddings, unless the settings name one
- `HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`, `SSL_CERT_FILE`: proxies and certificates for endpoints
- `HF_HOME`, `HF_HUB_OFFLINE`, `CUDA_VISIBLE_DEVICES`: read by the Hugging Face libraries and CUDA
- `COLUMNS`, `NO_COLOR`: the width of tables; disable colours

The configuration, `state.db` and `spec.json` name the variables of keys and contain no key. A name and password in
a URL (`http://NAME:PASSWORD@HOST`) are used for requests and are `***` everywhere else; `serving.urls` refuses
them.

Keys in messages and logs are replaced by `[secret]`. Recognised are values of at least eight characters of two
kinds of variables: those that the configuration names, and those whose names end in `API_KEY`, `ACCESS_KEY`,
`SECRET`, `TOKEN` or `PASSWORD`. So is each key that was sent. Your own functions do not inherit these variables.

The log goes to stderr, one line per event, with the time in UTC. In the journal, the level stands in its place.
With `--log-format json` each line is an object with `time`, `level`, `logger`, `message` and, after a defect,
`exception`. The worker's log and messages that end a command are always text.
"""

EXAMPLES = {
    "state": "state: {dir: /srv/flywheel}",
    "sources": """sources:
  - {path: ~/AgentScope-Studio/database.sqlite, models: {include: ["gpt-*"]}}
  - {type: jsonl, path: logs/}
  - {type: otlp, listen: "127.0.0.1:4318"}
  - {type: calls}""",
    "ingest": "ingest: {train_ratio: 0.8, agents: {exclude: [summarizer]}}",
    "privacy": "privacy: {exclude: {users: [jane@example.com]}}",
    "judge": """judge:
  base_url: https://api.openai.com/v1
  model: gpt-4o-mini
  budget: {tokens_per_day: 2000000}
  prices: {input_per_million: 0.15, output_per_million: 0.6}""",
    "filter": "filter: {rubric: rubrics/qa-quality.yaml, chain: filters/default.yaml}",
    "trigger": 'trigger: {min_samples: 128, cron: "0 3 * * *"}',
    "model": "model: {base: Qwen/Qwen3-4B, alias: my-agent}",
    "training": "training: {stages: [sft, grpo], steps: 30, lora: {r: 32, alpha: 64}}",
    "rollout": """rollout:
  agent: {workflow: "my_agent.py:run"}
  reward: {rubric: 1, workflow: 0.5}""",
    "tracking": "tracking: {report_to: [mlflow], project: support}",
    "gate": "gate: {mode: manual, non_inferiority_margins: {correct: 0.02}}",
    "targets": "targets: {planner: {agents: [planner]}, writer: {agents: [writer], min_samples: 32}}",
    "serving": 'serving: {urls: ["http://127.0.0.1:8000"], api_key_env: AGENTS_KEY}',
    "deploy": "deploy: {watch: {new_share: 0.1}}",
    "ray": 'ray: {address: "ray://head:10001"}',
    "retention": "retention: {keep_days: 30}",
    "daemon": "daemon: {metrics: null}",
    "notify": "notify: [{name: team, url_env: TEAM_WEBHOOK, on: [promoted, rolled_back]}]",
    "export": "export: {langfuse: {host: https://cloud.langfuse.com}}",
}
"""One for each section, by its key."""


def page() -> str:
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        parts += [f"## `{name}`\n", f"```yaml\n{EXAMPLES[name]}\n```\n"]
        parts += dict.fromkeys(_sections(field.annotation, name, docstrings(Config).get(name, "")))
    return "\n".join([*parts, ENVIRONMENT])


def _sections(annotation: Any, key: str, said: str, *, is_inner: bool = False) -> Iterator[str]:
    """The sections of a key, and those in them, each as a text; what several kinds of sources have is the same."""
    if said and not is_inner:
        yield f"{_text(said)}\n"
    for tag, section in sections_in(annotation).items():
        assert issubclass(section, Section)
        texts = docstrings(section)
        rows = [
            f"- `{name}`{_default(info)}: {_text(texts[name])}"
            for name, info in section.model_fields.items()
            if name in IN_ONE_ROW or not sections_in(info.annotation)
        ]
        kind = f" with `type: {tag}`" if "type" in section.model_fields else ""
        heading = [f"### `{key}`{kind}\n"] if is_inner or kind else []
        intro = [f"{_text(said)}\n"] if said and is_inner else []
        yield "\n".join([*heading, *intro, *rows, *([""] if rows else [])])
        for name, info in section.model_fields.items():
            if name not in IN_ONE_ROW:
                yield from _sections(info.annotation, f"{key}.{name}", texts.get(name, ""), is_inner=True)


def _text(said: str) -> str:
    return " ".join(said.split())


def _default(info: Any) -> str:
    if info.default_factory is not None or info.is_required() or info.default in (None, [], {}, ()):
        return ""
    value = info.default
    if isinstance(value, Path):
        return f" (`{value}`)"
    return f" (`{str(value).lower() if isinstance(value, bool) else value}`)"


def write() -> None:
    PAGE.write_text(page())
    for name, path in SCHEMAS.items():
        (ROOT / path).write_text(json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
