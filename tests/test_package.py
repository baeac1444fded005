"""The package: light to import, whole as a wheel, and with all that users edit inside."""

from __future__ import annotations

import configparser
import itertools
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from flywheel import files
from flywheel.errors import EXIT_CONFIG, EXIT_USAGE

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "trl", "peft", "vllm", "ray")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["run", "--once"], ["status", "--json"]])
def test_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['flywheel', *{arguments!r}]\n"
        "from flywheel.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    config = tmp_path / "flywheel.yaml"
    config.write_text("sources: []\nstate: {dir: state}\njudge: {base_url: 'http://127.0.0.1:9/v1', model: j}\n")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_the_wheel_carries_what_users_edit(tmp_path: Path) -> None:
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    shipped = {
        f"flywheel/shipped/{folder}/{path.name}"
        for folder in (*files.SHIPPED_FOLDERS, "docs/operate")
        for path in (ROOT / folder).iterdir()
        if path.is_file()
    }
    assert len(shipped) >= 8
    assert shipped <= inside
    pages = {f"flywheel/shipped/{path.relative_to(ROOT)}" for path in files.documentation_pages().values()}
    assert len(pages) >= 12
    assert pages <= inside
    assert not [name for name in inside if "/docs/images/" in name]
    assert {"flywheel/py.typed", "flywheel/rubric/language_names.json"} <= inside
    assert not [name for name in inside if name.startswith(("tests/", "demo/", "benchmarks/"))]


def test_the_pages_that_texts_refer_to_exist_and_their_links_lead_somewhere() -> None:
    """`flywheel docs PAGE` works for an installed package, where nobody has the checkout's docs/ at hand."""
    edited = [path for folder in files.SHIPPED_FOLDERS for path in (ROOT / folder).iterdir() if path.is_file()]
    sources = [*(ROOT / "flywheel").rglob("*.py"), *edited]
    texts = {path: path.read_text() for path in sources}
    assert not [path for path, text in texts.items() if re.search(r"\bdocs/[a-z/-]+\.md", text)]
    named = {page for text in texts.values() for page in re.findall(r"flywheel docs ([a-z-]+)", text)}
    assert named and named <= files.documentation_pages().keys()
    for path in files.documentation_pages().values():
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            there = (path.parent / link).resolve()
            assert there.exists(), f"{path.name}: {link}"
            assert there.parts[len(ROOT.parts)] in (*files.SHIPPED_FOLDERS, "docs"), (
                f"{path.name}: {link} is not shipped"
            )


def service_of(unit: str) -> configparser.SectionProxy:
    parsed = configparser.RawConfigParser(strict=False)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(ROOT / "systemd" / unit)
    return parsed["Service"]


@pytest.mark.parametrize("name", ["flywheel", "flywheel-serve"])
def test_a_template_is_the_unit_with_places_of_its_own(name: str) -> None:
    plain, template = (
        (ROOT / "systemd" / unit).read_text().partition("[Service]")[2]
        for unit in (f"{name}.service", f"{name}@.service")
    )
    assert template != plain
    assert template.replace("/%i", "") == plain


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("unit", [path.name for path in sorted((ROOT / "systemd").iterdir())])
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, unit: str) -> None:
    text = (ROOT / "systemd" / unit).read_text()
    (tmp_path / unit).write_text(text.replace("/opt/flywheel/.venv/bin/flywheel", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / unit], capture_output=True, text=True, timeout=120, check=False
    )
    assert unit not in done.stdout + done.stderr
    assert "Unknown" not in done.stdout + done.stderr


UNITS = sorted(path.name for path in (ROOT / "systemd").iterdir())
MOST_EXPOSURE = 20
"""Tenths of what `systemd-analyze security` calls the exposure."""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_the_units_are_closed_but_for_what_is_explained(unit: str) -> None:
    asked = ["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSURE}", "--json=short"]
    done = subprocess.run([*asked, ROOT / "systemd" / unit], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (ROOT / "systemd" / unit).read_text().splitlines()
    for found in json.loads(done.stdout):
        if found["exposure"] in (None, "0.0"):
            continue
        setting, _, part = found["name"].partition("=")
        word = part.replace("(", "|").strip("~)").split("|")[-1] if part.startswith("~") else setting.split("/")[0]
        assert _is_explained(lines, word), f"{found['name']} is open without a reason"


def _is_explained(lines: list[str], word: str) -> bool:
    """Whether a comment names the word, or stands above the setting of that name."""
    return any(
        word in line if line.startswith("#") else line.startswith(f"{word}=") and before.startswith("#")
        for before, line in itertools.pairwise(lines)
    )


@pytest.mark.parametrize("unit", UNITS)
def test_what_a_unit_writes_is_for_its_user_alone(unit: str) -> None:
    service = service_of(unit)
    assert (service["UMask"], service["StateDirectoryMode"]) == ("0077", "0700")


def test_a_workers_end_is_not_the_daemons_end() -> None:
    """By default systemd stops a service of which any process was killed for want of memory: its round would be
    started again and again, without an attempt."""
    assert service_of("flywheel.service")["OOMPolicy"] == "continue"


@pytest.mark.parametrize("unit", ["flywheel.service", "flywheel-serve.service"])
def test_the_units_start_commands_that_exist_and_know_the_exit_codes(unit: str) -> None:
    service = service_of(unit)
    words = service["ExecStart"].split()
    assert Path(words[0]).name == "flywheel"
    done = subprocess.run(
        [sys.executable, "-m", "flywheel", words[1], "--help"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "--config" in done.stdout
    assert service["Type"] == {"run": "notify", "serve": "exec"}[words[1]]
    assert {str(EXIT_USAGE), str(EXIT_CONFIG)} <= set(service["RestartPreventExitStatus"].split())
