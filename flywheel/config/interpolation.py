"""Interpolations such as `${oc.env:MODEL,Qwen/Qwen3-8B}` and `${model.path}` in configurations of other programs.

OmegaConf resolves what our own reader has read, so that errors name the line. Texts for models are left as they are,
and so are Flywheel's own files, in which `${` has no meaning.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from flywheel.config.agentjet import MARKERS
from flywheel.config.trinity import is_trinitys
from flywheel.errors import ConfigError
from flywheel.system.yaml_file import KeyPath, YamlDocument

FREE_TEXT: Final = re.compile(r"(?:.*_)?(?:prompt|rubric|template)s?")
"""Keys of texts for models."""
MISSING: Final = "???"
MARK: Final = "\0free text "
"""Begins what stands for such a text; no YAML text has this character."""


def values_of(document: YamlDocument, attempted: str) -> Any:
    """The value of a document; that of another program's configuration with its interpolations resolved. Raises
    ConfigError, which names key and line, for one that cannot be resolved, and for a value `???`."""
    raw = document.value
    if not isinstance(raw, Mapping) or (MARKERS.isdisjoint(raw) and not is_trinitys(raw)):
        return raw
    places = [path for path, value in _texts(raw, ()) if "${" in value or value == MISSING]
    return _resolved(document, places, attempted) if places else raw


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not FREE_TEXT.fullmatch(str(key)):
                yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*path, index))


def _resolved(document: YamlDocument, places: list[KeyPath], attempted: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    texts: list[Any] = []
    whole: Any = None
    # First each alone: what is no interpolation is an error of the whole otherwise.
    for is_alone, place in itertools.product((True, False), places):
        try:
            if is_alone:
                OmegaConf.create([_at(document.value, place)])
                continue
            if whole is None:
                # Dates and other values of YAML that OmegaConf does not know are kept as they are.
                whole = OmegaConf.create(_masked(document.value, texts), flags={"allow_objects": True})
            _at(whole, place)
        except MissingMandatoryValue:
            raise _error(document, place, attempted, "it is ???, which is no value") from None
        except OmegaConfBaseException as error:
            why = str(error.msg or error).splitlines()[0]
            raise _error(document, place, attempted, f"it cannot be resolved: {why}") from None
    return _unmasked(OmegaConf.to_container(whole, resolve=True), texts)


def _masked(value: Any, texts: list[Any]) -> Any:
    """A copy with marks for its free texts, which OmegaConf would read."""
    if isinstance(value, list):
        return [_masked(inner, texts) for inner in value]
    if not isinstance(value, Mapping):
        return value
    made = {}
    for key, inner in value.items():
        if is_free := FREE_TEXT.fullmatch(str(key)) is not None:
            texts.append(inner)
        made[key] = f"{MARK}{len(texts) - 1}" if is_free else _masked(inner, texts)
    return made


def _unmasked(value: Any, texts: list[Any]) -> Any:
    if isinstance(value, dict):
        return {key: _unmasked(inner, texts) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unmasked(inner, texts) for inner in value]
    return texts[int(value[len(MARK) :])] if isinstance(value, str) and value.startswith(MARK) else value


def _at(value: Any, place: KeyPath) -> Any:
    for key in place:
        value = value[key]
    return value


def _error(document: YamlDocument, place: KeyPath, attempted: str, why: str) -> ConfigError:
    line = document.position(place).line
    name = ".".join(map(str, place))
    return ConfigError(attempted, f"line {line}: `{name}`: {why}", "Set the variable or the key that it names.")
