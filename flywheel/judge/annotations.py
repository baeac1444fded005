"""Annotations of other tools: what people say of a trace or a span in Langfuse, Phoenix or MLflow.

A file has JSON lines, a JSON array, the answer of an API (`{"data": […]}`) or a table with a header: CSV, with
semicolons or tabs too. An annotation has the fields of `Annotation` under our names or those of these tools; its
others are ignored.
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from flywheel.config.section import leaves
from flywheel.errors import ConfigError
from flywheel.judge.labels import QUERIES, VERDICTS, PersonLabel, lines_of, text_of
from flywheel.records.states import Label

PEOPLE: Final = frozenset({"", "HUMAN", "ANNOTATION"})
"""What the tools call annotators that are people; empty where a file does not say who they are."""
OWN_SCORES: Final = "flywheel-"
"""How the ids of scores begin that Flywheel itself sent to another tool."""
_WORDS: Final = {
    **{word: Label.ACCEPT if accepts else Label.REJECT for word, accepts in VERDICTS.items()},
    **{"correct": Label.ACCEPT, "incorrect": Label.REJECT, Label.UNSURE.value: Label.UNSURE},
}
_NUMBER: Final = re.compile(r"[-+]?(\d+(\.\d*)?|0,\d+|\d+,\d\d?)(e[-+]?\d+)?")
"""With a decimal comma too, which spreadsheets of many languages write; `1,000` may be a thousand and is none."""
_TABLES: Final = frozenset({".csv", ".tsv"})
_DELIMITERS: Final = (",", ";", "\t")
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HEX: Final = re.compile(r"0x[0-9a-f]{1,32}")
_DECIMAL: Final = re.compile(r"[0-9]{1,39}")
_TRACE: Final = re.compile(r"[0-9a-f]{32}")
_ID_BYTES: Final = (8, 16)
"""Of a span and of a trace."""


class LeftOutError(ValueError):
    """An annotation that cannot become a label; its text says why, and what to do."""


def _field(names: str, default: str | None = "") -> Any:
    """A field that has one of these names; those with a dot are parts of another field."""
    return Field(default, validation_alias=AliasChoices(*names.split()))


class Annotation(BaseModel):
    """What somebody says of a trace or a span. `kind` is the kind of annotator, empty for a person; `score` may be a
    number, which needs a threshold, or like `verdict` a word."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)

    id: str = ""
    trace: str = _field("trace_id traceId")
    span: str = _field("span_id observation_id observationId")
    name: str = _field("criterion name annotation_name assessment_name")
    verdict: bool | str = _field("verdict label result.label")
    score: bool | float | str = _field("score result.score feedback.value stringValue value")
    by: str = _field("by who user_id authorUserName authorUserId source.source_id identifier")
    kind: str = _field("annotator_kind source.source_type source")
    comment: str = _field("comment reason result.explanation explanation rationale")
    at: datetime | None = _field("at updated_at updatedAt last_update_time timestamp created_at createdAt", None)
    valid: bool = True

    @property
    def moment(self) -> str:
        """When it was made, as the state has times; empty if the file does not say so."""
        if self.at is None:
            return ""
        at = self.at if self.at.tzinfo else self.at.replace(tzinfo=UTC)
        return at.astimezone(UTC).isoformat(timespec="milliseconds")

    def label(self, accept_from: float | None) -> Label:
        """Raises LeftOutError."""
        score = str(self.score).strip().casefold()
        for word in (str(self.verdict).strip().casefold(), "" if _NUMBER.fullmatch(score) else score):
            if word in _WORDS:
                return _WORDS[word]
        if not _NUMBER.fullmatch(score):
            said = f"{str(self.verdict or self.score)[:30]!r} is neither accept nor reject"
            raise LeftOutError(said if self.verdict or self.score else "it has neither a verdict nor a score")
        if accept_from is None:
            raise LeftOutError("it has only a score: set --accept-from X, the lowest score that accepts a reply")
        return Label.ACCEPT if float(score.replace(",", ".")) >= accept_from else Label.REJECT


def read_annotations(path: Path) -> list[dict[str, Any]] | None:
    """The lines of a file of another tool; None for a label file, and for what cannot be read as either.

    Raises ConfigError for a file without any line.
    """
    lines: Any
    try:
        text = text_of(path)
        lines = _rows(text) if path.suffix.lower() in _TABLES else _values(text)
    except (OSError, ValueError, RecursionError, csv.Error):
        return None
    if any(not isinstance(line, dict) or line.keys() & {"task_id", *QUERIES} for line in lines):
        return None
    if not lines:
        raise ConfigError(f"read annotations {path}", "it has none", "See `flywheel docs write-a-rubric`.")
    return list(lines)


def _rows(text: str) -> list[dict[str, Any]]:
    """The rows of a table, whose columns are separated by what gives its header the most of them."""

    def columns(delimiter: str) -> int:
        return len(next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), ()))

    delimiter = max(_DELIMITERS, key=columns)
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))


def _values(text: str) -> list[Any]:
    # Python's own parser reads whole numbers of 128 bits, which ids may be. NaN is no value.
    parse = json.JSONDecoder(parse_constant=lambda _: None).decode
    try:
        whole = parse(text)
    except ValueError:
        return [parse(line) for line in lines_of(text) if line.strip()]
    if isinstance(whole, dict):
        whole = whole.get("data", [whole])
    return whole if isinstance(whole, list) else [whole]


def usable(
    lines: Sequence[Mapping[str, Any]], *, by: str, whole: str, accept_from: float | None, also: Collection[str]
) -> tuple[list[tuple[Annotation, PersonLabel]], Counter[str]]:
    """The annotations that say something of a reply, with what they say, and why others are left out.

    Only those by people, and by the kinds in `also`, are taken. `by` is who made those that do not name a person, and
    `whole` the name of those about the whole reply; others with a name are about the criterion of that name.
    """
    found, left_out = list[tuple[Annotation, PersonLabel]](), Counter[str]()
    kinds = PEOPLE.union(kind.upper() for kind in also)
    for line in lines:
        try:
            # A field that is there without a value does not hide another one.
            fields = {key: value for key, value in leaves(line, lists=False) if value not in (None, "")}
            said = Annotation.model_validate(fields)
            if said.id.startswith(OWN_SCORES):
                raise LeftOutError("Flywheel itself has sent it")
            if not said.valid:
                raise LeftOutError("it was replaced by a later one")
            if (kind := said.kind.upper()) not in kinds:
                raise LeftOutError(f"it was made by {kind}, not by a person; --also {kind} takes it")
            who = said.by or (by if kind in PEOPLE else kind)
            criterion = "" if said.name == whole else said.name
            label = PersonLabel(who, said.label(accept_from), said.comment, criterion=criterion, at=said.moment)
            found.append((said, label))
        except ValidationError as error:
            left_out[f"its `{error.errors()[0]['loc'][0]}` cannot be read"] += 1
        except LeftOutError as error:
            left_out[str(error)] += 1
    return found, left_out


def spellings(identifier: str) -> set[str]:
    """How the state may have an id: as it is, in lower case, in hex, and as a UUID.

    It may be hex, also with `0x` and without leading zeros, a UUID, a decimal number, or base64, behind MLflow's
    `tr-` or `trace:/LOCATION/`.
    """
    text = identifier.strip()
    if text.startswith("trace:/"):
        text = text.rpartition("/")[2]
    plain = text.lower().removeprefix("tr-")
    found = {text, text.lower(), plain}
    if _UUID.fullmatch(plain):
        found.add(plain.replace("-", ""))
    if _HEX.fullmatch(plain) or _DECIMAL.fullmatch(plain):
        number = int(plain, 16 if plain.startswith("0x") else 10)
        found |= {number.to_bytes(size).hex() for size in _ID_BYTES if number < 256**size}
    with suppress(binascii.Error, ValueError):
        standard = text.replace("-", "+").replace("_", "/").rstrip("=")
        raw = base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
        if len(raw) in _ID_BYTES:
            found.add(raw.hex())
    found |= {str(UUID(each)) for each in found if _TRACE.fullmatch(each)}
    return found - {""}
