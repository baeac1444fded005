"""YAML that people write: read, checked against a model, and explained when it is wrong."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from flywheel.errors import ConfigError


def read_yaml(path: Path, attempted: str, if_missing: str) -> Any:
    """What a file holds. Raises ConfigError; `if_missing` is the remedy when there is no such file."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(attempted, "there is no such file", if_missing) from None
    except OSError as error:
        raise ConfigError(attempted, error.strerror or str(error), "Check the path and its permissions.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(attempted, "it is not UTF-8 text", "Name a YAML file.") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        # ValueError: a date or number that looks like one and is none.
        raise ConfigError(
            attempted, f"it is not YAML: {' '.join(str(error).split())}", "Correct the file."
        ) from error


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Each problem with the path of its key; for an unknown key, the name that may have been meant."""
    return "; ".join(_explain_one(dict(item), model) for item in error.errors())


def _explain_one(item: dict[str, Any], model: type[BaseModel]) -> str:
    location = item["loc"]
    key = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        known = _keys_at(model, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        meant = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(known)}"
        return f"unknown key `{key}` ({meant})"
    message = item["msg"].removeprefix("Value error, ")
    return f"`{key}`: {message[:1].lower()}{message[1:]}" if key else message


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part) if hasattr(current, "model_fields") else None
        if field is None:
            return []
        current = field.annotation
        arguments = getattr(current, "__args__", ())
        current = next((a for a in arguments if isinstance(a, type) and issubclass(a, BaseModel)), current)
    return sorted(current.model_fields) if hasattr(current, "model_fields") else []
