"""Check of the systemd unit: does it start this installation with this configuration and state."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flywheel.cli.doctor.finding import Finding, Result
from flywheel.config import Config
from flywheel.errors import FlywheelError

FOLDERS: Final = tuple(Path(folder, "systemd/system") for folder in ("/etc", "/run", "/usr/local/lib", "/usr/lib"))
TEMPLATE: Final = "flywheel@.service"


def check_unit(config: Config | None, path: Path | None, folders: Sequence[Path] = FOLDERS) -> Finding:
    """The unit, or the template's instance, against the configuration at `path`."""
    files = [folder / name for name in ("flywheel.service", TEMPLATE) for folder in folders]
    file = next((each for each in files if each.is_file()), None)
    if file is None:
        why = "no flywheel.service is installed: `flywheel init --systemd` writes one to systemd/"
        return Finding("service", Result.SKIPPED, why)
    # The unit with its drop-ins (`systemctl edit`).
    drop_ins = [each for folder in folders for each in (folder / f"{file.name}.d").glob("*.conf")]
    try:
        texts = [each.read_text(errors="replace") for each in (file, *sorted(drop_ins, key=lambda each: each.name))]
    except OSError as error:
        return Finding("service", Result.SKIPPED, f"{error.filename}: {error.strerror}")
    text = "\n".join(texts).replace("\\\n", " ").replace("%S", "/var/lib")
    if file.name == TEMPLATE:
        pattern = "([^/]+)".join(map(re.escape, re.split("%[iI]", str(_config_of(text)))[:2]))
        instance = re.fullmatch(pattern, str(path and path.absolute()))
        if instance is None or not instance.groups():
            return Finding("service", Result.SKIPPED, f"no instance of {file} uses this configuration")
        text = re.sub("%[iI]", instance[1], text)
    return Finding("service", *_compare(file, text, config, path))


def _compare(file: Path, text: str, config: Config | None, path: Path | None) -> tuple[Result, str, str]:
    words, edit = _command(text), f"Edit {file}, then: systemctl daemon-reload."
    if not words:
        return Result.FAILED, f"{file} has no ExecStart", "Write it again: flywheel init --systemd."
    program = Path(words[0].lstrip("@-:+!"))
    if not os.access(program, os.X_OK):
        return Result.FAILED, f"{file} starts {program}, which cannot be run", edit
    named = _config_of(text)
    if named is not None and not named.is_file():
        return Result.FAILED, f"{file} names the configuration {named}, which is not there", edit
    if named is not None and path is not None and os.path.realpath(named) != os.path.realpath(path):
        why = f"{file} uses {named}, not {path.absolute()}"
        return Result.WARNING, why, f"Check the service's own configuration: flywheel doctor -c {named}."
    homes = re.findall(r"^\s*Environment\s*=.*?FLYWHEEL_HOME=([^\s\"']+)", text, re.MULTILINE)
    with contextlib.suppress(FlywheelError):  # another check reports that the state cannot be found
        own = config.state_dir if config is not None and config.state.dir is None else None
        if own and homes and os.path.realpath(homes[-1]) != os.path.realpath(own):
            why = f"{file} keeps the state in {homes[-1]}, and other commands use {own}"
            return Result.WARNING, why, f"Set state: {{dir: {homes[-1]}}} in the configuration, so that both use it."
    return Result.OK, str(file), ""


def _command(text: str) -> list[str]:
    found = re.findall(r"^[ \t]*ExecStart[ \t]*=[ \t]*(\S.*)$", text, re.MULTILINE)
    try:
        return shlex.split(found[-1]) if found else []
    except ValueError:
        return str(found[-1]).split()


def _config_of(text: str) -> Path | None:
    found = re.search(r" (?:-c|--config)[ =](\S+)", " ".join(_command(text)))
    return Path(found[1]) if found else None
