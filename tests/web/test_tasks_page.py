"""The list of tasks and one task, in a browser."""

from __future__ import annotations

import re

from tests.web.conftest import Check, Visitor


def test_the_list_of_tasks(check: Check, address: str) -> None:
    page = check(f"{address}/tasks")
    assert page.get_by_role("heading", level=1).inner_text() == "Tasks"
    assert page.locator("tbody tr").count() == 50


def test_an_empty_list_says_what_to_do(check: Check, empty_address: str) -> None:
    assert "flywheel ingest" in check(f"{empty_address}/tasks").inner_text("main")


def test_a_task_with_hostile_texts_is_inert(check: Check, visitor: Visitor, address: str) -> None:
    page = visitor.open(f"{address}/tasks?text=desrever")
    found = page.locator("td.about a").first.get_attribute("href")
    assert found is not None and re.fullmatch(r"/tasks/t-\w+", found)
    page = check(f"{address}{found}")
    text = page.inner_text("main")
    assert "<script>" in text and "U+202E" in text and "{{ 7 * 7 }}" in text
    assert page.locator("main script, main img, main iframe").count() == 0
