"""Filter chains: order kept, disabled without effect, errors named, and a broken filter costs one task."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config.file import Config, parse
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import Chain, LineFilter, Step, influence_of, load_chain
from flywheel.judge.filters.influence import Burst, Influence
from flywheel.judge.filters.llm_evaluate import LlmEvaluate
from flywheel.judge.filters.python_filter import load_filter
from flywheel.judge.rubric import text
from flywheel.records.task import task_line
from flywheel.system import files
from tests.factories.trace import reply

PYTHON = """
from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

@dataclass
class Limit:  # dataclasses look their module up
    unit: ClassVar[str] = "characters"
    size: int = 100

def leave(task):
    sys.exit(3)

def spoil(task):
    task["answer"] = task["metadata"]["answer"] = "mine"
    return True

def keep(task):
    if "crash" in task["main_query"]:
        raise RuntimeError("a defect of the user's")
    if "odd" in task["main_query"]:
        return "yes"
    return "bad" not in task["main_query"], "it is bad"

def short(task):
    return len(task["answer"]) < 100
"""


def line(query: str = "What is 1 plus 1?", answer: str = "2") -> dict[str, Any]:
    return task_line(reply(1, query=query, answer=answer), "/x", "t-1")


def chain(folder: Path, *filters: dict[str, Any], **values: Any) -> Chain:
    (folder / "mine.py").write_text(PYTHON)
    (folder / "chain.yaml").write_text(yaml.safe_dump({"id": "c", "filters": list(filters), **values}))
    return load_chain(folder / "chain.yaml")


def test_the_first_filter_that_says_no_is_named(tmp_path: Path) -> None:
    both = chain(
        tmp_path,
        {"type": "rules", "params": {"min_answer_length": 3}},
        {"type": "python", "params": {"path": "mine.py"}},
        {"type": "llm_evaluate"},
    )
    assert both.apply(line(answer="long enough")).kept
    decision = both.apply(line("bad question", " 1 "))
    assert (decision.kept, decision.filter, decision.reason) == (False, "rules", "the answer is too short")
    decision = both.apply(line("bad question", "long enough"))
    assert (decision.filter, decision.reason) == ("python", "it is bad")


@pytest.mark.parametrize(
    ("params", "query", "answer", "kept"),
    [
        ({"min_answer_length": 1}, "q", "\u200b\ufeff \n", False),
        ({"min_query_length": 1}, " \u200b", "a", False),
        ({"min_query_length": 2}, " q ", "a", False),
        ({"max_query_length": 3}, "  abc\n", "a", True),
        ({"max_answer_length": 3}, "q", "\n\nabc\n", True),
        ({"max_answer_length": 3}, "q", "abc\u200b", False),
        ({"exclude": ["caf\u00e9"]}, "q", "cafe\u0301", False),
        ({"exclude": ["(?m)^sorry$"]}, "q", "sorry\r\nbut", False),
    ],
)
def test_rules_count_what_a_reader_sees(
    tmp_path: Path, params: dict[str, Any], query: str, answer: str, kept: bool
) -> None:
    assert chain(tmp_path, {"type": "rules", "params": params}).apply(line(query, answer)).kept is kept


def test_a_disabled_filter_has_no_effect(tmp_path: Path) -> None:
    off = chain(
        tmp_path,
        {"type": "rules", "enabled": False, "params": {"min_answer_length": 3}},
        {"type": "python", "enabled": False, "params": {"path": "not_written_yet.py"}},
    )
    assert off.apply(line(answer="1")).kept


def test_an_unknown_type_is_wrong_even_when_it_is_disabled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"filters\.0\.type"):
        chain(tmp_path, {"type": "rule", "enabled": False})


def test_the_order_is_kept(tmp_path: Path) -> None:
    rules = {"type": "rules", "params": {"min_answer_length": 3}}
    python = {"type": "python", "params": {"path": "mine.py"}}
    for order in ([rules, python], [python, rules]):
        assert chain(tmp_path, *order).apply(line("bad question", "1")).filter == order[0]["type"]


def test_a_filter_that_leaves_the_program_costs_its_task_only(tmp_path: Path) -> None:
    mine = chain(tmp_path, {"type": "python", "params": {"path": "mine.py", "function": "leave"}})
    assert "SystemExit" in mine.apply(line()).error


def test_a_filter_cannot_change_the_task(tmp_path: Path) -> None:
    mine = chain(tmp_path, {"type": "python", "params": {"path": "mine.py", "function": "spoil"}})
    task = line()
    assert mine.apply(task).kept
    assert task == line()


def test_loading_writes_nothing_beside_the_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    chain(tmp_path, {"type": "python", "params": {"path": "mine.py"}})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["chain.yaml", "mine.py"]


def test_a_filter_that_breaks_says_so_for_its_task_only(tmp_path: Path) -> None:
    mine = chain(tmp_path, {"type": "python", "params": {"path": "mine.py"}})
    decision = mine.apply(line("crash"))
    assert not decision.kept
    assert "RuntimeError: a defect of the user's" in decision.error
    assert "must return" in mine.apply(line("odd")).error
    assert mine.apply(line("fine")).kept


@pytest.mark.parametrize(
    ("params", "answer", "kept"),
    [
        ({"max_answer_length": 3}, "four", False),
        ({"max_answer_length": 4}, "four", True),
        ({"min_query_length": 1000}, "x", False),
        ({"max_query_length": 3}, "x", False),
        ({"exclude": ["(?i)rate limit"]}, "Rate Limit exceeded", False),
        ({"exclude": ["(?i)rate limit"]}, "fine", True),
    ],
)
def test_rules(tmp_path: Path, params: dict[str, Any], answer: str, kept: bool) -> None:
    assert chain(tmp_path, {"type": "rules", "params": params}).apply(line(answer=answer)).kept is kept


def test_a_rule_that_backtracks_without_end_costs_its_task_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "TIMEOUT_SECONDS", 0.3)
    mine = chain(tmp_path, {"type": "rules", "params": {"max_answer_length": 50, "exclude": ["^(a|a|aa)+$"]}})
    decision = mine.apply(line(answer="a" * 40 + "!"))
    assert not decision.kept
    assert "^(a|a|aa)+$ ran longer than 0.3 s on an answer of 41 characters" in decision.error
    assert mine.apply(line(answer="b")).kept
    assert mine.apply(line(answer="a" * 60 + "!")).reason == "the answer is too long"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (
            {"type": "rule"},
            r"line 2: `filters\.0\.type`: there is no filter 'rule': did you mean rules\?",
        ),
        ({"type": "rules", "params": {"min_answer": 1}}, "unknown key `min_answer`"),
        ({"type": "rules", "params": {"exclude": ["("]}}, "no regular expression"),
        ({"type": "python", "params": {}}, r"filter python: line 2: `path`: it is required"),
        ({"type": "python", "params": {"path": "none.py"}}, "no such file"),
        ({"type": "python", "params": {"path": "mine.py", "function": "nope"}}, "no function nope"),
        ({"type": "llm_evaluate", "params": {"x": 1}}, r"filter llm_evaluate: line 3: unknown key `x`"),
        ({"type": "rules", "enable": True}, r"unknown key `filters\.0\.enable` \(did you mean `enabled`\?\)"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, entry: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        chain(tmp_path, entry)


def test_a_python_file_that_does_not_load_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("id: c\nfilters: [{type: python, params: {path: broken.py}}]")
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    with pytest.raises(ConfigError, match="no_such_module_anywhere"):
        load_chain(tmp_path / "c.yaml")


def test_the_hash_changes_with_the_chain_and_with_the_python_file(tmp_path: Path) -> None:
    entry = {"type": "python", "params": {"path": "mine.py"}}
    first = chain(tmp_path, entry).hash
    assert chain(tmp_path, entry).hash == first
    assert chain(tmp_path, entry, description="words").hash != first
    (tmp_path / "mine.py").write_text(PYTHON + "\n# changed\n")
    assert load_chain(tmp_path / "chain.yaml").hash != first


SHIPPED = sorted((files.shipped_folder() / "filters").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_every_shipped_chain_loads_with_all_its_filters_on(path: Path, tmp_path: Path) -> None:
    load_chain(path)
    on = path.read_text().replace("enabled: false", "enabled: true").replace("path: ex", f"path: {path.parent}/ex")
    (tmp_path / "on.yaml").write_text(on)
    made = load_chain(tmp_path / "on.yaml")
    assert made.apply(line()).kept
    assert made.judge is not None
    assert made.deduplication is not None


def test_the_shipped_python_filter_drops_greetings() -> None:
    shipped = files.shipped_folder() / "filters" / "example_filter.py"
    keep = load_filter(shipped, "keep", 30)
    assert keep(line("Hello!")) == (False, "only a greeting")
    assert keep(line())[0]


def test_shipped_chains_are_what_they_say() -> None:
    assert [path.stem for path in SHIPPED] == ["agentjet", "default", "open-to-strangers", "private"]
    agentjet, default, strangers, private = map(load_chain, SHIPPED)
    assert agentjet.judge is not None
    assert agentjet.judge.custom_rubrics is not None
    assert len(agentjet.notices) == 2
    assert default.influence == private.influence == Influence(conversation=0.05, user=0.2)
    assert (default.influence.template, default.influence.burst, default.influence.widen) == (1, None, True)
    assert strangers.influence == Influence(template=0.2, burst=Burst(count=20, seconds=600), widen=False)
    assert default.notices == ()
    assert private.redact is not None
    secret = line("My key is AKIAIOSFODNN7EXAMPLE, I am a@example.com")
    assert private.redact(secret)["main_query"] == "My key is [API_KEY_1], I am [EMAIL_1]"
    assert private.apply(private.redact(secret)).reason == "it holds an API key"


def names(steps: tuple[Step, ...]) -> list[str]:
    return [step.name if isinstance(step, LineFilter) else "deduplication" for step in steps]


PASTED = [
    {"type": "llm_evaluate", "enabled": True, "params": {"custom_rubrics": "Drop what is wrong.", "max_thread": 4}},
    {"type": "deduplication", "enabled": True, "params": {"similarity_threshold": 0.9, "api_key": None}},
    {"type": "rules", "params": {"min_answer_length": 3}},
]


def test_cheap_runs_before_paid_whatever_order_is_pasted_and_one_notice_says_so(tmp_path: Path) -> None:
    pasted = chain(tmp_path, *PASTED)
    assert names(pasted.before) == ["rules", "deduplication"]
    assert pasted.after == ()
    assert pasted.judge == LlmEvaluate(custom_rubrics="Drop what is wrong.", max_thread=4)
    (notice,) = pasted.notices
    assert "rules, deduplication, llm_evaluate" in notice
    assert "keep_order: true" in notice
    assert chain(tmp_path, *reversed(PASTED)).notices == ()


def test_the_order_is_kept_when_that_is_wanted(tmp_path: Path) -> None:
    kept = chain(tmp_path, *PASTED, keep_order=True)
    assert names(kept.before) == []
    assert names(kept.after) == ["deduplication", "rules"]
    assert kept.notices == ()


def test_a_chain_decides_alone_where_it_says_so_and_has_no_judge(tmp_path: Path) -> None:
    off = {**PASTED[0], "enabled": False}
    alone = chain(tmp_path, off, PASTED[2], decides=True)
    assert alone.decides
    assert "they alone decide" in alone.notices[0]
    asks = chain(tmp_path, off, PASTED[2])
    assert not asks.decides
    assert asks.hash == alone.hash, "the filters are the same"
    assert not chain(tmp_path, *PASTED, decides=True).decides


def test_the_database_of_another_tool_is_not_touched_and_that_is_said(tmp_path: Path) -> None:
    other = tmp_path / "similarity_db"
    other.mkdir()
    (other / "chroma.sqlite3").write_bytes(b"somebody else's")
    made = chain(tmp_path, {"type": "deduplication", "params": {"db_path": str(other)}})
    assert str(other) in made.notices[0]
    assert [path.name for path in other.iterdir()] == ["chroma.sqlite3"]
    assert (other / "chroma.sqlite3").read_bytes() == b"somebody else's"


def test_a_filter_that_a_chain_has_once_is_not_written_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`filters\.1\.type`: deduplication is there already"):
        chain(tmp_path, {"type": "deduplication"}, {"type": "deduplication"})
    off = {"type": "deduplication", "enabled": False}
    assert chain(tmp_path, {"type": "deduplication"}, off).deduplication is not None


@pytest.mark.parametrize(
    ("kind", "params", "complaint"),
    [
        ("deduplication", {"similarity_treshold": 0.8}, "did you mean `similarity_threshold`"),
        ("deduplication", {"similarity_threshold": 80}, "1 or less"),
        ("deduplication", {"base_url": "http://x"}, "base_url needs a model"),
        ("llm_evaluate", {"custom_rubrics": "  "}, "must be a text"),
        ("influence", {"conversation": 5}, "1 or less"),
        ("influence", {"burst": {"number": 3}}, r"unknown key `burst\.number`"),
        ("pii", {"action": "delete"}, "`action`"),
        ("pii", {"kinds": ["mail"]}, r"`kinds\.0`"),
    ],
)
def test_what_is_wrong_with_parameters_is_named(
    tmp_path: Path, kind: str, params: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        chain(tmp_path, {"type": "rules"}, {"type": kind, "params": params})
    assert re.search(rf"filter {kind}: line [345]: ", str(caught.value))


def test_influence_is_read_without_the_rest_of_the_chain(tmp_path: Path) -> None:
    chain(tmp_path, {"type": "influence", "params": {"user": 0.5}})
    config = parse({"filter": {"chain": "chain.yaml"}}, "test", tmp_path)
    assert influence_of(config) == Influence(user=0.5)
    chain(tmp_path, {"type": "influence", "enabled": False})
    assert influence_of(config) is None
    assert influence_of(Config()) is None
