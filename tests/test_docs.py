"""The documentation says what is true."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

import flywheel.tuner
from flywheel.cli.settings import SCHEMAS, schema_of
from flywheel.config.file import Config, parse
from flywheel.errors import Condition
from flywheel.judge.filters.chain import FILTERS, load_chain
from flywheel.judge.filters.deduplication import Deduplication
from flywheel.judge.filters.influence import Influence
from flywheel.judge.filters.llm_evaluate import LlmEvaluate
from flywheel.judge.filters.pii import Pii
from flywheel.judge.filters.rules import Rules
from flywheel.judge.rubric.file import parse_rubric
from flywheel.judge.rubric.rubric import KINDS
from flywheel.records.states import SkipReason, TaskState
from flywheel.store.kernel.schema import SCHEMA_VERSION
from flywheel.system.files import DOCUMENTATION_KINDS, documentation_pages
from flywheel.system.yaml_file import sections_in
from flywheel.training.data.export_formats import FORMATS
from scripts.configuration_page import EXAMPLES, IN_ONE_ROW, PAGE, page
from scripts.reference_pages import (
    CLI_PAGE,
    FILES_PAGE,
    FOREIGN_KEYS,
    OTLP_PAGE,
    cli_page,
    files_page,
    foreign_keys,
    otlp_page,
)

ROOT = Path(__file__).parent.parent
FILTERS_PAGE = ROOT / "docs" / "reference" / "rubrics-and-filters.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_configuration_page_is_the_settings() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.configuration_page"


def settings_in(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each setting, as its section and its name, whichever kind of a section has it."""
    for name, field in model.model_fields.items():
        inner = {} if name in IN_ONE_ROW else sections_in(field.annotation)
        if not inner:
            yield prefix, name
        for section in inner.values():
            yield from settings_in(section, f"{prefix}.{name}".lstrip("."))


def test_every_setting_is_on_the_page_in_its_section() -> None:
    """Whatever makes the page: the settings are walked here once more."""
    told: dict[str, set[str]] = {}
    for part in re.split(r"^#+ (?=`)", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        names = told.setdefault(part.split("`")[1], set())
        names |= set(re.findall(r"^(?:\| |- )`(\w+)`", part, re.MULTILINE))
    known = list(settings_in(Config))
    assert len(known) > 150 and ("rollout.agent", "workflow") in known
    assert [f"{section}.{name}" for section, name in known if name not in told.get(section, set())] == []


def test_the_page_of_settings_tells_each_once_and_has_an_example_of_each_section() -> None:
    rows = [
        (part.split("`")[1], row)
        for part in re.split(r"^#+ (?=`)", PAGE.read_text(), flags=re.MULTILINE)[1:]
        for row in re.findall(r"^- (`\w+`.*)", part, re.MULTILINE)
    ]
    assert len(set(rows)) == len(rows)
    assert EXAMPLES.keys() == Config.model_fields.keys()
    assert all(yaml.safe_load(text).keys() == {section} for section, text in EXAMPLES.items())
    agent = PAGE.read_text().split("### `rollout.agent`\n")[1]
    assert agent.startswith("\nWho acts in a rollout. `reply`: ") and "type: program" not in PAGE.read_text()


def test_the_pages_of_commands_files_and_keys_are_generated_from_the_code() -> None:
    assert CLI_PAGE.read_text() == cli_page(), "run: python -m scripts.reference_pages"
    assert FILES_PAGE.read_text() == files_page(), "run: python -m scripts.reference_pages"
    assert FOREIGN_KEYS.read_text() == foreign_keys(), "run: python -m scripts.reference_pages"
    assert OTLP_PAGE.read_text() == otlp_page(), "run: python -m scripts.reference_pages"


def test_the_signatures_of_the_python_api_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text()
    told = re.findall(r"^    (?:await )?(\w+)\(([^)]*)\)$", text, re.MULTILINE)
    assert {name for name, _ in told} == {*flywheel._PLACES}
    for name, parameters in told:
        plain = [
            each.replace(annotation=inspect.Parameter.empty)
            for each in inspect.signature(getattr(flywheel, name)).parameters.values()
        ]
        assert f"({' '.join(parameters.split())})" == str(inspect.Signature(plain)), name
    rows = {name for names in re.findall(r"^- (`.*?`):", text, re.MULTILINE) for name in re.findall(r"\w+", names)}
    assert {*inspect.signature(flywheel.tune).parameters, *flywheel.tuner.TuneResult.__dataclass_fields__} <= rows


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed")
def test_mkdocs_builds_the_site_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    index = (tmp_path / "site" / "index.html").read_text()
    assert (tmp_path / "site" / "llms.txt").is_file() and (tmp_path / "site" / "reference" / "cli.md").is_file()
    assert not re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=\"https?://[^\"]*\"", index)


def test_every_image_is_there_and_small() -> None:
    """`make screenshots` writes them."""
    for page_path in PAGES:
        for target in re.findall(r'(?:src|srcset)="([^":]+\.png)"', page_path.read_text()):
            assert (page_path.parent / target).is_file(), f"{page_path.name} shows {target}"
    for image in (ROOT / "docs" / "images").iterdir():
        assert image.stat().st_size < 100_000, image.name


def navigation() -> dict[str, dict[str, str]]:
    """The titles and paths of the pages in each group of `mkdocs.yml`; a page without a group is its own one."""
    groups: dict[str, Any] = {}
    for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]:
        groups |= entry
    return {
        group: {group: found}
        if isinstance(found, str)
        else {title: path for each in found for title, path in each.items()}
        for group, found in groups.items()
    }


def test_every_page_is_on_the_site_once_and_found_by_name() -> None:
    """`flywheel docs PAGE` finds every page, in the folders that it lists."""
    named = [path for pages in navigation().values() for path in pages.values()]
    there = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(there)
    assert set(documentation_pages().values()) == {ROOT / "docs" / path for path in there}
    assert {Path(path).parent.as_posix() for path in there} == set(DOCUMENTATION_KINDS)


def test_a_page_is_named_with_its_folder_where_two_have_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.system.files.shipped_folder", lambda: tmp_path)
    for name in ("connect/files", "reference/files", "reference/cli", "index"):
        path = tmp_path / "docs" / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# A page\n")
    assert list(documentation_pages()) == ["connect/files", "cli", "reference/files", "index"]


def test_the_index_for_models_has_the_pages_of_the_navigation() -> None:
    """By the convention of llmstxt.org: a title, a summary as a quotation, lists of links with a few words each."""
    head, *sections = re.split(r"^## ", (ROOT / "docs" / "llms.txt").read_text(), flags=re.MULTILINE)
    assert re.match(r"# Flywheel\n\n> .+\n", head)
    listed = {}
    for section in sections:
        title, _, lines = section.partition("\n\n")
        rows = [re.fullmatch(r"- \[(.+?)\]\((.+?)\): (.+)", line) for line in lines.strip().splitlines()]
        listed[title] = {row[1]: row[2] for row in rows if row is not None}
        assert None not in rows, title
    assert listed == navigation()


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_shipped_schemas_are_the_generated_ones(name: str) -> None:
    shipped = json.loads((ROOT / SCHEMAS[name]).read_text())
    assert shipped == schema_of(name), "run: python -m scripts.configuration_page"


def test_every_link_between_pages_leads_somewhere() -> None:
    for document in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


def test_every_configuration_in_the_pages_is_valid() -> None:
    found = []
    for document in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", document.read_text(), re.S):
            raw = yaml.safe_load(block)
            if not {"criteria", "filters"} & raw.keys():
                parse(raw, str(document), ROOT / "configs")
                found.append(document.name)
    assert {"README.md", "write-a-rubric.md", "traces.md", "files.md"} <= set(found)


def test_every_function_in_the_pages_can_be_defined() -> None:
    found = 0
    for document in sorted((ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.S):
            if "def is_from_flywheel" in block:
                continue  # tests/daemon/test_notifier.py calls it
            if "async def run(" in block:
                continue  # tests/agents/test_workflow_examples.py calls them
            defined: dict[str, Any] = {}
            exec(block, defined)
            [function] = [value for name, value in defined.items() if not name.startswith("__")]
            kept, reason = function({"answer": "See example.org."})
            assert isinstance(kept, bool)
            assert reason
            found += 1
    assert found == 2


def test_every_rubric_and_chain_in_the_pages_is_valid(tmp_path: Path) -> None:
    rubrics = chains = 0
    for document in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", document.read_text(), re.S):
            raw = yaml.safe_load(block)
            if "criteria" in raw:
                rubric = parse_rubric(raw, str(document))
                boxed = [criterion for criterion in rubric.every if criterion.type == "regex"]
                assert all(re.search(str(criterion.value), "\\boxed{7}") for criterion in boxed)
                rubrics += 1
            elif "filters" in raw:
                raw["filters"] = [entry for entry in raw["filters"] if entry.get("enabled", True)]
                (tmp_path / "chain.yaml").write_text(yaml.safe_dump(raw))
                load_chain(tmp_path / "chain.yaml")
                chains += 1
    assert rubrics >= 2
    assert chains >= 1


def test_every_state_of_a_task_and_every_reason_to_skip_a_reply_is_on_a_page() -> None:
    for name, head, values in (
        ("monitor", "| a task is | when |", TaskState),
        ("troubleshooting", "| reason | meaning, and what to do |", SkipReason),
    ):
        page_text = (ROOT / "docs" / "operate" / f"{name}.md").read_text()
        assert first_cells(page_text, head) == {value.value for value in values}


def first_cells(page_text: str, head: str) -> set[str]:
    """The names in the first column of the table that begins so."""
    table = page_text.split(head)[1].split("\n\n", maxsplit=1)[0]
    return set(re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))))


def test_the_tables_of_criteria_formats_and_conditions_of_servers_are_whole() -> None:
    docs = {path.stem: path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    reference = {path.stem: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert first_cells(docs["rubrics-and-filters"], "| type | is met when | `value` |") == set(KINDS)
    assert first_cells(reference["files"], "| format | file | read by | columns |") == set(FORMATS)
    servers = docs["troubleshooting"].split("## Conditions of servers")[1]
    assert first_cells(servers, "| condition |") == {condition.value for condition in Condition} | {
        "not looked at yet"
    }


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("rules", Rules), ("deduplication", Deduplication), ("pii", Pii), ("influence", Influence),
        ("llm_evaluate", LlmEvaluate),
    ],
)  # fmt: skip
def test_the_page_of_filters_has_every_parameter_and_its_default(name: str, settings: type[BaseModel]) -> None:
    section = re.split(r"\n##+ ", FILTERS_PAGE.read_text().split(f"\n### {name}\n")[1])[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert set(settings.model_fields) <= named
    for names, default in re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE):
        fields = [settings.model_fields[field] for field in re.findall(r"`(\w+)`", names)]
        told = default.split(", ") if len(fields) > 1 else [default]
        for field, text in zip(fields, told, strict=True):
            if re.fullmatch(r"[\d.]+", text):
                assert field.default == float(text)


def test_every_type_of_filter_has_its_section() -> None:
    text = FILTERS_PAGE.read_text().split("\n## Filter chains\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) == set(FILTERS)


def test_every_variable_of_the_environment_that_is_ours_is_on_its_page() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "flywheel").rglob("*.py"))
    read = re.findall(r"""(?:environ(?:\.get\(|\[)|envvar=|_VARIABLE(?:: Final)? = )"(FLYWHEEL_\w+)\"""", code)
    page_text = PAGE.read_text().split("\n## Environment variables\n")[1]
    internal = {name for name in read if f'_VARIABLE: Final = "{name}"' in code or f'_VARIABLE = "{name}"' in code}
    rows = re.findall(r"^- (`FLYWHEEL_\w+`.*?):", page_text, re.MULTILINE)
    assert set(read) - internal == set(re.findall(r"FLYWHEEL_\w+", " ".join(rows)))


def test_the_changelog_names_the_schema_of_the_state() -> None:
    assert f"schema version {SCHEMA_VERSION}" in " ".join((ROOT / "CHANGELOG.md").read_text().split())
