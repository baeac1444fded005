"""Every kind of page: accessible, not wider than a narrow screen, and every axis of a chart has a title."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlsplit

import pytest
from playwright.sync_api import expect
from starlette.routing import Route

from flywheel.config.file import Config
from flywheel.web.server import ROUTES
from tests.factories.misses import put_misses
from tests.factories.state import write_state
from tests.factories.web import kinds_of, template_of
from tests.web.conftest import NARROW, WIDE, Visitor, serving
from tests.web.recorded_state import config_of, unpack

WITHOUT_PAGE = {"/tasks.jsonl", "/labels/export", "/labels/next", "/lineage", "/rounds/overlay"}
"""Files, figures and redirections."""


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The pages of a state with everything, and long names besides."""
    config: Config = unpack(tmp_path_factory.mktemp("narrow"))
    write_state(config.state_dir, put_misses)
    with serving(config) as address:
        yield address


def test_the_page_without_a_state_does_not_scroll_sideways(visitor: Visitor, tmp_path: Path) -> None:
    long = tmp_path / ("a-very-long-name-" * 8)
    with serving(config_of(long, sources=[{"type": "studio", "path": str(long / "traces.sqlite")}])) as address:
        page = visitor.open(f"{address}/", width=NARROW)
        assert "There is no state yet" in page.inner_text("main")
        assert page.evaluate("document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth") <= 0
        page.context.close()


def most_of(kind: tuple[str, str]) -> int:
    return 1 if kind[1] else 2


AXES_WITHOUT_TITLE = """
[...document.querySelectorAll("svg")].filter(svg => {
  const ticks = [...svg.querySelectorAll("text.tick")];
  if (!ticks.length) return false;
  const titles = svg.querySelectorAll("text.axis-title").length;
  // Ticks at one place from the left belong to a vertical axis, at one height to a horizontal one.
  const isVertical = ticks.some(one => ticks.some(other =>
    one !== other && one.getAttribute("x") === other.getAttribute("x")));
  const isHorizontal = ticks.some(one => ticks.some(other =>
    one !== other && one.getAttribute("y") === other.getAttribute("y")));
  return titles < isVertical + isHorizontal || !titles;
}).map(svg => svg.outerHTML.slice(0, 200))
"""


CHARTS_THAT_ARE_CUT = """
[...document.querySelectorAll("svg")].filter(svg => svg.querySelector("text.tick")).filter(svg => {
  const box = svg.getBoundingClientRect();
  if (!box.width) return false;
  const parts = [box, ...[...svg.querySelectorAll("text.tick")].map(each => each.getBoundingClientRect())];
  return parts.some(part => part.width && (part.left < -1 || part.right > window.innerWidth + 1));
}).map(svg => svg.outerHTML.slice(0, 200))
"""


def test_every_kind_of_page_is_accessible_and_scrolls_sideways_nowhere_and_all_axes_have_titles(
    visitor: Visitor, full: str
) -> None:
    """Two pages of each template, and one for each name in its query.

    Axe sees each template narrow and light, wide and dark, and with a query.
    """
    page = visitor.open(f"{full}/", width=NARROW)
    waiting, seen, counts = [f"{full}/"], {f"{full}/"}, Counter[tuple[str, str]]()
    visited: list[str] = []
    judged: set[tuple[str, bool]] = set()
    dark: set[str] = set()
    charts = 0
    while waiting:
        address = waiting.pop(0)
        page.goto(address)
        visitor.check(page)
        visited.append(urlsplit(address).path)
        assert page.evaluate(AXES_WITHOUT_TITLE) == [], address
        assert page.evaluate(CHARTS_THAT_ARE_CUT) == [], address
        charts += page.locator("svg:has(text.tick)").count()
        found = page.locator("a[href]:not([download])").evaluate_all("all => all.map(one => one.href)")
        for link in dict.fromkeys(urldefrag(urljoin(address, each)).url for each in found):
            kinds = kinds_of(link)
            if link.startswith(full) and link not in seen and any(counts[kind] < most_of(kind) for kind in kinds):
                seen.add(link)
                counts.update(kinds)
                if not re.search(r"/export|\.jsonl", link):
                    waiting.append(link)
        kind = template_of(address), "?" in address
        if kind not in judged:
            judged.add(kind)
            visitor.check_accessibility(page)
        if template_of(address) not in dark:
            dark.add(template_of(address))
            page.set_viewport_size(WIDE)
            page.emulate_media(color_scheme="dark")
            visitor.check_accessibility(page)
            page.emulate_media(color_scheme="light")
            page.set_viewport_size({**WIDE, "width": NARROW})
    for route in ROUTES:
        if isinstance(route, Route) and "GET" in (route.methods or ()) and route.path not in WITHOUT_PAGE:
            assert any(route.path_regex.match(path) for path in visited), f"no page of {route.path} was visited"
    assert charts > 5


def test_the_curves_of_a_round_have_axis_titles(visitor: Visitor, full: str) -> None:
    """uPlot draws them on a canvas: what it is given is read from there."""
    page = visitor.open(f"{full}/rounds/r0001", width=NARROW)
    expect(page.locator("#charts")).to_have_attribute("data-steps", re.compile("[1-9]"))
    for figure in page.locator("figure[data-series]").all():
        assert figure.get_attribute("data-unit")
    # The room for both titles is beside the plot, which is the narrower for it.
    over, plot = page.locator(".u-over").first.bounding_box(), page.locator(".u-wrap").first.bounding_box()
    assert over is not None and plot is not None
    assert over["x"] - plot["x"] >= 50 + 16 and plot["height"] - over["height"] >= 26 + 16
