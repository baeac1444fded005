"""Models by name: which replies the alias gave, and which other models' replies are trained on."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from msgspec import Struct


class Models(Struct, frozen=True):
    """`alias` is what agents call, `base` what it stands for at first, and its versions are named `ALIAS@rNNNN`.

    Replies of these are trained on, and those of models that match a pattern of `include`; those that match one of
    `exclude` never are. A model whose name is not known counts as one of these.
    """

    alias: str = ""
    base: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def is_own(self, model: str, adapter: str) -> bool:
        """Whether the alias, a version of it or its base gave a reply that was asked of `model`."""
        version = f"{self.alias}@"
        return model in ("", self.alias, self.base) or adapter.startswith(version) or model.startswith(version)

    def trains(self, model: str, adapter: str) -> bool:
        """Whether such a reply is trained on."""
        if any(fnmatchcase(model, pattern) for pattern in self.exclude):
            return False
        return self.is_own(model, adapter) or any(fnmatchcase(model, pattern) for pattern in self.include)


ANY: Final = Models(include=("*",))
"""Replies of all models are trained on."""
