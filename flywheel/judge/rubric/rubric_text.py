"""A rubric as text for people: YAML with everything that differs from the defaults."""

from __future__ import annotations

from typing import Any, Final

import yaml

from flywheel.judge.rubric.rubric import Rubric

WIDTH: Final = 110


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, so that a difference shows the lines that changed."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def text_of(rubric: Rubric) -> str:
    """The rubric with the files that it uses; two versions that differ have different texts."""
    content: dict[str, Any] = {"version": rubric.version, **rubric.model_dump(mode="json", exclude_defaults=True)}
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)
