"""The commands of `flywheel`, all of them loaded."""

from __future__ import annotations

import importlib

from typer.core import TyperGroup
from typer.main import get_group

from flywheel.cli.app import COMMANDS, app


def root() -> TyperGroup:
    for module in COMMANDS.values():
        importlib.import_module(f"flywheel.cli.{module}")
    return get_group(app)
