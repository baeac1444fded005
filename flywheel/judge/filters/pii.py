"""The filter `pii`: finds personal data and secrets in task lines, and redacts them or rejects the task.

Numbers count only if their check digits are right (cards, IBANs) or if they fit a numbering plan (phones). Other long
numbers are order numbers, times or sums.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PrivateAttr, StringConstraints

from flywheel.config.section import Section
from flywheel.errors import ConfigError
from flywheel.records.task import qa_hash
from flywheel.system import own_package

Kind = Literal["email", "phone", "card", "iban", "ssn", "api-key", "private-key"]
KINDS: Final[tuple[Kind, ...]] = ("private-key", "api-key", "email", "iban", "card", "ssn", "phone")
"""What can be found. Of two overlapping pieces, the kind that is earlier here wins."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Personal data in a text: `text[start:end]`, of a kind."""

    kind: str
    start: int
    end: int


_LATIN: Final = "A-Za-z0-9_\u00c0-\u024f"
"""Letters of addresses. Not all letters: Chinese text has no space before an address or a number."""

# fmt: off
_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN (?P<what>[A-Z0-9 ]*)PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END (?P=what)PRIVATE KEY(?: BLOCK)?-----|\Z)", re.S)
_EMAIL: Final = re.compile(
    rf"(?<![{_LATIN}.+%@-])(?!\.)[{_LATIN}.+%-]{{1,64}}@(?:[{_LATIN}](?:[{_LATIN}-]{{0,61}}[{_LATIN}])?\.)+"
    rf"[A-Za-z\u00c0-\u024f]{{2,24}}(?![{_LATIN}@])(?!-[{_LATIN}])")
_IBAN: Final = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]{2}\d{2}(?:[ -]?[A-Za-z0-9]){11,30}(?![A-Za-z0-9])")
_CARD: Final = re.compile(rf"(?<![{_LATIN}.,-])[0-9](?:[ -]?[0-9]){{12,18}}(?![{_LATIN}-])(?![.,][0-9])")
_CARD_FORM: Final = re.compile(
    r"\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{1,7}|\d{4}([ -])\d{6}\2\d{4,5}|\d{4}([ -])\d{4}\3\d{4}\3\d{4}\3\d{3}")
_ISSUER: Final = re.compile(r"4|5[0678]|5[1-5]|2[2-7]|3[0-9]|6")
_KEY_PREFIXES: Final = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"sk-[\w-]{6,}|[rsp]k_(?:live|test)_\w{16,}|whsec_\w{20,}"                         # OpenAI and its like, Stripe
    r"|gh[pousr]_\w{30,}|github_pat_\w{22,}|glpat-[\w-]{20,}|npm_\w{30,}|pypi-[\w-]{40,}"     # code hosts, registries
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|ya29\.[\w-]{20,}|LTAI\w{12,30}|AKID\w{20,}"      # clouds
    r"|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{20,}|hf_[A-Za-z0-9]{30,}|gsk_\w{30,}|dop_v1_[0-9a-f]{64}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|key-[0-9a-f]{32}|\d{8,10}:AA[\w-]{33}"                     # mail, Telegram
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"                                          # JSON web tokens
    r")(?![A-Za-z0-9_-])", re.A)
_SHORT_KEY: Final = re.compile(r"[-_](?=[A-Za-z0-9]{6})(?=\d*[A-Za-z])[A-Za-z0-9]*(?:\d[A-Za-z]|\d{3})", re.A)
_LONG_KEY: Final = re.compile(r"[A-Z0-9]|[a-z]{20}")
_BASIC: Final = re.compile(r"(?i)\bbasic\s{1,3}(?P<key>[A-Za-z0-9+/_-]{4,1000}={0,2})", re.A)
_URL_USER: Final = re.compile(r"(?<=://)[^\s/@:<>{}\"'`]{0,200}:[^\s/<>{}\"'`]{1,200}(?=@)")
_KEY_NAMED: Final = re.compile(
    r"(?i)(?:api[ _-]?key|access[ _-]?key|secret(?:[ _-]?key)?|auth[ _-]?token|access[ _-]?token|bearer|passwo?r?d"
    r"|api[ _-]?token|密钥|口令|密码)\w{0,12}[\"'”]?(?:\s{1,3}is|\s{0,3}[:=：]|\s{1,3})[\s\"'“`]{0,4}"
    r"(?P<key>[A-Za-z0-9_+/=.~-]{20,200})")
_PHONE: Final = re.compile(
    rf"(?<![{_LATIN}.,/+-])(?:\(?\+|00(?=[1-9])|\(?)[0-9]"
    rf"(?:[ ().\-\u2010-\u2015/]{{0,3}}[0-9]){{6,16}}(?![{_LATIN}%])(?!(?:[.,:/-]|\s?[*/=+^×÷])\s?[0-9])")
# fmt: on
_NEAR_A_PHONE: Final = re.compile(
    r"(?i)(?:\b(?:phones?|tel|telephone|telefon|téléphone|teléfono|telefono|mobile|mobil|móvil|handy|cell|call|fax|"
    r"whats?app|sms|text me|contact|reach(?: me)?|dial|rufnummer)\b"
    r"|电话|手机|號碼|号码|联系|拨打|致电|微信|携帯|電話|전화)"
    r"[^\d\n]{0,25}$"
)
_NEAR_ANOTHER: Final = re.compile(
    r"(?i)(?:\b(?:orders?|invoice|ticket|case|article|item|sku|isbn|issn|ean|doi|arxiv|pmid|ids?|no|nr|ref(?:erence)?|"
    r"number of|version|build|commit|serial|tracking|parcel|account|timestamp|unix|epoch|date|seed|port|"
    r"customer|row|line|bug|pr)\b[ .]*+(?:number|no\.?|nr\.?|id|is|of)?"
    r"|(?<!#)#|№|\$|€|£|¥|订单|单号|编号|序列号)[\s.:#=\"'(]*$"
)
_SSN: Final = re.compile(rf"(?<![{_LATIN}.,/+-])\d{{3}}([ -])\d{{2}}\1\d{{4}}(?![{_LATIN}-])(?![.,]\d)", re.A)
_NEAR_AN_SSN: Final = re.compile(r"(?i)\b(?:ssn|social[ -]security)\b[^\d\n]{0,25}$")
_CALCULATED: Final = re.compile(r"(?:[*/^×÷=]|(?<=[\d)\w]) ?[+-]) ?$")
_LISTED: Final = re.compile(r"(?:\b\d+[ \t\n]){2}$")
_FOREIGN: Final = re.compile(r"\(?\+|00[1-9]")
MAX_DIGITS: Final = 15
"""Of a phone number, with the country code (ITU-T E.164)."""
_DATE: Final = re.compile(
    r"\d{4}([-./ ])\d{1,2}\1\d{1,2}(?:[ T.-]?\d{0,6}.*)?"
    r"|\d{1,2}([-./])\d{1,2}\2\d{4}.*|(?:19|20)\d{2}[- ]+(?:19|20)\d{2}"
)


def find(text: str, kinds: Sequence[str] = KINDS, regions: Sequence[str] = ()) -> list[Piece]:
    """The personal data of these kinds in a text, by position; no two pieces overlap.

    `regions` are the countries (ISO 3166, two letters) whose phone numbers are found without a country code.
    """
    return _without_overlaps(
        len(text), (piece for rule in _RULES if rule[0] in kinds for piece in _found(text, regions, *rule))
    )


def _without_overlaps(length: int, pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces of a text of this length by position. Of two overlapping ones, the one that is given first wins."""
    taken = bytearray(length)
    kept = []
    for piece in pieces:
        if taken.find(1, piece.start, piece.end) < 0:
            taken[piece.start : piece.end] = b"\1" * (piece.end - piece.start)
            kept.append(piece)
    return sorted(kept, key=lambda piece: piece.start)


def _found(
    text: str, regions: Sequence[str], kind: Kind, part: str, pattern: re.Pattern[str], test: Test
) -> Iterator[Piece]:
    group = "key" if "key" in pattern.groupindex else 0
    for found in pattern.finditer(text) if part in text else ():
        piece, start = found[group], found.start(group)
        before = text[max(0, start - 40) : start]
        is_one = test(piece, before, regions)
        while kind == "iban" and not is_one and " " in piece:
            # The pattern allows spaces, so its end may belong to the next word.
            piece = piece.rpartition(" ")[0]
            is_one = test(piece, before, regions)
        if is_one:
            yield Piece(kind, start, start + len(piece))


def _is_key(text: str, *_: object) -> bool:
    # A prefix before words only ("sk-learn-contrib-…", "sk-circle1") belongs to a name.
    is_short = text.startswith("sk-") and len(text) < 23
    return bool(_SHORT_KEY.search(text) if is_short else _LONG_KEY.search(text, 3))


def _has_password(text: str, *_: object) -> bool:
    """Whether a text is Base64 of a name and a password, as HTTP's `Basic` has them."""
    text = text.rstrip("=").translate({ord("-"): "+", ord("_"): "/"})
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        return False
    return ":" in decoded and decoded.isprintable()


def _is_random(text: str, *_: object) -> bool:
    """Whether a text looks like a key: letters and digits, and 3.5 bits of entropy per character or more (hex: 3)."""
    counts = Counter(text)
    entropy = -sum(number / len(text) * math.log2(number / len(text)) for number in counts.values())
    has_digit, has_letter = any(c.isdigit() for c in text), any(c.isalpha() for c in text)
    is_hex = all(char in "0123456789abcdefABCDEF" for char in text)
    return has_digit and has_letter and entropy >= (3.0 if is_hex else 3.5)


def _is_iban(piece: str, *_: object) -> bool:
    from stdnum import iban

    # Check digits, and the country's format in the registry.
    return bool(iban.is_valid(piece, check_country=False))


def _is_card(piece: str, before: str, _: object) -> bool:
    from stdnum import luhn

    digits = re.sub(r"\D", "", piece)
    return (
        _CARD_FORM.fullmatch(piece) is not None
        and _ISSUER.match(digits) is not None
        and len(set(digits)) > 1
        and luhn.is_valid(digits)
        and not _CALCULATED.search(before)
        # In groups, hardly any other number passes. Without, order numbers do.
        and (digits != piece or not _NEAR_ANOTHER.search(before))
    )


def _is_ssn(piece: str, before: str, _: object) -> bool:
    from stdnum.us import ssn

    return ssn.is_valid(piece.replace(" ", "-")) and ("-" in piece or _NEAR_AN_SSN.search(before) is not None)


def _is_phone(piece: str, before: str, regions: Sequence[str]) -> bool:
    named = _NEAR_A_PHONE.search(before) is not None
    if _FOREIGN.match(piece):
        regions = ["GB"]  # or any other country in which 00 means what + means
    elif _DATE.fullmatch(piece) or _NEAR_ANOTHER.search(before) or (not named and _SSN.fullmatch(piece)):
        return False
    elif not named and _LISTED.search(before):
        return False  # the third or a later one of numbers in a row: among random ones, some fit any numbering plan
    elif not named and piece.isdigit():
        # Digits without separators count only where mobile numbers have a recognisable form.
        regions = ["CN"] if "CN" in regions and len(piece) == 11 and piece.startswith("1") else []
    if sum(map(str.isdigit, piece)) > MAX_DIGITS or _CALCULATED.search(before):
        return False
    return any(_is_phone_of(region, piece, named or "+" in piece) for region in regions)


def _is_phone_of(region: str, piece: str, is_likely: bool) -> bool:
    import phonenumbers

    try:
        number = phonenumbers.parse(piece, region)
    except phonenumbers.NumberParseException:
        return False
    if is_likely:
        # Numbering plans grow, and example numbers ("555") are in none.
        return phonenumbers.is_possible_number(number)
    matcher = phonenumbers.PhoneNumberMatcher(piece, region, phonenumbers.Leniency.STRICT_GROUPING)
    return phonenumbers.is_valid_number(number) and matcher.has_next()  # the first takes a fraction of the second


def _is_any(*_: object) -> bool:
    return True


Test = Callable[[str, str, Sequence[str]], bool]
"""Whether a piece is personal data, by the text before it, and the regions for phone numbers."""
_RULES: Final[tuple[tuple[Kind, str, re.Pattern[str], Test], ...]] = (
    ("private-key", "PRIVATE KEY", _PRIVATE_KEY, _is_any),
    ("api-key", "", _KEY_PREFIXES, _is_key),
    ("api-key", "", _KEY_NAMED, _is_random),
    ("api-key", "", _BASIC, _has_password),
    ("api-key", "://", _URL_USER, _is_any),
    ("email", "@", _EMAIL, _is_any),
    ("iban", "", _IBAN, _is_iban),
    ("card", "", _CARD, _is_card),
    ("ssn", "", _SSN, _is_ssn),
    ("phone", "", _PHONE, _is_phone),
)
"""What is looked for, in the order of KINDS: a part of each text that has it, its pattern, and a test of what the
pattern, or its group `key`, finds."""


Redactor = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns a task line without personal data. Does not change the line that it is given."""
Region = Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}$")]

NAMES: Final[Mapping[str, str]] = {
    "email": "an e-mail address",
    "phone": "a phone number",
    "card": "a credit card number",
    "iban": "an IBAN",
    "ssn": "a US social security number",
    "api-key": "an API key",
    "private-key": "a private key",
}
TEXTS: Final = ("main_query", "question", "answer", "init_messages", "prompt")
"""Keys of a task line with texts of users and models."""
METADATA_TEXTS: Final = (
    "answer",
    "answer_reasoning",
    "reference",
    "tools_json",
    "trajectory_json",
    "structured_json",
    "images_json",
    "errors_json",
    "parameters_json",
    "extra_json",
)
"""The same in its metadata; `…_json` is JSON."""


class Pii(Section):
    """Parameters of `pii`."""

    action: Literal["reject", "redact"] = "redact"
    """`redact`: replace personal data by placeholders. `reject`: reject the task."""
    kinds: tuple[Kind, ...] = Field(default=KINDS, min_length=1)
    """What is searched for."""
    regions: tuple[Region, ...] = ("US", "GB", "DE", "FR", "CN", "IN", "JP")
    """Countries whose phone numbers are found without a country code. With one, all are found."""
    allow: tuple[str, ...] = ()
    """Pieces that stay, such as your own support address."""
    engine: Literal["rules", "presidio"] = "rules"
    """`presidio` also finds `entities`, by a language model for names; it needs `agentscope-flywheel[pii]`."""
    language: str = "en"
    """Language for Presidio."""
    entities: tuple[str, ...] = ("PERSON", "LOCATION", "IP_ADDRESS")
    """What Presidio finds, by its names."""

    _analyzer: Any = PrivateAttr(default=None)

    def check_engine(self) -> None:
        """Raises ConfigError if the engine is not installed."""
        if self.engine == "presidio" and importlib.util.find_spec("presidio_analyzer") is None:
            raise ConfigError(
                "use pii with engine: presidio",
                "Presidio is not installed",
                f"Run: pip install {own_package.requirement('pii')} && python -m spacy download en_core_web_lg",
            )

    def find(self, text: str) -> list[Piece]:
        """The personal data in a text, by position; no two pieces overlap."""
        found = _cached_find(text, self.kinds, self.regions)
        if self.engine == "presidio":
            found = _without_overlaps(len(text), [*found, *self._by_presidio(text)])
        allowed = {piece.casefold() for piece in self.allow}
        return [each for each in found if text[each.start : each.end].casefold() not in allowed]

    def redactor(self) -> Redactor:
        """Removes personal data of these kinds from task lines."""
        return lambda line: _Redaction(self).line(line)

    def keep(self, line: Mapping[str, Any]) -> tuple[bool, str]:
        """The filter: with `action: reject`, rejects tasks that have personal data, or had it before redaction."""
        if self.action == "redact":
            return True, ""
        redaction = _Redaction(self)
        redaction.line(dict(line))
        kinds = [*(kind for kind, _ in redaction.placeholders), *self._redacted_kinds(line)]
        return not kinds, f"it holds {', '.join(NAMES.get(kind, kind) for kind in dict.fromkeys(kinds))}"

    def _redacted_kinds(self, line: Mapping[str, Any]) -> list[str]:
        kinds: list[str] = [*self.kinds, *(self.entities if self.engine == "presidio" else ())]
        labels = {_label(kind): kind for kind in kinds}
        text = json.dumps([line.get(key) for key in TEXTS], ensure_ascii=False) + line["metadata"]["trajectory_json"]
        return [labels[label] for label in _PLACEHOLDER.findall(text) if label in labels]

    def _by_presidio(self, text: str) -> list[Piece]:
        if self._analyzer is None:
            from presidio_analyzer import AnalyzerEngine

            try:
                self._analyzer = AnalyzerEngine()
            except (Exception, SystemExit) as error:  # spaCy ends the process if it cannot load its model's package.
                hint = "Run: python -m spacy download en_core_web_lg"
                raise ConfigError("use pii with engine: presidio", f"it does not start: {error}", hint) from error
        results = self._analyzer.analyze(text=text, language=self.language, entities=list(self.entities))
        return [Piece(each.entity_type, each.start, each.end) for each in results]


_PLACEHOLDER: Final = re.compile(r"\[([A-Z_]+)_[0-9]{1,9}\]")
"""What a text says is no placeholder if its number is longer: int() refuses 5,000 digits."""


def _label(kind: str) -> str:
    return kind.upper().replace("-", "_")


@lru_cache(maxsize=256)
def _cached_find(text: str, kinds: tuple[str, ...], regions: tuple[str, ...]) -> Sequence[Piece]:
    # A text occurs several times in a line, and the same tools in many lines.
    return find(text, kinds, regions)


class _Redaction:
    """Redacts one task line."""

    def __init__(self, pii: Pii) -> None:
        self._pii = pii
        self.placeholders: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}

    def line(self, line: dict[str, Any]) -> dict[str, Any]:
        for known in _PLACEHOLDER.finditer(f"{line['main_query']}\n{line['answer']}\n{line['init_messages']}"):
            # Numbers of placeholders go on after those of an earlier redaction.
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
            # {"phone": 13800138000}: the key tells what the number is.
            text = f"{name}: {value}"
            redacted = self._text(text)
            return value if redacted == text else redacted.removeprefix(f"{name}: ")
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
        same = (
            re.sub(r"[\W_]", "", piece).casefold() if kind in ("phone", "card", "iban", "ssn") else piece.casefold()
        )
        if (kind, same) not in self.placeholders:
            label = _label(kind)
            self._counts[label] = self._counts.get(label, 0) + 1
            self.placeholders[kind, same] = f"[{label}_{self._counts[label]}]"
        return self.placeholders[kind, same]
