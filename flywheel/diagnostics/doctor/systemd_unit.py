"""The systemd unit, where there is one: whether it starts this installation with this configuration and state."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flywheel.config import Config
from flywheel.diagnostics.doctor.finding import Finding, Result
from flywheel.errors import FlywheelError

FOLDERS: Final = tuple(
    Path(folder) for folder in ("/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system",
                                "/usr/lib/systemd/system")
)  # fmt: skip
NAME: Final = "flywheel.service"
TEMPLATE: Final = "flywheel@.service"
_NONE: Final = "no flywheel.service is installed: `flywheel init --systemd` lays one out in systemd/"
_SPECIFIERS: Final = {"%S": "/var/lib", "%C": "/var/cache", "%L": "/var/log", "%t": "/run", "%E": "/etc"}


def unit(config: Config | None, path: Path | None, folders: Sequence[Path] = FOLDERS) -> Finding:
    """The unit against the configuration at `path`."""
    places = [folder / name for name in (NAME, TEMPLATE) for folder in folders]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return Finding("service", Result.SKIPPED, _NONE)
    try:
        text = _text(file, folders)
    except OSError as error:
        return Finding("service", Result.SKIPPED, f"{error.filename or file}: {error.strerror}")
    if file.name == TEMPLATE:
        if (instance := _instance(text, path)) is None:
            told = f"no instance of {file} goes by this configuration"
            return Finding("service", Result.SKIPPED, told)
        text = re.sub("%[iI]", instance, text)
    words = _command(text)
    if not words:
        return Finding("service", Result.FAILED, f"{file} has no ExecStart", "Lay it out again: flywheel init.")
    program = Path(words[0].lstrip("@-:+!"))
    edit = f"Edit {file}, then: systemctl daemon-reload."
    if not os.access(program, os.X_OK):
        return Finding("service", Result.FAILED, f"{file} starts {program}, which cannot be run", edit)
    named = _config_of(words)
    if named is not None and not named.is_file():
        return Finding("service", Result.FAILED, f"{file} names the configuration {named}, which is not there", edit)
    if named is not None and path is not None and not _same(named, path):
        told = f"{file} goes by {named}, and this is about {path.absolute()}"
        return Finding("service", Result.WARNING, told, f"Look at the service's own: flywheel doctor -c {named}.")
    if config is not None and (other := _other_state(config, text)):
        told = f"{file} keeps the state in {other}, and commands by hand look at {config.state_dir}"
        remedy = f"Set state: {{dir: {other}}} in the configuration: the same for both."
        return Finding("service", Result.WARNING, told, remedy)
    running = " (this runs under it)" if "INVOCATION_ID" in os.environ else ""
    return Finding("service", Result.OK, f"{file}{running}")


def _text(file: Path, folders: Sequence[Path]) -> str:
    """The unit with what `systemctl edit` adds to it."""
    more = sorted((each for folder in folders for each in (folder / f"{file.name}.d").glob("*.conf")), key=_name_of)
    text = re.sub(r"\\\n", " ", "\n".join(each.read_text(errors="replace") for each in (file, *more)))
    for specifier, place in _SPECIFIERS.items():
        text = text.replace(specifier, place)
    return text


def _name_of(file: Path) -> str:
    return file.name


def _instance(text: str, path: Path | None) -> str | None:
    """Of which instance `path` is the configuration."""
    named = _config_of(_command(text))
    if named is None or path is None:
        return None
    pattern = "([^/]+)".join(map(re.escape, re.split("%[iI]", str(named))[:2]))
    found = re.fullmatch(pattern, str(path.absolute()))
    return found[1] if found and found.groups() else None


def _command(text: str) -> list[str]:
    found = re.findall(r"^[ \t]*ExecStart[ \t]*=[ \t]*(\S.*)$", text, re.MULTILINE)
    try:
        return shlex.split(found[-1]) if found else []
    except ValueError:
        return str(found[-1]).split()


def _config_of(words: Sequence[str]) -> Path | None:
    for place, word in enumerate(words):
        if word in ("-c", "--config") and place + 1 < len(words):
            return Path(words[place + 1])
        if word.startswith("--config="):
            return Path(word.partition("=")[2])
    return None


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _other_state(config: Config, text: str) -> str:
    """Where the unit's daemon keeps its state, if that is not where commands by hand look."""
    if config.state.dir is not None:
        return ""
    found = re.findall(r"^\s*Environment\s*=.*?FLYWHEEL_HOME=([^\s\"']+)", text, re.MULTILINE)
    try:
        return str(found[-1]) if found and not _same(Path(found[-1]), config.state_dir) else ""
    except FlywheelError:
        return ""
