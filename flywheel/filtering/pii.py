"""The filter `pii`: tasks with personal data are rejected, or go on without it.

Either way the data leaves the task before it is stored, exported or shown to a judge: each piece becomes a
placeholder such as `[EMAIL_1]`, the same for the same piece everywhere in the task. Identifiers (conversation, trace,
user) stay: by them tasks belong together.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints

from flywheel.errors import ConfigError
from flywheel.filtering import personal_data
from flywheel.filtering.personal_data import KINDS, Found, Kind
from flywheel.task import qa_hash

Redactor = Callable[[dict[str, Any]], dict[str, Any]]
"""A task line in, the same line without personal data out. The line that is given stays as it is."""
Region = Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}$")]

NAMES: Final[Mapping[str, str]] = {
    "email": "an e-mail address",
    "phone": "a phone number",
    "card": "a credit card number",
    "iban": "an IBAN",
    "api-key": "an API key",
    "private-key": "a private key",
}
TEXTS: Final = ("main_query", "question", "answer", "init_messages", "prompt")
"""Keys of a task line that hold what people and models wrote, and below those of its metadata; `…_json` is JSON."""
METADATA_TEXTS: Final = (
    "answer",
    "reference",
    "tools_json",
    "trajectory_json",
    "structured_json",
    "images_json",
    "errors_json",
    "reference",
)


class Pii(BaseModel):
    """Parameters of `pii`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    action: Literal["reject", "redact"] = "redact"
    """`redact`: the task goes on with placeholders. `reject`: it does not go on at all."""
    kinds: tuple[Kind, ...] = Field(default=KINDS, min_length=1)
    """What is looked for."""
    regions: tuple[Region, ...] = ("US", "GB", "DE", "FR", "CN", "IN", "JP")
    """Countries whose phone numbers are known without a country code. With one, all are."""
    allow: tuple[str, ...] = ()
    """Pieces that may stay, such as your own support address."""
    engine: Literal["rules", "presidio"] = "rules"
    """`presidio` looks for `entities` too, by a language model for names; it needs `agentscope-flywheel[pii]`."""
    language: str = "en"
    """Language for Presidio."""
    entities: tuple[str, ...] = ("PERSON", "LOCATION", "IP_ADDRESS")
    """What Presidio looks for, by its names."""

    _analyzer: Any = PrivateAttr(default=None)

    def check_engine(self) -> None:
        """Raises ConfigError when the engine is not installed."""
        if self.engine == "presidio" and importlib.util.find_spec("presidio_analyzer") is None:
            raise ConfigError(
                "use pii with engine: presidio",
                "Presidio is not installed",
                "Run: pip install 'agentscope-flywheel[pii]' && python -m spacy download en_core_web_lg",
            )

    def find(self, text: str) -> list[Found]:
        """The personal data in a text, in its order, no two pieces overlapping."""
        found = list(_found(text, self.kinds, self.regions))
        if self.engine == "presidio":
            found = personal_data.apart(len(text), [*found, *self._by_presidio(text)])
        allowed = {piece.casefold() for piece in self.allow}
        return [each for each in found if text[each.start : each.end].casefold() not in allowed]

    def redactor(self) -> Redactor:
        """What takes these kinds of personal data out of a line."""
        return lambda line: _Redaction(self).line(line)

    def keep(self, line: Mapping[str, Any]) -> tuple[bool, str]:
        """As a filter: with `action: reject`, no task that has, or had before it was redacted, what is looked for."""
        if self.action == "redact":
            return True, ""
        seen = _Redaction(self)
        seen.line(dict(line))
        kinds = [*(kind for kind, _ in seen.placeholders), *self._marked(line)]
        return not kinds, f"it holds {', '.join(NAMES.get(kind, kind) for kind in dict.fromkeys(kinds))}"

    def _marked(self, line: Mapping[str, Any]) -> list[str]:
        kinds: list[str] = [*self.kinds, *(self.entities if self.engine == "presidio" else ())]
        looked_for = {_label(kind): kind for kind in kinds}
        text = json.dumps([line.get(key) for key in TEXTS], ensure_ascii=False) + line["metadata"]["trajectory_json"]
        return [looked_for[label] for label in _PLACEHOLDER.findall(text) if label in looked_for]

    def _by_presidio(self, text: str) -> list[Found]:
        if self._analyzer is None:
            from presidio_analyzer import AnalyzerEngine

            self._analyzer = AnalyzerEngine()
        results = self._analyzer.analyze(text=text, language=self.language, entities=list(self.entities))
        return [Found(each.entity_type, each.start, each.end) for each in results]


_PLACEHOLDER: Final = re.compile(r"\[([A-Z_]+)_\d+\]")


def _label(kind: str) -> str:
    return kind.upper().replace("-", "_")


@lru_cache(maxsize=256)
def _found(text: str, kinds: tuple[str, ...], regions: tuple[str, ...]) -> Sequence[Found]:
    # The same text comes several times on a line, and the same tools on many.
    return personal_data.find(text, kinds, regions)


class _Redaction:
    """One task line on its way to being free of personal data."""

    def __init__(self, pii: Pii) -> None:
        self._pii = pii
        self.placeholders: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}

    def line(self, line: dict[str, Any]) -> dict[str, Any]:
        for known in _PLACEHOLDER.finditer(f"{line['main_query']}\n{line['answer']}\n{line['init_messages']}"):
            # A line that was redacted before keeps its numbers: new pieces are counted on.
            label, _, number = known[0][1:-1].rpartition("_")
            self._counts[label] = max(self._counts.get(label, 0), int(number))
        redacted: dict[str, Any] = {**line, **{key: self._value(line[key]) for key in TEXTS if key in line}}
        metadata: dict[str, Any] = dict(line["metadata"])
        for key in METADATA_TEXTS:
            if key in metadata:
                metadata[key] = self._json(metadata[key]) if key.endswith("_json") else self._value(metadata[key])
        if not self.placeholders:
            return line
        metadata["qa_hash"] = qa_hash(redacted["main_query"], redacted["answer"])
        return {**redacted, "metadata": metadata}

    def _value(self, value: Any, name: str = "") -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self._value(each, name) for each in value]
        if isinstance(value, dict):
            return {self._text(str(key)): self._value(each, str(key)) for key, each in value.items()}
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**6:
            # {"phone": 13800138000}: the name says what the number is.
            told = f"{name}: {value}"
            redacted = self._text(told)
            return value if redacted == told else redacted.removeprefix(f"{name}: ")
        return value

    def _json(self, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError:
            return self._text(text)
        redacted = self._value(value)
        return text if redacted == value else json.dumps(redacted, ensure_ascii=False, separators=(",", ":"))

    def _text(self, text: str) -> str:
        if text.startswith("data:") and ";base64," in text[:100]:
            return text
        parts, done = [], 0
        for found in self._pii.find(text):
            parts += [text[done : found.start], self._placeholder(found.kind, text[found.start : found.end])]
            done = found.end
        return "".join([*parts, text[done:]])

    def _placeholder(self, kind: str, piece: str) -> str:
        same = re.sub(r"[\W_]", "", piece).casefold() if kind in ("phone", "card", "iban") else piece.casefold()
        if (kind, same) not in self.placeholders:
            label = _label(kind)
            self._counts[label] = self._counts.get(label, 0) + 1
            self.placeholders[kind, same] = f"[{label}_{self._counts[label]}]"
        return self.placeholders[kind, same]
