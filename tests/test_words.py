"""The counts of the documentation's words, and of the words of its sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.words import LIMITS, ROOT, check, limits_of, main, sentences, too_long

TOML = """longest_sentence = 5
[[limit]]
name = "all"
words = 12
files = ["docs/**/*.md", "README.md"]
[[limit]]
name = "the first page"
words = 5
files = ["README.md"]
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One. Two two! Is it three?", ["One", "Two two", "Is it three?"]),
        ("One: two; three\nfour.", ["One: two; three four."]),
        ("At 0.2 s, e.g. of `a.yaml`, i.e. soon. vLLM too.", ["At 0.2 s, e.g. of a.yaml, i.e. soon", "vLLM too."]),
        ("- One.\n- Two [three](four.md).\n\n1. Four", ["One.", "Two three.", "Four"]),
        ("| a b | c |\n|---|---|\n| d. E<br>f | `g \\| h` |", ["a b", "c", "d", "E", "f", "g | h"]),
        ("```yaml\none: two\n```\n\n    $ three four\n\nFive.", ["Five."]),
        ('!!! note "One two"\n\n    Three. Four.\n\n        code\n\nFive.', ["One two", "Three", "Four.", "Five."]),
        ("---\nhide: toc\n---\n# One\n\n![two](three.png)\n<p>four</p>\n", ["One"]),
        ('"One." (Two.) Three', ['"One', "(Two", "Three"]),
    ],
)  # fmt: skip
def test_sentences_are_those_that_a_reader_sees(text: str, found: list[str]) -> None:
    assert list(sentences(text)) == found


def test_words_of_a_sentence_are_counted_with_inline_code_and_without_signs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("One – `two three` = four.\n\nOne `two three` four, five.\n")
    assert too_long(page, 4) == [(5, "One two three four, five.")]


def test_what_is_too_long_is_named_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "start").mkdir(parents=True)
    (tmp_path / "docs" / "start" / "one.md").write_text("# One\n\nTwo three four five six seven.\n")
    (tmp_path / "README.md").write_text("One two three four. Five.\n")
    limits = limits_of(TOML)
    sentence = "docs/start/one.md: a sentence of 6 words: Two three four five six seven."
    assert check(tmp_path, limits) == [sentence, "all: 13 words, of 12"]
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["README.md", "5"] in table and ["docs/start/one.md", "8", "1"] in table
    assert ["all", "13", "12"] in table
    assert check(tmp_path, limits, [tmp_path / "README.md"]) == []
    assert check(tmp_path, limits, [tmp_path / "docs" / "start" / "one.md"]) == [sentence]


def test_the_command_ends_with_1_where_something_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text(TOML)
    (tmp_path / "README.md").write_text("One.\n")
    monkeypatch.setattr("scripts.words.ROOT", tmp_path)
    monkeypatch.setattr("scripts.words.LIMITS", limits)
    for words, status in ((5, 0), (6, 1)):
        (tmp_path / "README.md").write_text("One. " * words)
        with pytest.raises(SystemExit) as ended:
            main([])
        assert ended.value.code == status


def test_the_limits_cover_every_page() -> None:
    limits = limits_of(LIMITS.read_text())
    assert {"README.md", "ARCHITECTURE.md"} <= {page.name for page in limits.pages(ROOT)}
    folders = [path for name in ("docs", "decisions", "benchmarks") for path in (ROOT / name).rglob("*.md")]
    assert {*folders, *ROOT.glob("*.md")} <= set(limits.pages(ROOT))
    for limit in limits.limits:
        assert limit.pages(ROOT), limit.name
