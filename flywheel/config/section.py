"""The base class of all sections: strict, frozen, documented by the docstrings of its fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from flywheel.files import expanded
from flywheel.known_secrets import register_secret_variable

UserPath = Annotated[Path, AfterValidator(expanded)]
"""A path with `~` expanded."""
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _names_secrets(self) -> Self:
        """Register the variables that settings ending in `_env` name, so that their values are never printed."""
        for name in type(self).model_fields:
            if name.endswith("_env") and (variable := getattr(self, name)):
                register_secret_variable(variable)
        return self
