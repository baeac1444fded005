"""The package: light to import, whole as a wheel, and with all that users edit inside."""

from __future__ import annotations

import configparser
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from urllib.request import urlopen

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from flywheel.errors import EXIT_CONFIG, EXIT_USAGE
from flywheel.system import files
from tests import base_dependencies

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "hatch_build.py"
MOST_WHEEL_BYTES = 2_350_000
"""Half a megabyte above the wheel without the recorded round of `flywheel demo`."""
HEAVY = ("sentence_transformers", "torch", "transformers", "trl", "peft", "vllm", "ray")


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


@pytest.mark.slow
def test_the_pages_load_no_client_and_no_orm() -> None:
    code = (
        "import sys, asyncio, pathlib\n"
        "import flywheel.daemon.status\n"
        "from flywheel.web import server\n"
        "from flywheel.store.kernel.database import read_once\n"
        "print(asyncio.run(read_once(pathlib.Path('/nonexistent'), lambda conn: conn.dialect.driver)))\n"
        "print([name for name in ('httpx2', 'openai', 'numpy', 'sqlalchemy.orm') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


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
    assert {"flywheel/py.typed", "flywheel/judge/rubric/language_names.json"} <= inside
    assert not [name for name in inside if name.startswith(("tests/", "demo/", "benchmarks/"))]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    return built_in(ROOT, folder)


def built_in(tree: Path, folder: Path) -> tuple[Path, Path]:
    [wheel] = WheelBuilder(str(tree)).build(directory=str(folder), versions=["standard"])
    [sdist] = SdistBuilder(str(tree)).build(directory=str(folder), versions=["standard"])
    return Path(wheel), Path(sdist)


@pytest.mark.slow
def test_the_wheel_has_every_data_file_of_the_package(built: tuple[Path, Path]) -> None:
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "flywheel").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    kinds = {Path(name).suffix for name in data}
    assert {".html", ".css", ".js", ".svg", ".LICENSE", ".xz", ".json"} <= kinds
    with zipfile.ZipFile(built[0]) as archive:
        assert data <= set(archive.namelist())
    assert built[0].stat().st_size <= MOST_WHEEL_BYTES


@pytest.mark.extended
@pytest.mark.slow
def test_the_sdist_builds_the_same_files_again(built: tuple[Path, Path], tmp_path: Path) -> None:
    """At another place, with other times: neither is in the archives."""
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [tree] = tmp_path.iterdir()
    (tree / "PKG-INFO").unlink()  # written by the build, which would pack it twice
    for path in tree.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    again = built_in(tree, tmp_path / "dist")
    assert [path.name for path in again] == [wheel.name, sdist.name]
    assert again[0].read_bytes() == wheel.read_bytes()
    assert again[1].read_bytes() == sdist.read_bytes()


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment that has the wheel and its base dependencies, and nothing else."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "venv", symlinks=True)
    commands, wheel = home / "venv" / "bin", built[0]
    pip = [sys.executable, "-m", "pip", "--python", commands / "python", "--isolated", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], timeout=300, check=True)
    [site_packages] = (home / "venv" / "lib").glob("python*/site-packages")
    base = base_dependencies.closure(base_dependencies.requirements_of(wheel))
    assert len(base) >= 30 and not base.keys() & {*HEAVY, "accelerate", "playwright", "hatchling", "pytest"}
    base_dependencies.link(base, home / "base")
    (site_packages / "base.pth").write_text(f"{home / 'base'}\n")
    return commands


def environment_of(folder: Path) -> dict[str, str]:
    """That of a user who has nothing but the commands, at work in this folder."""
    return {"HOME": str(folder), "TMPDIR": str(folder), "PATH": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.slow
def test_the_base_install_shows_the_demo(installed: Path, tmp_path: Path) -> None:
    def run(*words: str | Path) -> str:
        asked = [installed / words[0], *words[1:]]
        done = subprocess.run(
            asked,
            cwd=tmp_path,
            env=environment_of(tmp_path),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("python", "-c", "import flywheel, numpy; print(flywheel.__file__, numpy.__file__)")
    assert all(str(installed.parent.parent) in path for path in where.split())
    missing = f"from importlib.util import find_spec; print([name for name in {HEAVY!r} if find_spec(name)])"
    assert run("python", "-c", missing) == "[]\n"
    shown = run("flywheel", "demo", "--no-browser")
    assert "accepted" in shown and "demo-agent@r0001" in shown
    assert "flywheel demo" in run("flywheel", "docs", "cli")


@pytest.mark.slow
def test_the_base_install_shows_the_pages(installed: Path, tmp_path: Path) -> None:
    asked = [installed / "flywheel", "demo"]
    environment = {**environment_of(tmp_path), "BROWSER": "/bin/true", "PYTHONUNBUFFERED": "1"}
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            asked, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout is not None
            found = None
            for line in process.stdout:
                if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                    break
            assert found is not None, (tmp_path / "log").read_text()
            for page, word in (
                ("", "Overview"),
                ("tasks", "rejected"),
                ("static/page.css", "{"),
            ):
                with urlopen(found[0] + page, timeout=60) as response:
                    assert word in response.read().decode(), page
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_the_base_install_can_import_everything_but_training(installed: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, pkgutil, flywheel\n"
        "skipped = ('flywheel.training', 'flywheel.__main__')\n"
        "for found in pkgutil.walk_packages(flywheel.__path__, 'flywheel.', onerror=lambda name: None):\n"
        "    if found.name.startswith(skipped): continue\n"
        "    try: importlib.import_module(found.name)\n"
        "    except ImportError as error: print(found.name, error)\n"
    )
    done = subprocess.run(
        [installed / "python", "-c", code],
        cwd=tmp_path,
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == ""


def test_the_pages_that_texts_refer_to_exist_and_their_links_lead_somewhere() -> None:
    """`flywheel docs PAGE` works for an installed package, where nobody has the checkout's docs/ at hand."""
    edited = [path for folder in files.SHIPPED_FOLDERS for path in (ROOT / folder).iterdir() if path.is_file()]
    sources = [*(ROOT / "flywheel").rglob("*.py"), *edited]
    texts = {path: path.read_text() for path in sources}
    assert not [path for path, text in texts.items() if re.search(r"\bdocs/[a-z/-]+\.md", text)]
    named = {page for text in texts.values() for page in re.findall(r"flywheel docs ([a-z/-]+)", text)}
    assert named and named <= files.documentation_pages().keys()
    for path in files.documentation_pages().values():
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            there = (path.parent / link).resolve()
            assert there.exists(), f"{path.name}: {link}"
            assert there.parts[len(ROOT.parts)] in (*files.SHIPPED_FOLDERS, "docs"), (
                f"{path.name}: {link} is not shipped"
            )


UNITS = sorted(path.name for path in (ROOT / "systemd").glob("*.service"))


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
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, unit: str) -> None:
    text = (ROOT / "systemd" / unit).read_text()
    (tmp_path / unit).write_text(text.replace("/opt/flywheel/.venv/bin/flywheel", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / unit], capture_output=True, text=True, timeout=120, check=False
    )
    assert unit not in done.stdout + done.stderr
    assert "Unknown" not in done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("unit", ["flywheel.service", "flywheel@.service"])
def test_systemd_finds_nothing_wrong_with_the_drop_in(tmp_path: Path, unit: str) -> None:
    (tmp_path / f"{unit}.d").mkdir()
    shutil.copy(ROOT / "systemd" / "detach.conf", tmp_path / f"{unit}.d")
    test_systemd_finds_nothing_wrong_with_the_units(tmp_path, unit)
    # It is read: what it misspelt would be named.
    with (tmp_path / f"{unit}.d" / "detach.conf").open("a") as drop_in:
        drop_in.write("KilMode=process\n")
    with pytest.raises(AssertionError):
        test_systemd_finds_nothing_wrong_with_the_units(tmp_path, unit)


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


@pytest.mark.slow
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


def test_a_python_that_is_too_old_learns_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = runpy.run_path(str(BUILD))["PythonVersion"](str(ROOT), {})
    hook.update({})
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer, and this is 3\.10"):
        hook.update({})
