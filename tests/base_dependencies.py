"""The base dependencies of a wheel, as links into this environment: what `pip install WHEEL` would bring."""

from __future__ import annotations

import tomllib
import zipfile
from email.parser import BytesParser
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
DEPENDENCIES: list[str] = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]


def requirements_of(wheel: Path) -> list[str]:
    """What the wheel requires, extras and all, as its metadata says."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return BytesParser().parsebytes(archive.read(name)).get_all("Requires-Dist", [])


def closure(requirements: list[str]) -> dict[str, Distribution]:
    """The distributions that these requirements lead to, by name, without any extra that nothing asks for."""
    found: dict[str, Distribution] = {}
    wanted = [(text, frozenset[str]()) for text in requirements]
    seen = set(wanted)
    while wanted:
        text, extras = wanted.pop()
        requirement = Requirement(text)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        name = canonicalize_name(requirement.name)
        found[name] = distribution(name)
        of_it = frozenset({"", *requirement.extras})
        further = {(each, of_it) for each in found[name].requires or ()} - seen
        seen |= further
        wanted += further
    return found


def link(distributions: dict[str, Distribution], folder: Path) -> None:
    """Links to every file of the distributions, below this folder as below site-packages. Commands are left out."""
    for each in distributions.values():
        for file in each.files or ():
            source = Path(str(each.locate_file(file)))
            if ".." in file.parts or not source.exists():
                continue
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(source)
