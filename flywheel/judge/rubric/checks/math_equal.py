"""The check `math-equal`: the last boxed result of an answer equals the reference, as math-verify compares them.

math-verify runs in a child process. It guards itself with signals, which work in main threads only, and a thread
cannot be ended: 9^{9^{9^9}} would compute forever.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator

from flywheel.errors import CheckError
from flywheel.judge.rubric.criterion import A_TEXT, Criterion, Example, Files, checked, invalid
from flywheel.judge.rubric.text import visible
from flywheel.records.ground_truth import raw_ground_truth
from flywheel.records.trace import get_path
from flywheel.records.verdict import Exchange
from flywheel.system.limited_call import Children, FunctionError, Limits, call_in_child

TIMEOUT_SECONDS: Final = 10.0
"""Longest comparison of two results."""
START_SECONDS: Final = 120.0
"""Longest start of the child process, which imports sympy."""
MAX_PROCESSES: Final = 2
MEMORY_BYTES: Final = 4 << 30
"""What a comparison may take."""
MAX_CHARACTERS: Final = 2000
"""Longest result that is compared."""
_BRACES: Final = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?!\\(?:boxed|fbox)\s*\{).|(?P<open>\{)|(?P<close>\})", re.DOTALL
)
"""Boxes and braces. The second alternative skips escaped characters, and with them escaped braces."""
_THOUSANDS_SEPARATOR: Final = re.compile(r"(?<=\d)(?:[ \u00a0\u2009\u202f]|\\[,; ]|~|\{,\})(?=\d{3}(?!\d))")
_HALF_WIDTH: Final = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}
"""Full-width digits and signs, as Chinese texts have them, to ASCII."""
_REFERENCE: Final = {"anyOf": [A_TEXT, {"type": "number"}]}


def boxes(text: str) -> list[str]:
    r"""The contents of all \boxed{…} whose braces are balanced, in the order of their beginnings."""
    opened: list[int | None] = []
    found: dict[int, str] = {}
    for match in _BRACES.finditer(text):
        if match["box"] or match["open"]:
            opened.append(match.end() if match["box"] else None)
        elif match["close"] and opened and (begin := opened.pop()) is not None:
            found[begin] = text[begin : match.start()].strip()
    return [found[begin] for begin in sorted(found)]


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} whose braces are balanced, None without one."""
    return found[-1] if (found := boxes(text)) else None


def right_answer(text: str) -> str:
    """The result that a right answer states: its last box that is not empty, or all of a text without boxes. Empty if
    all boxes are."""
    found = boxes(text)
    return next(filter(None, reversed(found)), "") if found else text


def _check_reference(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError("it must be the right answer, a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("it must be a finite number")


class MathEqual(Criterion):
    """The last \\boxed{…} of the answer equals the reference."""

    type: Literal["math-equal"] = "math-equal"
    value: Annotated[str | int | float, checked(_check_reference, optional=True), WithJsonSchema(_REFERENCE)] = ""
    reference: Annotated[
        str | None, Field(coerce_numbers_to_str=True), WithJsonSchema({"type": ["string", "number"]})
    ] = Field(default=None, exclude_if=lambda value: value is None)
    """The right answer; the same as its `value`. Default: the task's `metadata.reference`."""

    @field_validator("reference")
    @classmethod
    def _is_given_once(cls, reference: str | None, info: ValidationInfo) -> str | None:
        if reference is not None and not (reference.strip() and info.data.get("value", "") == ""):
            raise invalid("give the reference once: as `value` or as `reference`")
        return reference

    @property
    def right_answer(self) -> str:
        """The reference of the rubric; empty if it has none."""
        return self.reference or str(self.value)

    def is_decided(self, example: Example) -> bool:
        return bool(self.right_answer or example.reference or (example.ground_truth or {}).get("answer"))

    def decide(self, exchange: Exchange, files: Files) -> tuple[float, str]:
        wanted = self._reference(exchange)
        given = boxed(exchange.answer)
        if given is None:
            return False, "the answer has no \\boxed{…}"
        given, wanted = (visible(text).translate(_HALF_WIDTH) for text in (given, wanted))
        if not given or len(given) > MAX_CHARACTERS:
            return False, "the answer's \\boxed{…} holds no result"
        is_equal: bool | None = _is_same_text(given, wanted) or _compare(*map(_plain, (given, wanted)))
        if is_equal is None:
            compared = f"comparing {given[:80]!r} with {wanted[:80]!r}"
            raise CheckError(
                f"decide criterion {self.id}",
                f"{compared} took more than {TIMEOUT_SECONDS:g} s or too much memory",
                "The task is judged again later.",
            )
        return is_equal, f"{given[:80]} {'equals' if is_equal else 'is not'} {wanted[:80]}"

    def _reference(self, exchange: Exchange) -> str:
        """The right answer: the rubric's, the task's, or the accepted answer that a rollout is compared with.

        Raises CheckError without one.
        """
        line = exchange.line
        recorded = (get_path(line, "metadata", "reference"), get_path(raw_ground_truth(line), "answer"))
        for given in (self.right_answer, *recorded, exchange.reference):
            text = str(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else ""
            if wanted := right_answer(text).strip().strip("$").strip():
                return wanted[:MAX_CHARACTERS]
        raise CheckError(
            f"decide criterion {self.id}",
            "there is no reference answer",
            "Give the task a metadata.reference, or the criterion a value.",
        )


def _is_same_text(given: str, wanted: str) -> bool:
    return "".join(given.split()) == "".join(wanted.split())


def _plain(text: str) -> str:
    return _THOUSANDS_SEPARATOR.sub("", text)


def equals_boxed(answer: str, wanted: str) -> bool:
    """The same comparison in this process, whose main thread it needs for its time limit."""
    given, wanted = ((boxed(text) or "").strip() for text in (answer, f"\\boxed{{{wanted}}}"))
    if not given or len(given) > MAX_CHARACTERS:
        return False
    return _is_same_text(given, wanted) or _verified(_plain(given), _plain(wanted), int(TIMEOUT_SECONDS))


def _verified(given: str, wanted: str, seconds: int | None = None) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    try:
        parsed = [
            parse(f"\\boxed{{{text}}}", extraction_config=configs, parsing_timeout=seconds)
            for text in (given, wanted)
        ]
        return all(parsed) and bool(verify(parsed[1], parsed[0], timeout_seconds=seconds))
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError):
        return False


def _compare(*texts: str) -> bool | None:
    """Whether two results are equal; None if that cannot be computed within the limits. Raises OSError if no child
    can be started."""
    limits = Limits(TIMEOUT_SECONDS, cpu_seconds=0, memory=MEMORY_BYTES)
    with suppress(FunctionError):
        return bool(call_in_child(_are_equal, texts, limits, _children))
    return None


def _are_equal(texts: Sequence[str]) -> bool:
    given, wanted = texts
    return _verified(given, wanted)


def _import(_: None) -> None:
    """In a child, before the limits, which are meant for answers and not for the libraries."""
    import math_verify  # noqa: F401
    import sympy  # noqa: F401

    logging.disable(logging.CRITICAL)


_children: Final = Children(MAX_PROCESSES, lambda call: call(_import, None, Limits(START_SECONDS, 0, 0)))
