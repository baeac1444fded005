"""What an alias stands for: one version or, during an A/B test, two, of which each answers a share of the units.

Used by the server and by its clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import msgspec

MAX_SALT_BYTES: Final = 64
"""The longest key of BLAKE2b."""


def texts(given: Any, *optional: str) -> list[str | None]:
    """The `target` of an entry, which must be there, and these other texts of it. Raises TypeError or KeyError."""
    found = [given["target"], *(given.get(name) for name in optional)]
    if not isinstance(found[0], str) or not all(isinstance(value, str | None) for value in found):
        raise TypeError("expected texts")
    return found


@dataclass(frozen=True, slots=True)
class ABTest:
    """`share` of an alias's units, between 0 and 1, go to its target and the others to the version `other`.

    `salt` decides which, and is not empty and at most 64 bytes long. Raises ValueError for others.
    """

    other: AliasTarget
    share: float
    salt: str

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError("the share of an A/B test must be between 0 and 1")
        if not 0 < len(self.salt.encode()) <= MAX_SALT_BYTES:
            raise ValueError(f"the salt of an A/B test must have 1 to {MAX_SALT_BYTES} bytes")

    @classmethod
    def of_json(cls, given: Any) -> Self:
        """Raises TypeError, ValueError, KeyError or AttributeError for anything that `as_json` did not write."""
        name, path, sha256, salt = texts(given, "path", "sha256", "salt")
        share = given["share"]
        if not name or salt is None or isinstance(share, bool) or not isinstance(share, int | float):
            raise TypeError("expected {target, path, sha256, share, salt}")
        return cls(AliasTarget(name, path, sha256), float(share), salt)

    def as_json(self) -> dict[str, Any]:
        return {**self.other.as_json(), "share": self.share, "salt": self.salt}


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """A served model's name and, unless it is the base model, the adapter's directory and the hash of its verified
    files; and, during an A/B test, the other version. The same files in another directory are equal."""

    name: str
    path: str | None = field(default=None, compare=False)
    sha256: str | None = None
    ab_test: ABTest | None = None

    @classmethod
    def of_json(cls, given: Any) -> Self:
        """Raises as `ABTest.of_json`."""
        name, path, sha256 = texts(given, "path", "sha256")
        ab_test = given.get("ab_test")
        return cls(str(name), path, sha256, None if ab_test is None else ABTest.of_json(ab_test))

    def as_json(self) -> dict[str, Any]:
        """Without `ab_test` if there is none."""
        shown: dict[str, Any] = {"target": self.name, "path": self.path, "sha256": self.sha256}
        return {**shown, "ab_test": self.ab_test.as_json()} if self.ab_test else shown

    @property
    def versions(self) -> tuple[AliasTarget, ...]:
        """The target, and the other version of an A/B test."""
        return (self, self.ab_test.other) if self.ab_test else (self,)


def version_names(target: str, ab_test: ABTest | None) -> list[str]:
    """The served names of what answers: the target, and the other version of an A/B test."""
    return [target, ab_test.other.name] if ab_test else [target]


class ShownAliases(msgspec.Struct):
    """What a server says of its aliases, by their names; paths and hashes by those of their targets."""

    aliases: Mapping[str, str]
    paths: Mapping[str, str]
    digests: Mapping[str, str]
    ab_tests: Mapping[str, dict[str, Any]]
    """As `ABTest.as_json` has them."""
    waiting: Mapping[str, str]
    """Those that are not answered, with the reason."""
    missing: Mapping[str, str]
    """Those in an A/B test of which one version is not loaded, and that version."""
    revisions: Mapping[str, int]
    base_model: str
    instance: str
    """Changes with each start of the server."""
    max_adapters: int | None
    """How many can be loaded at the same time; None: any number."""
