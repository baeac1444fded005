"""What an alias stands for: one version or, while it is split, two, of which each answers a share of the units.

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
class Split:
    """`share` of an alias's units, between 0 and 1, go to its target and the others to the version `other`.

    `salt` decides which, and is not empty and at most 64 bytes long. Raises ValueError for others.
    """

    other: AliasTarget
    share: float
    salt: str

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError("the share of a split must be between 0 and 1")
        if not 0 < len(self.salt.encode()) <= MAX_SALT_BYTES:
            raise ValueError(f"the salt of a split must have 1 to {MAX_SALT_BYTES} bytes")

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
    files; and, if the alias is split, the other version. The same files in another directory are equal."""

    name: str
    path: str | None = field(default=None, compare=False)
    sha256: str | None = None
    split: Split | None = None

    @classmethod
    def of_json(cls, given: Any) -> Self:
        """Raises as `Split.of_json`."""
        name, path, sha256 = texts(given, "path", "sha256")
        split = given.get("split")
        return cls(str(name), path, sha256, None if split is None else Split.of_json(split))

    def as_json(self) -> dict[str, Any]:
        """Without `split` if there is none."""
        shown: dict[str, Any] = {"target": self.name, "path": self.path, "sha256": self.sha256}
        return {**shown, "split": self.split.as_json()} if self.split else shown

    @property
    def versions(self) -> tuple[AliasTarget, ...]:
        """The target, and the other version of a split."""
        return (self, self.split.other) if self.split else (self,)


def version_names(target: str, split: Split | None) -> list[str]:
    """The served names of what answers: the target, and the other version of a split."""
    return [target, split.other.name] if split else [target]


class ShownAliases(msgspec.Struct):
    """What a server says of its aliases, by their names; paths and hashes by those of their targets."""

    aliases: Mapping[str, str]
    paths: Mapping[str, str]
    digests: Mapping[str, str]
    splits: Mapping[str, dict[str, Any]]
    """As `Split.as_json` has them."""
    waiting: Mapping[str, str]
    """Those that are not answered, with the reason."""
    missing: Mapping[str, str]
    """Those that are split of which one version is not loaded, and that version."""
    revisions: Mapping[str, int]
    base_model: str
    instance: str
    """Changes with each start of the server."""
    max_adapters: int | None
    """How many can be loaded at the same time; None: any number."""
