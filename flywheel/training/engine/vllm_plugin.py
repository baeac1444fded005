"""Flywheel's plugin for vLLM (`vllm.general_plugins`): LoRA on a CPU for each adapter instead of each token.

vLLM calls `register` in each of its processes in this environment, also in those of other programs. It changes
nothing unless the program that started the process asks for it: `flywheel serve`, and the rollout engine.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any, Final

from flywheel.serving.environment_variables import CPU_LORA_VARIABLE

log = logging.getLogger(__name__)

TESTED_VERSION: Final = "0.32.0"
"""The release of vLLM whose methods are replaced; the requirements pin it."""


def register() -> None:
    """Let the LoRA layers of this process take their arithmetic from `lora_by_adapter`."""
    if not os.environ.get(CPU_LORA_VARIABLE):
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        name = f"{lora_by_adapter.__module__}.{lora_by_adapter.__qualname__}"
        type(current_platform).get_punica_wrapper = classmethod(lambda _: name)


def lora_by_adapter(*args: Any, **more: Any) -> Any:
    """What computes the LoRA part of vLLM's layers. vLLM calls this, with the arguments of its own class, where it
    has loaded a model."""
    return _wrapper()(*args, **more)


@functools.cache
def _wrapper() -> Any:
    """Our class if it gives the same numbers as vLLM's own, else vLLM's, which is logged."""
    import vllm
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    version = vllm.__version__.partition("+")[0]
    why = f"this is vLLM {version}, and it was tested with {TESTED_VERSION}" if version != TESTED_VERSION else ""
    if not why:
        try:
            from flywheel.training.engine import cpu_lora

            if cpu_lora.agrees(cpu_lora.LoraByAdapter):
                return cpu_lora.LoraByAdapter
            why = "its numbers are not vLLM's"
        except Exception as error:  # whatever a changed vLLM raises: this only makes it faster
            why = f"its test failed ({type(error).__name__}: {error})"
    log.warning("LoRA is computed by vLLM's own method, which is slower: %s", why)
    return PunicaWrapperCPU
