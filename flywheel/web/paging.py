"""Positions in lists that are shown in parts."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException

MOST_DIGITS: Final = 18
"""Of numbers that the database can hold."""


def is_number(given: str) -> bool:
    return given.isascii() and given.isdigit() and len(given) <= MOST_DIGITS


def position(query: QueryParams, name: str) -> int | None:
    """The number of a row from which a list goes on; None for its begin. Raises HTTPException."""
    given = query.get(name, "")
    if not given:
        return None
    if not is_number(given):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"There is no such part of the list: {given[:100]}.")
    return int(given)
