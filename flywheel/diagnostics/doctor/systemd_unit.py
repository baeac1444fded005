"""Check of the systemd unit: does it start this installation with this configuration and state."""

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
UNIT: Final = "flywheel.service"
TEMPLATE: Final = "flywheel@.service"
_SPECIFIERS: Final = {"%S": "/var/lib", "%C": "/var/cache", "%L": "/var/log", "%t": "/run", "%E": "/etc"}


def check_unit(config: Config | None, path: Path | None, folders: Sequence[Path] = FOLDERS) -> Finding:
    """The unit against the configuration at `path`."""
    files = [folder / name for name in (UNIT, TEMPLATE) for folder in folders]
    file = next((each for each in files if each.is_file()), None)
    if file is None:
        why = "no flywheel.service is installed: `flywheel init --systemd` writes one to systemd/"
        return Finding("service", Result.SKIPPED, why)
    try:
        text = _read(file, folders)
    except OSError as error:
        return Finding("service", Result.SKIPPED, f"{error.filename or file}: {error.strerror}")
    if file.name == TEMPLATE:
        instance = _instance(_config_of(_command(text)), path)
        if instance is None:
            return Finding("service", Result.SKIPPED, f"no instance of {file} uses this configuration")
        text = re.sub("%[iI]", instance, text)
    return Finding("service", *_compare(file, text, config, path))


def _compare(file: Path, text: str, config: Config | None, path: Path | None) -> tuple[Result, str, str]:
    words, edit = _command(text), f"Edit {file}, then: systemctl daemon-reload."
    if not words:
        return Result.FAILED, f"{file} has no ExecStart", "Write it again: flywheel init --systemd."
    program = Path(words[0].lstrip("@-:+!"))
    if not os.access(program, os.X_OK):
        return Result.FAILED, f"{file} starts {program}, which cannot be run", edit
    named = _config_of(words)
    if named is not None and not named.is_file():
        return Result.FAILED, f"{file} names the configuration {named}, which is not there", edit
    if named is not None and path is not None and not _same(named, path):
        why = f"{file} uses {named}, and this is about {path.absolute()}"
        return Result.WARNING, why, f"Check the service's own configuration: flywheel doctor -c {named}."
    if config is not None and (other := _other_state(config, text)):
        why = f"{file} keeps the state in {other}, and commands by hand look at {config.state_dir}"
        return Result.WARNING, why, f"Set state: {{dir: {other}}} in the configuration, so that both use it."
    return Result.OK, f"{file}{' (this runs under it)' if 'INVOCATION_ID' in os.environ else ''}", ""


def _read(file: Path, folders: Sequence[Path]) -> str:
    """The unit with its drop-ins (`systemctl edit`)."""
    drop_ins = [each for folder in folders for each in (folder / f"{file.name}.d").glob("*.conf")]
    files = (file, *sorted(drop_ins, key=lambda each: each.name))
    text = re.sub(r"\\\n", " ", "\n".join(each.read_text(errors="replace") for each in files))
    for specifier, folder in _SPECIFIERS.items():
        text = text.replace(specifier, folder)
    return text


def _command(text: str) -> list[str]:
    found = re.findall(r"^[ \t]*ExecStart[ \t]*=[ \t]*(\S.*)$", text, re.MULTILINE)
    try:
        return shlex.split(found[-1]) if found else []
    except ValueError:
        return str(found[-1]).split()


def _config_of(words: Sequence[str]) -> Path | None:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("-c", "--config") and following:
            return Path(following)
        if word.startswith("--config="):
            return Path(word.partition("=")[2])
    return None


def _instance(named: Path | None, path: Path | None) -> str | None:
    """The instance of a template whose configuration is `path`."""
    if named is None or path is None:
        return None
    pattern = "([^/]+)".join(map(re.escape, re.split("%[iI]", str(named))[:2]))
    found = re.fullmatch(pattern, str(path.absolute()))
    return found[1] if found and found.groups() else None


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _other_state(config: Config, text: str) -> str:
    """The state directory of the unit's daemon, if commands by hand use another one."""
    found = re.findall(r"^\s*Environment\s*=.*?FLYWHEEL_HOME=([^\s\"']+)", text, re.MULTILINE)
    try:
        differs = config.state.dir is None and found and not _same(Path(found[-1]), config.state_dir)
    except FlywheelError:
        return ""
    return str(found[-1]) if differs else ""
