"""What runs the tests: `for_each` hides no failure of a case, and the groups name modules that exist."""

from __future__ import annotations

import pytest

from tests.cases import for_each
from tests.conftest import GROUP_OF, ROOT


def test_every_case_that_fails_is_reported() -> None:
    @for_each("number, name", [(1, "one"), (2, "two"), (3, "three")])
    def loop(number: int, name: str, wanted: str) -> None:
        assert name == wanted
        if number == 1:
            pytest.fail("never one")

    with pytest.raises(BaseExceptionGroup, match="3 of 3 cases fail") as failed:
        loop(wanted="one")
    assert ["'name': 'one'" in failed.value.exceptions[0].__notes__[0], len(failed.value.exceptions)] == [True, 3]
    with pytest.raises(BaseExceptionGroup, match="2 of 3 cases fail"):
        loop(wanted="three")


@for_each("number", [1, 2])
def test_fixtures_are_given_once(number: int, tmp_path: object) -> None:
    assert tmp_path


def test_no_case_is_no_test() -> None:
    with pytest.raises(ValueError, match="no case"):
        for_each("number", [])(lambda number: None)


def test_the_groups_of_modules_name_modules_that_exist() -> None:
    assert [module for module in GROUP_OF if not (ROOT / module).is_file()] == []
