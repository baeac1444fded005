"""The base class of all sections: strict, frozen, documented by the docstrings of its fields. Settings by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from flywheel.errors import ConfigError
from flywheel.secrets import masked_url, register_secret_variable
from flywheel.system.files import expanded, tidied
from flywheel.system.terminal import quantity
from flywheel.system.yaml_file import yaml_value


def _user_path(path: Path, info: ValidationInfo) -> Path:
    path = (info.context or Path()) / expanded(path)
    return tidied(path) if ".." in path.parts else path


def check_url(url: str) -> str:
    """Raises ValueError for what is no address of a web server. The address itself is not in the message."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_right = False
    if not is_right:
        raise ValueError("it must begin with http:// or https:// and name a host")
    return url


def _hub_name(name: str, info: ValidationInfo) -> str:
    if info.context and name.startswith(("./", "../")):
        # Not tidied: adapters record the name of the base model as it was written.
        return str(info.context / name)
    return str(expanded(Path(name))) if name.startswith("~") else name


HubName = Annotated[str, AfterValidator(_hub_name)]
"""A name of the Hub, or a path that begins with `./`, `../`, `~` or `/`."""
WebUrl = Annotated[str, AfterValidator(check_url), AfterValidator(masked_url)]
"""An address of a web server, without the name and password that may be in it (`whole_url` has them)."""
UserPath = Annotated[Path, AfterValidator(_user_path)]
"""A path with `~` expanded. The context of the validation is the folder that it is relative to."""
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @model_validator(mode="after")
    def _names_secrets(self) -> Self:
        """Register the variables that settings ending in `_env` name, so that their values are never printed."""
        for name in type(self).model_fields:
            if name.endswith("_env") and (variable := getattr(self, name)):
                register_secret_variable(variable)
        return self


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings, with those in them; where both have a value, that of `above`."""
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        result[key] = merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


def put(into: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, whose sections are made where they are missing."""
    *sections, key = path.split(".")
    for section in sections:
        into = into.setdefault(section, {})
    into[key] = value


def value_at(settings: Any, path: str) -> Any:
    """The value at a dotted path, in which the items of a list have numbers; None where there is none."""
    for part in path.split("."):
        settings = _parts(settings).get(part)
    return settings


def has(settings: Any, path: str) -> bool:
    """Whether there is a value at a dotted path."""
    above, _, key = path.rpartition(".")
    return key in _parts(value_at(settings, above) if above else settings)


def _parts(settings: Any) -> Mapping[str, Any]:
    if isinstance(settings, list):
        return {str(at): each for at, each in enumerate(settings)}
    return settings if isinstance(settings, Mapping) else {}


class GivenSetting(NamedTuple):
    """A setting of the command line: a dotted path, in which the items of a list have numbers, and a value."""

    key: str
    value: Any

    @classmethod
    def of(cls, text: str) -> GivenSetting:
        """From KEY=VALUE, with a YAML value. Raises ConfigError."""
        key, mark, value = text.partition("=")
        attempted, hint = f"use --set {key}", "Write --set KEY=VALUE, for example --set judge.model=MODEL."
        if not mark or not all(key.split(".")):
            raise ConfigError(attempted, f"it has no {'key' if mark else '='}", hint)
        return cls(key, yaml_value(value, attempted, hint))

    def put_into(self, raw: Any) -> Any:
        """`raw` with this setting, itself unchanged. Raises ConfigError where no section can be."""
        try:
            return _replaced(raw, self.key.split("."), self.value)
        except ValueError as error:
            raise ConfigError(f"use --set {self.key}", str(error), "Correct the path.") from None


def _replaced(raw: Any, path: Sequence[str], value: Any) -> Any:
    if not path:
        return value
    first, *rest = path
    if isinstance(raw, list):
        if not first.isdecimal() or int(first) >= len(raw):
            raise ValueError(f"`{first}` stands where a list of {quantity(len(raw), 'item')} is, counted from 0")
        return [_replaced(item, rest, value) if str(at) == first else item for at, item in enumerate(raw)]
    if raw is not None and not isinstance(raw, Mapping):
        raise ValueError(f"`{first}` stands below a value, not below a section")
    return {**(raw or {}), first: _replaced((raw or {}).get(first), rest, value)}


def leaves(raw: Any, above: str = "", *, lists: bool = True, mark: str = ".") -> Iterator[tuple[str, Any]]:
    """All values of settings, or of other nested mappings, by their paths with `mark` between the names; without
    `lists`, a list is one value. An empty section has none."""
    if not isinstance(raw, Mapping) and not (lists and isinstance(raw, list) and raw):
        yield above, raw
        return
    for key, value in raw.items() if isinstance(raw, Mapping) else enumerate(raw):
        yield from leaves(value, f"{above}{mark}{key}" if above else str(key), lists=lists, mark=mark)
