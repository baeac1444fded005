"""Configurations, and the files and states that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from flywheel.config.file import Config, parse
from flywheel.system import files

BOXED_RUBRIC = files.shipped_folder() / "rubrics" / "math-boxed.yaml"
RUBRIC: dict[str, Any] = {
    "id": "r",
    "criteria": [{"id": "correct", "value": "The answer is right.", "required": True}],
}


UNWATCHED: dict[str, Any] = {"deploy": {"watch": {"new_share": 1}}}
"""Most tests are about what happens where a new version answers alone."""


JUDGE: dict[str, Any] = {"base_url": "http://127.0.0.1:9/v1", "model": "test-judge"}
"""A judge at an address where nothing answers."""


def raw_config(**sections: Any) -> dict[str, Any]:
    """A configuration whose state is in `state` beside its file."""
    judge = sections.get("judge", {})
    if isinstance(judge, dict):
        sections["judge"] = {**JUDGE, **judge}
    return {"state": {"dir": "state"}, **UNWATCHED, **sections}


def make_config(folder: Path, **sections: Any) -> Config:
    """A configuration in `folder`, whose state is `folder/state`."""
    return parse(raw_config(**sections), "test", folder)


def with_settings(config: Config, **sections: dict[str, Any]) -> Config:
    """The configuration with other values in some of its sections."""
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def write_config(folder: Path, *, name: str = "flywheel.yaml", **sections: Any) -> Path:
    """The file of a configuration whose state is `folder/state`."""
    return write_yaml(folder / name, raw_config(**sections))


def write_rubric(folder: Path, *, name: str = "rubric.yaml", **values: Any) -> Path:
    return write_yaml(folder / name, {**RUBRIC, **values})


def write_chain(folder: Path, *filters: dict[str, Any], name: str = "chain.yaml", **values: Any) -> Path:
    return write_yaml(folder / name, {"id": "c", "filters": list(filters), **values})


def write_yaml(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def base_model(folder: Path, name: str = "base") -> str:
    """The directory of a base model, as far as planning looks at it."""
    directory = folder / "models" / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    return str(directory)


def told_settings(ran: Any) -> dict[str, tuple[Any, str]]:
    """Value and origin of each setting that `flywheel config show --json` printed."""
    return {each["key"]: (each["value"], each["origin"]) for each in ran.json["settings"]}


MISTAKES: list[dict[Any, Any]] = [
    {"sources": 5}, {"sources": [5]}, {"sources": [[{"path": "a"}]]}, {"sources": {"path": "x"}}, {"sources": [None]},
    {"sources": [{"type": 5}]}, {"sources": [{"type": ["studio"]}]}, {"sources": [{"path": 5}]}, {"training": None},
    {"training": [1]}, {"training": {"steps": 1.5}}, {"training": {"steps": -1}}, {"training": {"steps": None}},
    {"training": {"learning_rate": float("nan")}}, {"gate": {"alpha": float("nan")}}, {"gate": {"alpha": "high"}},
    {"training": {"loss_type": "x"}}, {"training": {"lora": {"target_modules": []}}}, {"judge": {"model": 5}},
    {"training": {"lora": {"target_modules": [5]}}}, {"training": {"seed": 2**40}}, {"judge": {"prices": {}}},
    {"judge": {"api_key_env": ["a"]}}, {"judge": {"backup": "x"}}, {"judge": {"allow_self": "maybe"}},
    {"serving": {"urls": []}}, {"serving": {"urls": "http://x"}}, {"serving": {"urls": ["http://[x"]}},
    {"serving": {"urls": ["http://x:port"]}}, {"serving": {"extra_args": "--x"}}, {"serving": {"extra_args": [1]}},
    {"gate": {"non_inferiority_margins": [1]}}, {"gate": {"non_inferiority_margins": {1: 0.1}}}, {5: 1},
    {"trigger": {"cron": "99 * * * *"}}, {"trigger": {"cron": 5}}, {"filter": {"rubric": None}}, {"judge": {5: 1}},
    {"state": {"dir": ["a"]}}, {"ingest": {"split_seed": float("inf")}}, {"retention": {"keep_days": 10**9}},
]  # fmt: skip


def round_config(tmp_path: Path, **sections: Any) -> Config:
    """With it, a round can be planned."""
    defaults = {
        "model": {"base": base_model(tmp_path), "alias": "agent"},
        "gate": {"min_tasks": 1, "min_power": 0},
        "filter": {"rubric": str(BOXED_RUBRIC)},
    }
    return make_config(tmp_path, **{**defaults, **sections})


def with_chain(tmp_path: Path, *filters: dict[str, Any]) -> dict[str, Any]:
    return {"filter": {"rubric": str(BOXED_RUBRIC), "chain": str(write_chain(tmp_path, *filters))}}
