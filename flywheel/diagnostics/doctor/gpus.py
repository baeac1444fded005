"""GPUs, as the driver tells of them and as this environment lets programs see them. Nothing is loaded on one.

nvidia-smi has words where it has no number: `[N/A]` for a GPU that shares the system's memory, `[Insufficient
Permissions]` in a container that has a part of one (MIG), `[GPU is lost]` and the like for one in trouble. Of parts
only its list (`-L`) tells.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

ASK_SECONDS: Final = 20.0
"""Longest wait for the driver."""
IMPORT_SECONDS: Final = 120.0
"""Longest wait for a process that imports torch."""
_TORCH: Final = (
    "import torch\nfor n in range(torch.cuda.device_count()):\n"
    " p = torch.cuda.get_device_properties(n)\n print(p.name, p.total_memory, sep='\\t')"
)
_FIELDS: Final = ("index", "uuid", "mig.mode.current", "name", "memory.total")
_QUERY: Final = (f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_CARD: Final = re.compile(r"GPU (\d+):")
_PART: Final = re.compile(r"\s+MIG\s+(\S+)\s+Device\s+\d+:\s+\(UUID:\s+([^)\s]+)\)")
_PART_SIZE: Final = re.compile(r"\.(\d+)gb")
_NO_SIZE: Final = re.compile(r"\[?(N/A|Not Supported|Insufficient Permissions)\]?")
_MIB: Final = 1 << 20
_PART_SHARE: Final = 0.95
"""Of the gigabytes in a part's name, the least that it has: 4,864 MiB of 1g.5gb, 9,728 of 1g.10gb."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU or part of one. `memory` in bytes; None where the driver tells of none: it shares the system's."""

    name: str
    memory: int | None
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """Those that programs see, of `all_told`. `asked` is who told, empty where nobody could; `trouble` what was said
    of others, or instead."""

    seen: tuple[Gpu, ...] = ()
    all_told: int = 0
    asked: str = ""
    trouble: str = ""

    @classmethod
    def here(cls, *, has_gpu_build: bool) -> Gpus:
        """Those of this machine. Where the driver tells of none, and with `has_gpu_build`, a process of its own asks
        torch: ROCm, or a container without nvidia-smi."""
        told = _by_driver() if shutil.which("nvidia-smi") else cls()
        return _by_torch(told) if has_gpu_build and not told.all_told else told


def remedy_of(trouble: str) -> str:
    """What to do about what the driver said."""
    for words, remedy in _REMEDIES.items():
        if words.lower() in trouble.lower():
            return remedy
    return "See what nvidia-smi and the kernel's log (dmesg) say."


_REMEDIES: Final = {
    "version mismatch": "Restart the machine: its driver was updated, and the kernel still has the old one.",
    "communicate with the NVIDIA driver": "Install or load the driver (modprobe nvidia); a new kernel needs it anew.",
    "Insufficient Permissions": "Let this user open /dev/nvidia*, often by the group video.",
    "No devices were found": "Give the container a GPU, or see what the kernel's log says of it.",
    "CUDA_VISIBLE_DEVICES": "Correct that variable, or unset it.",
    "Unknown Error": "In a container: start it anew, it has lost its devices. Else see the kernel's log (dmesg).",
    "is lost": "Restart the machine.",
    "MIG is enabled": "Divide it (nvidia-smi mig -cgi … -C), or disable MIG (nvidia-smi -mig 0).",
    "requires reset": "Reset that GPU, or restart the machine.",
}
"""The first whose words were said."""


def _by_driver() -> Gpus:
    lines, trouble = _said(["nvidia-smi", *_QUERY], ASK_SECONDS)
    if lines is None:
        return Gpus(trouble=f"nvidia-smi: {trouble}")
    parts = _parts()
    cards: dict[str, Gpu] = {}
    troubles = []
    for line in lines:
        fields = [text.strip() for text in line.split(",")]
        if not fields[0].isdecimal() or len(fields) < len(_FIELDS):
            continue  # a warning of the driver
        index, uuid, mig, *name, memory = fields
        gpu = Gpu(", ".join(name), None, uuid)
        if mig == "Enabled" and index not in parts:
            troubles.append(f"GPU {index}, {gpu.name}: MIG is enabled, and it has no parts")
        elif memory.isdecimal():
            cards[index] = replace(gpu, memory=int(memory) * _MIB)
        elif _NO_SIZE.fullmatch(memory):
            cards[index] = gpu
        else:
            troubles.append(f"GPU {index}, {gpu.name}: {memory.strip('[]')}")
    trouble = "; ".join(troubles)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = tuple(_visible(cards, parts, chosen))
    if chosen is not None and cards and not seen:
        trouble = f"CUDA_VISIBLE_DEVICES={chosen} lets programs see none of {len(cards)}"
    return Gpus(seen, len(cards), "nvidia-smi", trouble)


def _parts() -> dict[str, list[Gpu]]:
    """The parts of each GPU that is divided, by its index."""
    lines, _ = _said(["nvidia-smi", "-L"], ASK_SECONDS)
    found: dict[str, list[Gpu]] = {}
    index = ""
    for line in lines or ():
        if card := _CARD.match(line):
            index = card[1]
        elif part := _PART.match(line):
            size = _PART_SIZE.search(part[1])
            memory = int(int(size[1]) * _PART_SHARE * (1 << 30)) if size else None
            found.setdefault(index, []).append(Gpu(f"MIG {part[1]}", memory, part[2]))
    return found


def _visible(cards: dict[str, Gpu], parts: dict[str, list[Gpu]], chosen: str | None) -> Iterator[Gpu]:
    """As CUDA has it: whole GPUs, else one part; of a list, all before the first that there is not."""
    whole = {index: gpu for index, gpu in cards.items() if index not in parts}
    if chosen is None:
        yield from whole.values() or list(_every(parts.values()))[:1]
        return
    for name in (text.strip() for text in chosen.split(",")):
        by_number = [whole[name]] if name in whole else parts.get(name, [])[:1]
        by_uuid = [gpu for gpu in (*cards.values(), *_every(parts.values())) if name and gpu.uuid.startswith(name)]
        found = by_number or by_uuid[:1]
        if not found:
            return
        yield found[0]


def _every(parts: Iterable[list[Gpu]]) -> Iterator[Gpu]:
    return (gpu for each in parts for gpu in each)


def _by_torch(driver: Gpus) -> Gpus:
    lines, _ = _said([sys.executable, "-c", _TORCH], IMPORT_SECONDS)
    fields = [line.split("\t") for line in lines or ()]
    seen = tuple(Gpu(each[0], int(each[1])) for each in fields if len(each) == 2 and each[1].isdecimal())
    return Gpus(seen, len(seen), "torch") if seen else driver


def _said(command: Sequence[str], seconds: float) -> tuple[list[str] | None, str]:
    """The lines that a program prints, or None and what it says where it fails."""
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {seconds:g} s"
    except (OSError, ValueError) as error:
        return None, str(error)
    if done.returncode != 0:
        # It says what is wrong on either.
        said = " ".join((done.stdout + " " + done.stderr).split())
        return None, said[:300] or f"it ended with {done.returncode}"
    return [line for line in done.stdout.splitlines() if line.strip()], ""
