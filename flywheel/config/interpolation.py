"""Interpolations such as `${oc.env:MODEL,Qwen/Qwen3-8B}` and `${model.path}` in configurations of other programs.

OmegaConf resolves what our own reader has read, so that errors name the line. Texts for models are left as they are,
and so are Flywheel's own files, in which `${` has no meaning. A file cannot make them grow without end: each is
resolved once, after those that it names, and what it may become is limited.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from flywheel.config.agentjet import MARKERS
from flywheel.config.trinity import is_trinitys
from flywheel.errors import ConfigError
from flywheel.system.yaml_file import KeyPath, YamlDocument

FREE_TEXT: Final = re.compile(r"(?:.*_)?(?:prompt|rubric|template)s?")
"""Keys of texts for models."""
MISSING: Final = "???"
MAX_INTERPOLATIONS: Final = 500
MAX_CHAIN: Final = 8
"""How many interpolations may follow from each other, and how deep one may have others inside it."""
MAX_CHARACTERS: Final = 10_000
"""Of an interpolation, and of what it becomes."""
UNRESOLVED: Final = "an interpolation that waits"
"""The name of a variable that is never set: what needs an interpolation that is not resolved yet fails by it."""
WAITING: Final = f"${{oc.env:{UNRESOLVED}}}"
"""Stands for an interpolation until it is resolved."""
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
    from omegaconf.errors import OmegaConfBaseException

    count = sum(_at(document.value, place).count("${") for place in places)
    for place in places:
        text = _at(document.value, place)
        why = "it is ???, which is no value" if text == MISSING else _excess(text, count)
        if why:
            raise _error(document, place, attempted, why)
    texts: list[Any] = []
    # Dates and other values of YAML that OmegaConf does not know are kept as they are.
    whole = OmegaConf.create(_masked(document.value, texts), flags={"allow_objects": True})
    left = places
    for _ in range(MAX_CHAIN):
        waiting = []
        for place in left:
            above, key = _at(whole, place[:-1]), place[-1]
            try:
                above[key] = _at(document.value, place)
                value = above[key]
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True)
            except (OmegaConfBaseException, RecursionError) as error:
                why = str(getattr(error, "msg", None) or error).splitlines()[0]
                if UNRESOLVED not in why:
                    raise _error(document, place, attempted, f"it cannot be resolved: {why}") from None
                waiting.append(place)
                above[key] = WAITING
                continue
            if len(str(value)) > MAX_CHARACTERS:
                raise _error(document, place, attempted, f"it becomes longer than {MAX_CHARACTERS} characters")
            above[key] = mapped(value, _escaped)
        if not (left := waiting):
            return mapped(
                OmegaConf.to_container(whole, resolve=True),
                lambda end: texts[int(end[len(MARK) :])] if isinstance(end, str) and end.startswith(MARK) else end,
            )
    why = f"it leads back to itself, or to more than {MAX_CHAIN} others, one after another"
    raise _error(document, left[0], attempted, why)


def _excess(text: str, count: int) -> str:
    """The limit that an interpolation, or their number in the file, exceeds; empty if there is none."""
    if count > MAX_INTERPOLATIONS:
        return f"the file has more than {MAX_INTERPOLATIONS} interpolations"
    steps = (1 if mark == "${" else -1 for mark in re.findall(r"\$\{|\}", text))
    if len(text) > MAX_CHARACTERS or max(itertools.accumulate(steps)) > MAX_CHAIN:
        return f"it is longer than {MAX_CHARACTERS} characters, or nested deeper than {MAX_CHAIN} levels"
    return ""


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy with other values at its ends."""
    if isinstance(value, Mapping):
        return {key: mapped(inner, change) for key, inner in value.items()}
    return [mapped(inner, change) for inner in value] if isinstance(value, list) else change(value)


def _escaped(value: Any) -> Any:
    """A resolved value in which OmegaConf reads no interpolation."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _masked(value: Any, texts: list[Any]) -> Any:
    """A copy with WAITING for its interpolations, and with marks for its long and free texts, which OmegaConf would
    read."""
    if isinstance(value, list):
        return [_masked(inner, texts) for inner in value]
    if isinstance(value, Mapping):
        made = {}
        for key, inner in value.items():
            is_free = FREE_TEXT.fullmatch(str(key)) is not None
            made[key] = _marked(inner, texts) if is_free else _masked(inner, texts)
        return made
    if not isinstance(value, str):
        return value
    return WAITING if "${" in value else _marked(value, texts) if len(value) > MAX_CHARACTERS else value


def _marked(value: Any, texts: list[Any]) -> str:
    texts.append(value)
    return f"{MARK}{len(texts) - 1}"


def _at(value: Any, place: KeyPath) -> Any:
    for key in place:
        value = value[key]
    return value


def _error(document: YamlDocument, place: KeyPath, attempted: str, why: str) -> ConfigError:
    line = document.position(place).line
    name = ".".join(map(str, place))
    return ConfigError(
        attempted, f"line {line}: `{name}`: {why}", "Set the variable or the key that it names, or correct it."
    )
