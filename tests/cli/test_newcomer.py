"""What the README tells a newcomer works as it is written, and a state that is not there is not called right."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flywheel.errors import EXIT_CONFIG
from tests.cli.conftest import Run
from tests.cli.terminal import in_terminal
from tests.factories.judge_server import JudgeServer

ROOT = Path(__file__).parent.parent.parent
STUDIO = ROOT / "tests" / "data" / "studio"


DRY_RUN = ROOT / "docs" / "judge" / "write-a-rubric.md"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with Studio's database at its own place."""
    (tmp_path / "AgentScope-Studio").mkdir()
    shutil.copy(STUDIO / "new_v2.sqlite", tmp_path / "AgentScope-Studio" / "database.sqlite")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_the_readme_leads_from_nothing_to_verdicts(
    flywheel: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLYWHEEL_HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    readme = (ROOT / "README.md").read_text()
    [line] = re.findall(r"^flywheel init ~/(\S+) && cd ~/\1 ", readme, re.MULTILINE)
    said = flywheel("init", home / line).out.splitlines()[-1]
    assert said == f"export FLYWHEEL_CONFIG={shlex.quote(str(home / line / 'flywheel.yaml'))}"
    monkeypatch.chdir(home / line)
    assert sorted(path.name for path in Path().iterdir()) == [
        "filters",
        "flywheel.schema.json",
        "flywheel.yaml",
        "rubrics",
    ]
    with JudgeServer() as judge:
        config = Path("flywheel.yaml")
        config.write_text(config.read_text().replace("https://api.openai.com/v1", judge.base_url))
        [command] = re.findall(r"^\$ flywheel (filter .*)$", DRY_RUN.read_text(), re.MULTILINE)
        ran = flywheel(*command.split())
        assert ran.code == 0
        assert "4 judged" in ran.out
        assert judge.calls > 0
    assert "no state at" in flywheel("status").out, "a dry run writes nothing"
    assert flywheel("ingest").code == 0
    assert "no state at" not in flywheel("status").out
    assert flywheel("audit").out.endswith("balanced\n")


def test_the_page_shows_a_dry_run_as_it_is(flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DRY_RUN.read_text()
    [(command, shown)] = re.findall(r"^\$ flywheel (filter [^\n]*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("COLUMNS", "110")
    with JudgeServer(lambda question, answer: True) as judge:
        settings = {
            "sources": [{"path": shutil.copy(STUDIO / "new_v1.sqlite", tmp_path)}],
            "judge": {
                "base_url": judge.base_url,
                "model": "judge",
                "prices": {"input_per_million": 0.15, "output_per_million": 0.6},
            },
            "filter": {"rubric": str(ROOT / "rubrics" / "math-boxed.yaml")},
        }
        (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
        ran = flywheel(*command.split())
    told = [line.rstrip() for line in (ran.err + ran.out).splitlines()]
    assert told == shown.splitlines()


NOTHING_TO_READ = [
    ["run"], ["run", "--once"], ["round"], ["round", "--debug"], ["filter"], ["filter", "--dry-run"],
    ["filter", "--estimate"], ["judge"], ["ingest"], ["status"], ["status", "--json"], ["tasks"],
    ["tasks", "release", "--all"], ["audit"], ["audit", "--deep"], ["prune"], ["backup", "kept"],
]  # fmt: skip
"""Commands that need a configuration, or a state."""
NOTHING_TO_ASK = [["serve"], ["evaluate", "--model", "m", "--benchmark", "held-out"], ["retrieval", "evaluate"]]
"""Commands for which any setting is a configuration."""


@pytest.mark.parametrize(
    ("command", "given"),
    [
        *((command, given) for command in NOTHING_TO_READ for given in [(), ("--set", "judge.model=m")]),
        *((command, ()) for command in NOTHING_TO_ASK),
    ],
)
def test_without_a_configuration_it_says_what_it_lacks_and_makes_nothing(
    flywheel: Run, home: Path, command: list[str], given: tuple[str, ...]
) -> None:
    before = set(home.rglob("*"))
    ran = flywheel(*given, *command)
    assert ran.code == EXIT_CONFIG
    assert "there is no configuration" in ran.err and "`flywheel init` writes one" in ran.err
    assert set(home.rglob("*")) == before


@pytest.mark.parametrize(
    "command",
    [
        ["why", "r0001"], ["show", "task"], ["dead-letters"], ["dead-letters", "retry", "--all"], ["config", "show"],
        ["label", "task", "accept"], ["labels"], ["labels", "import", "labels.jsonl"], ["deploy", "base"],
        ["rollback"], ["forget", "--user", "u"], ["export", "tasks"], ["rollouts", "r0001"], ["workflow", "check"],
        ["rubric", "calibrate", str(ROOT / "rubrics" / "math-boxed.yaml"), "--labels", "labels.jsonl"],
        ["rubric", "suggest", "--labels", "labels.jsonl"], ["doctor"],
    ],
)  # fmt: skip
def test_on_the_defaults_no_command_makes_a_state(flywheel: Run, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "labels.jsonl").write_text(json.dumps({"query": "1 + 1", "answer": "2", "label": "accept"}) + "\n")
    flywheel("--set", "judge.base_url=http://127.0.0.1:9/v1", "--set", "judge.model=m", *command)
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
def test_a_configuration_or_sources_by_option_or_a_state_are_enough(flywheel: Run, home: Path) -> None:
    sources = ("--set", f"sources=[{{path: {home}/AgentScope-Studio/database.sqlite}}]")
    assert flywheel("ingest", *sources).code == 0
    for command in (["status"], ["tasks"], ["audit"], ["prune", "--dry-run"], ["backup", "../kept"]):
        assert "there is no configuration" not in flywheel(*command).err, "there is a state"
    for command in (["run"], ["round"], ["ingest"], ["filter"]):
        assert flywheel(*command).code == EXIT_CONFIG, "a state does not say what to read"
    assert "FLYWHEEL_CONFIG" not in flywheel("init", ".").out, "commands find it in the current directory"
    for command in (["ingest"], ["filter", "--estimate"], ["status"]):
        assert "there is no configuration" not in flywheel(*command).err


def test_a_named_database_is_read_without_a_configuration(flywheel: Run, home: Path) -> None:
    source = home / "AgentScope-Studio" / "database.sqlite"
    assert "no state at" in flywheel("audit", "--deep", "--source", source).out
    assert not (home / "home").exists()
    assert flywheel("ingest", "--source", source).code == 0
    assert flywheel("audit", "--deep", "--source", source).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [["status"], ["audit"], ["audit", "--deep"], ["tasks"], ["dead-letters"]])
def test_a_state_that_is_not_there_is_not_right(flywheel: Run, tmp_path: Path, command: list[str]) -> None:
    config = tmp_path / "elsewhere.yaml"
    config.write_text("state: {dir: elsewhere}\nsources: []\n")
    ran = flywheel(*command, "-c", config)
    assert ran.code == 0
    assert f"no state at {tmp_path}/elsewhere/state.db" in " ".join((ran.out + ran.err).split())
    assert "balanced" not in ran.out
    assert "right" not in ran.out
    told = flywheel(*command, "--json", "-c", config).json
    if command[0] in ("status", "audit"):
        assert told["balanced"]
        assert "no state at" in told["no_state"]
    assert not (tmp_path / "elsewhere").exists()
    flywheel("ingest", "-c", config)
    ran = flywheel(*command, "-c", config)
    assert "no state at" not in ran.out + ran.err
    if command[0] in ("status", "audit"):
        assert flywheel(*command, "--json", "-c", config).json["no_state"] == ""


def test_a_state_without_a_byte_is_none(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.db").touch()
    config = tmp_path / "elsewhere.yaml"
    config.write_text("state: {dir: state}\nsources: []\n")
    for command in ("status", "audit"):
        assert "no state at" in flywheel(command, "-c", config).out
    assert flywheel("ingest", "-c", config).code == 0
    assert "no state at" not in flywheel("status", "-c", config).out


@pytest.mark.parametrize("command", [["why", "r0001"], ["round", "--debug", "-c", "other.yaml"]])
def test_a_question_to_a_state_that_is_not_there(flywheel: Run, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "other.yaml").write_text("sources: []\njudge: {base_url: 'http://127.0.0.1:9/v1', model: m}\n")
    ran = flywheel(*command)
    assert ran.code == 1
    assert "no state at" in ran.err


@pytest.mark.slow
def test_help_tells_whole_sentences_in_the_order_of_use(flywheel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = [sys.executable, "-m", "flywheel", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.findall(r"^(\w+) commands:$", shown, re.MULTILINE) == ["Daily", "Data", "Training", "Serving", "State"]
    told = shown.split("Daily commands:")[1]
    assert "..." not in told
    commands = re.findall(r"^  ([a-z-]+)  ", told, re.MULTILINE)
    assert commands[:5] == ["init", "demo", "doctor", "run", "status"]
    assert all(len(line) <= 80 for line in told.splitlines())
    for group in ("tasks", "rubric"):
        assert "..." not in flywheel(group, "--help").out.split("Commands:")[1]


def test_docs_lists_the_pages_and_shows_one(flywheel: Run) -> None:
    pages = {line.split("  ")[0] for line in flywheel("docs").out.splitlines()}
    assert {"judge-100-replies", "configuration", "rubrics-and-filters", "json-output", "foreign-keys"} <= pages
    assert flywheel("docs", "cli").out == (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert json.loads(flywheel("docs", "json-output").out)["$defs"].keys() > {"status", "why"}
    ran = flywheel("docs", "nothing")
    assert ran.code == 2
    assert "rubrics-and-filters" in ran.err


@pytest.mark.slow
def test_a_page_in_a_terminal_is_plain_text_in_the_pager(tmp_path: Path) -> None:
    shown = in_terminal(tmp_path, ["docs", "index"], columns=100, home=tmp_path, variables={"PAGER": "cat"}).coloured
    assert "Flywheel" in shown
    for sequence in ("\x1b[", "\x1b]8", "images/", "🌆"):
        assert sequence not in shown


def test_init_lays_every_chain_out(flywheel: Run, tmp_path: Path) -> None:
    assert flywheel("init", ".").code == 0
    chains = {path.name for path in (tmp_path / "filters").glob("*.yaml")}
    assert chains == {"agentjet.yaml", "default.yaml", "open-to-strangers.yaml", "private.yaml"}
    assert "chain: filters/default.yaml" in (tmp_path / "flywheel.yaml").read_text()
