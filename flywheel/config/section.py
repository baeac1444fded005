"""What every section of the configuration is made of: strict, frozen, documented by its fields' docstrings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from flywheel.files import expanded

UserPath = Annotated[Path, AfterValidator(expanded)]
"""A path in which `~` is expanded."""
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
