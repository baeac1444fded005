"""The lists of pinned packages: whole, and of one version each."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.base_dependencies import DEPENDENCIES, closure
from tests.conftest import TRAINING

ROOT = Path(__file__).parent.parent


def pinned(name: str) -> dict[str, str]:
    """The versions that a list names itself, by package."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith(("#", "-r "))]
    return {canonicalize_name(package): version for package, version in pins}


def test_the_base_list_has_what_the_base_dependencies_need_and_nothing_else() -> None:
    base = pinned("base")
    assert base.keys() == closure(DEPENDENCIES).keys()
    for requirement in map(Requirement, DEPENDENCIES):
        assert base[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_base_and_dev_lists_together_are_whole_and_have_nothing_for_training() -> None:
    packages = pinned("base") | pinned("dev")
    assert closure(list(packages)).keys() == packages.keys()
    assert not packages.keys() & set(map(canonicalize_name, TRAINING))


def test_no_package_has_two_versions() -> None:
    lists = {name: pinned(name) for name in ("base", "cpu", "dev", "gpu", "torch-cpu")}
    assert {path.stem for path in (ROOT / "requirements").iterdir()} == {*lists, "model"}
    differ = {
        (package, version, other)
        for versions in lists.values()
        for package, version in versions.items()
        for other in (each[package].partition("+")[0] for each in lists.values() if package in each)
        if version.partition("+")[0] != other
    }
    assert differ == set()
    for name in ("cpu", "gpu"):
        assert "-r base.txt" in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    for name in ("cpu", "gpu", "dev"):
        assert not lists[name].keys() & lists["base"].keys(), f"{name}.txt repeats packages of base.txt"
