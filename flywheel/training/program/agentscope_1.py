"""An environment with AgentScope 1.x for users' workflows: vLLM needs another version of `mcp` than it does.

Nothing of the workflow runs: its imports are read, and looked up in the environment without importing them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flywheel.errors import ConfigError, ExportError
from flywheel.system.process_folder import ProcessFolder
from flywheel.system.python_files import code_files, outside_imports, parsed
from flywheel.training.data.round_directory import code_of

PACKAGES: Final = ("agentscope==1.0.21", "mcp<2", "sqlalchemy[asyncio]", "tqdm")
"""AgentScope 1.0.21 imports the last two and does not name them."""
PROVIDED: Final = frozenset({"flywheel", "trinity", "ajet", "astuner"})
"""What the processes of rollouts can import in any environment."""
STDERR: Final = 2
_MISSING: Final = """\
import importlib.util, sys
print(*(name for name in sys.argv[1:] if name not in sys.modules and importlib.util.find_spec(name) is None))
"""


def make(
    rollout: Mapping[str, Any], folder: Path, requirements: Sequence[Path]
) -> tuple[Path, dict[str, list[Path]]]:
    """Make an environment in `folder` for the workflow of the settings `rollout`, with the packages that the files of
    pip's `requirements` name. Returns its interpreter, and the modules that it lacks, as `imports_of`. Raises
    ConfigError and ExportError."""
    if not isinstance(rollout["agent"], Mapping) or rollout["agent"].get("workflow") is None:
        why = "rollout.agent names no workflow"
        raise ConfigError("make an environment", why, "Name one there, or as FILE.py:function on the command line.")
    imports = imports_of(rollout)
    python = _made(folder, requirements)
    command = [str(python), "-I", "-c", _MISSING, *sorted(imports)]
    lacking = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return python, {module: imports[module] for module in lacking}


def imports_of(rollout: Mapping[str, Any]) -> dict[str, list[Path]]:
    """The modules that the workflow and the other functions of the settings `rollout` import from outside of their
    folders, each with the files that do; and the packages of functions that are not there, with none. Raises
    ConfigError where a file cannot be read."""
    files, agent = code_of(rollout), rollout["agent"]
    folder = Path(agent["folder"])
    if (workflow := parsed(agent["workflow"])) is not None and workflow.is_in_file:
        files.add(Path(workflow.where))
    found: dict[str, list[Path]] = {}
    for file in sorted(files):
        try:
            modules = outside_imports(file, folder)
        except (OSError, SyntaxError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ConfigError(f"read the imports of {file}", why, "Correct it: no round could load it.") from error
        for module in modules:
            found.setdefault(module, []).append(file)
    for function in filter(None, (agent["workflow"], rollout.get("reward_function"), rollout.get("setup"))):
        named = parsed(function)
        if named is not None and not named.is_in_file and not code_files([function], (), folder):
            found.setdefault(named.where.partition(".")[0], [])
    return {module: own for module, own in found.items() if module not in PROVIDED}


def _made(folder: Path, requirements: Sequence[Path]) -> Path:
    """The interpreter of a new environment, whose folder appears when it is complete. Raises ExportError."""
    attempted = f"make the environment {folder}"
    if os.path.lexists(folder):
        raise ExportError(attempted, "it exists already", "Remove it, or name another folder with --output.")
    given = [*PACKAGES, *(f"--requirement={file}" for file in requirements)]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with ProcessFolder(folder.parent) as parent:
            made = parent / folder.name
            hint = "On Debian and Ubuntu, the package python3-venv has what Python needs for it."
            _run([sys.executable, "-I", "-m", "venv", str(made)], attempted, hint)
            hint = f"Check pip's index, and that --requirement leaves room for {', '.join(PACKAGES)}."
            pip = [str(made / "bin" / "python"), "-I", "-m", "pip", "--disable-pip-version-check"]
            _run([*pip, "install", *given], attempted, hint)
            # Scripts begin with the path of their interpreter.
            for file in (made / "pyvenv.cfg", *(made / "bin").iterdir()):
                if file.is_file() and not file.is_symlink() and os.fsencode(made) in (content := file.read_bytes()):
                    file.write_bytes(content.replace(os.fsencode(made), os.fsencode(folder)))
            made.rename(folder)
    except OSError as error:
        raise ExportError(attempted, error.strerror or str(error), "Name a folder of yours with --output.") from error
    return folder / "bin" / "python"


def _run(command: Sequence[str], attempted: str, hint: str) -> None:
    """Run a command, which prints on stderr. Raises ExportError with the errors of one that fails."""
    done = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        # The last line of pip is often only where to read more.
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")] or lines[-1:]
        raise ExportError(attempted, "; ".join(errors), hint)
