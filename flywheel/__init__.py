"""Flywheel: a closed loop for LLM agents: traces in, judged samples, LoRA adapters that are proven better out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flywheel.conversations import conversation as conversation
    from flywheel.conversations import conversation_header as conversation_header
    from flywheel.notebook.judging import ajudge_replies as ajudge_replies
    from flywheel.notebook.judging import judge_replies as judge_replies
    from flywheel.notebook.state import open_state as open_state
    from flywheel.retrieval.tool_index import ToolIndex as ToolIndex
    from flywheel.tuner import dpo as dpo
    from flywheel.tuner import grpo as grpo
    from flywheel.tuner import sft as sft
    from flywheel.tuner import tune as tune

_PLACES = {
    "ToolIndex": "flywheel.retrieval.tool_index",
    "ajudge_replies": "flywheel.notebook.judging",
    "conversation": "flywheel.conversations",
    "conversation_header": "flywheel.conversations",
    "dpo": "flywheel.tuner",
    "grpo": "flywheel.tuner",
    "judge_replies": "flywheel.notebook.judging",
    "open_state": "flywheel.notebook.state",
    "sft": "flywheel.tuner",
    "tune": "flywheel.tuner",
}


def __getattr__(name: str) -> Any:
    # Imported only when it is used: most of the program needs none of them.
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
