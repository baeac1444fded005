"""Every page of a state with hostile texts holds only what its template wrote: texts stay texts, links stay links."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import urldefrag, urljoin, urlsplit

import pytest
from sqlalchemy import Connection, update

from flywheel.config.file import Config
from flywheel.records.states import RoundState
from flywheel.store.kernel import schema
from flywheel.store.kernel.transitions import move
from flywheel.system.files import append_jsonl, write_json
from flywheel.training.data.round_progress import Meter
from flywheel.web.site import visible
from tests.factories.state import write_state
from tests.factories.web import client, kinds_of
from tests.web.recorded_state import HOSTILE, injections

START: Final = "http://testserver/"
MOST_OF_A_KIND: Final = 4
"""Pages of one template, and with one name in their query, that are visited; the tasks of all injections are."""
# fmt: off
ELEMENTS: Final = frozenset([
    "a", "article",
    "body", "br", "button", "caption", "circle", "code", "datalist", "dd", "del", "desc", "details", "div",
    "dl", "dt", "em", "fieldset", "figcaption", "figure", "footer", "form", "g", "h1", "h2", "h3", "h4", "head",
    "header", "html", "input", "ins", "kbd", "label", "legend", "li", "line", "link", "main", "mark", "meta", "nav",
    "noscript", "ol", "optgroup", "option", "output", "p", "path", "pattern", "polygon", "polyline", "pre", "rect",
    "s", "script", "section", "select", "small", "span", "strong", "sub", "summary", "sup", "svg", "symbol", "table",
    "tbody", "td", "text", "textarea", "tfoot", "th", "thead", "time", "title", "tr", "u", "ul", "use",
])
# fmt: on
ADDRESSES: Final = frozenset({"href", "src", "action", "formaction", "xlink:href", "data-src"})
UNSEEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e0fff]")


@dataclass
class Content(HTMLParser):
    """What a page has, and what it should not have."""

    page: str
    links: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ELEMENTS:
            self.problems.append(f"element {tag}")
        if tag == "script" and not dict(attrs).get("src"):
            self.problems.append("a script in the page")
        for name, value in attrs:
            if not re.fullmatch(r"[a-zA-Z][a-zA-Z:-]*[12]?", name) or name == "style" or name.startswith("on"):
                self.problems.append(f"attribute {name!r} of {tag}")
            if name in ADDRESSES:
                where = urljoin(self.page, value or "")
                if not where.startswith(START):
                    self.problems.append(f"{tag} leads to {value!r}")
                elif tag in ("script", "link") and not urlsplit(where).path.startswith("/static/"):
                    self.problems.append(f"{tag} loads {value!r}")
                elif tag == "a":
                    self.links.append(urldefrag(where).url)
            # The value of an option is what a form sends back, and its label says it visibly.
            if UNSEEN.search(value or "") and name != "value":
                self.problems.append(f"{tag} has unseen characters in {name}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if UNSEEN.search(data):
            self.problems.append(f"unseen characters in {data[:80]!r}")
        if '<span class="unseen">' in data or "&lt;" in data:
            self.problems.append(f"markup shown as text in {data[:80]!r}")


def put_hostile_round(conn: Connection, directory: Path) -> None:
    """The planned round is in training, and says hostile texts wherever it says any."""
    named = schema.rounds.c.name == directory.name
    number = conn.execute(
        update(schema.rounds).where(named).values(trigger=HOSTILE).returning(schema.rounds.c.id)
    ).scalar_one()
    move(conn, number, RoundState.PLANNED, RoundState.TRAINING, HOSTILE)
    for name in ("metrics.jsonl", "progress.json"):
        (directory / name).unlink()
    write_json(directory / "error.json", {"error": HOSTILE, "hint": HOSTILE})
    (directory / "worker.log").write_bytes(HOSTILE.encode() + b"\xff\xfe\x00\n" + b"x" * 5_000)
    step = {"event": "step", "step": 1, "steps": 3, "loss": HOSTILE, "seconds": {}}
    append_jsonl(directory / "metrics.jsonl", [{"event": "phase", "phase": HOSTILE, "at": HOSTILE}, step])
    Meter(directory, steps=3).pause(HOSTILE)


@pytest.mark.slow
def test_every_page_that_links_lead_to_is_inert(own_state: Config) -> None:
    write_state(own_state.state_dir, put_hostile_round, own_state.state_dir / "rounds" / "r0003")
    pages = client(own_state)
    waiting, seen = [START], {START}
    counts = Counter[tuple[str, str]]()
    texts: list[str] = []
    problems: list[str] = []
    corpus = {
        json.loads(line)["task_id"]
        for text in ("Injection", "desrever")
        for line in pages.get(f"/tasks.jsonl?text={text}").text.split("\n")[:-1]
    }
    waiting += [f"{START}tasks/{key}" for key in sorted(corpus)]
    while waiting:
        address = waiting.pop(0)
        answer = pages.get(address)
        if answer.status_code != 200:
            problems.append(f"{address}: {answer.status_code}")
        if not answer.headers["content-type"].startswith("text/html"):
            continue
        content = Content(address)
        content.feed(answer.text)
        content.close()
        problems += [f"{address}: {each}" for each in content.problems]
        texts.append("".join(content.text))
        for link in content.links:
            kinds = kinds_of(link)
            if link not in seen and any(counts[kind] < MOST_OF_A_KIND for kind in kinds):
                seen.add(link)
                counts.update(kinds)
                waiting.append(link)
    assert not problems, "\n".join(problems[:20])
    assert len(seen) > 40
    shown = " ".join("\n".join(texts).split())
    for each in (*injections(), HOSTILE):
        assert " ".join(str(visible(each).striptags()).split()) in shown
