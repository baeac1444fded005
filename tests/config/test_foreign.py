"""Tables of other programs' keys: each key has a row, and each row a key of Flywheel's that exists, or a reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.agentjet import AGENTJET
from flywheel.config.file import Config
from flywheel.config.foreign import SECTIONS, Made, Only, Refusal, Row, Table, Without, check, settings_in
from flywheel.config.ingest import DatasetSettings, JsonlSource
from flywheel.config.sage import SAGE
from flywheel.config.training import AgentProgramSettings, RewardSettings
from flywheel.config.trinity import TRINITY
from flywheel.errors import ConfigError

HERE = Path(__file__).parent
OF_SAGE = HERE.parent.parent / "docs" / "reference" / "sage-options.tsv"
OF_TUNE = ("train_dataset", "eval_dataset", "monitor_type")
"""What a key may be used as besides a setting: an argument of `tune`."""
OPTIONS = ("sft_config", "rl_config", "grpo", "reward_config")
"""Classes of SAGE whose options that file has without their names."""
MADE = {
    "sources": JsonlSource(type="jsonl", path=Path("p")),
    "dataset": DatasetSettings(path="d"),
    "agent": AgentProgramSettings(command=["a"]),
    "reward": RewardSettings(),
}
"""Sections that the defaults do not have."""
TABLE = Table(
    "page",
    {
        "old.a a": "ours.a",
        "b": Made("ours.b", lambda values: values["b"] + 1 if values["b"] > 0 else Without("it is not above 0")),
        "mode": Only(("x", "y"), "there is no other mode"),
        "never": Refusal("an option of theirs", "Use a."),
        "a=9": Refusal("9 is too much", "Use 8."),
        "section a=7": Without("nothing is like it"),
        "section.inner": Without("it is theirs"),
    },
    closed=("closed.",),
)


def default_of(key: str) -> Any:
    """The default of one of Flywheel's keys. Raises AttributeError for one that does not exist."""
    value: Any = Config()
    for name in key.split("."):
        value = value if name.isdecimal() else MADE.get(name) or getattr(value, name)
    return value


def row_of(key: str, value: Any) -> Row:
    (row,) = TABLE.rows([(f"root.{key}", key, value)])
    return row


@pytest.mark.parametrize(
    ("key", "value", "outcome", "said"),
    [
        ("a", 1, "taken over", ""),
        ("mode", "x", "taken over", "there is no other mode"),
        ("mode", "z", "refused", "`root.mode` is z: there is no other mode"),
        ("never", 1, "refused", "`root.never` is an option of theirs"),
        ("a", 9, "refused", "`root.a` is 9, which Flywheel does not take: 9 is too much"),
        ("a", 7, "without effect", "nothing is like it"),
        ("section.x.y", 1, "without effect", "nothing is like it"),
        ("section.inner", 1, "without effect", "it is theirs"),
        ("unknown", 1, "without effect", "Flywheel has nothing like it"),
        ("closed.key", 1, "refused", "unknown key `root.closed.key`"),
    ],
)
def test_what_becomes_of_a_key(key: str, value: Any, outcome: str, said: str) -> None:
    row = row_of(key, value)
    assert (row.outcome, row.why) == (outcome, said)
    assert bool(row.hint) == (outcome == "refused")


def test_a_value_is_copied_or_made_and_the_last_name_counts() -> None:
    assert row_of("b", 3)[2:5] == ("replaced by", "ours.b", 4)
    assert row_of("b", 0)[2:] == ("without effect", "", None, "it is not above 0", "", "")
    assert [(row.use, row.why) for row in TABLE.rows([("a", "a", 1), ("old.a", "old.a", 2)])] == [
        ("", "a has another value"),
        ("ours.a", ""),
    ]
    assert TABLE.rows([("a", "a", None)]) == []


def test_one_line_lists_what_has_no_effect_and_an_error_has_all_refused(caplog: pytest.LogCaptureFixture) -> None:
    rows = TABLE.rows((key, key, 1) for key in ("a", "sectoin", "unknown", "section.x"))
    with caplog.at_level(logging.WARNING):
        check(rows, "use it", "x.yaml", "page")
    assert settings_in(rows) == {"ours": {"a": 1}}
    assert caplog.messages == [
        "x.yaml: without effect: sectoin (did you mean section?), unknown, section.x; see `flywheel docs page`"
    ]
    refused = TABLE.rows([("never", "never", 1), ("mode", "mode", 2), ("closed.key", "closed.key", 3)])
    with pytest.raises(ConfigError, match=r"`never` is an option of theirs\. Use a\. See `flywheel docs page`\.$"):
        check(refused[:1], "use it", "x.yaml", "page")
    with pytest.raises(ConfigError) as error:
        check(refused, "use it", "x.yaml", "page")
    assert str(error.value).splitlines() == [
        "cannot use it: 3 keys are refused (see `flywheel docs page`):",
        "- `never` is an option of theirs. Use a.",
        "- `mode` is 2: there is no other mode. Set it to x or y, or remove it.",
        "- unknown key `closed.key`. Correct it.",
    ]


def test_the_sections_of_flywheels_own_files_are_known() -> None:
    assert Config.model_fields.keys() == SECTIONS


@pytest.mark.parametrize("table", [AGENTJET, TRINITY, SAGE], ids=lambda table: table.page)
def test_every_key_that_is_set_exists(table: Table) -> None:
    for use in table.uses.values():
        if not use.startswith(OF_TUNE):
            default_of(use)


@pytest.mark.parametrize(("table", "file"), [(AGENTJET, "agentjet_keys.txt"), (TRINITY, "trinity_keys.txt")])
def test_every_documented_key_has_a_row(table: Table, file: str) -> None:
    documented = [line for line in (HERE / file).read_text().splitlines() if not line.startswith("#")]
    for key in documented:
        is_in_section = any(name.startswith(f"{key}.") for name in table.names)
        assert key in table.names or table.reason(key) or is_in_section, key
        assert not table.meant_by(key), key


def test_the_file_of_sages_options_is_true() -> None:
    """Its names and keys are those of the table, and a default that differs has its reason."""
    rows = [line.split("\t") for line in OF_SAGE.read_text().splitlines()[1:]]
    said: dict[str, set[str]] = {}
    for _, names, there, keys, here, why in rows:
        uses = keys.split(", ") if keys else []
        defaults = [default_of(key) for key in uses if key != "sources"]
        plain = [each.name if isinstance(each, Path) else "null" if each is None else str(each) for each in defaults]
        assert here == ", ".join(plain), names
        assert why or plain == [there], names
        for name in names.split(", "):
            said.setdefault(name, set()).update(uses)
    table: dict[str, set[str]] = {}
    for name in {each for each in SAGE.entries if "=" not in each}:
        section, _, option = name.partition(".")
        table.setdefault(option if section in OPTIONS else name, set()).update({SAGE.uses.get(name, "")} - {""})
    of_astuner = {"algorithm.adv_estimator", "algorithm.use_kl_in_reward", "ppo_config"}
    assert {name: uses for name, uses in said.items() if name not in of_astuner} == table
