"""Flywheel: a closed loop for LLM agents: traces in, judged samples, LoRA adapters that are proven better out."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flywheel.conversations import conversation as conversation
    from flywheel.conversations import conversation_header as conversation_header
    from flywheel.tuner import tune as tune


def __getattr__(name: str) -> Any:
    # Imported only when it is used: most of the program needs no training.
    if name == "tune":
        from flywheel.tuner import tune

        return tune
    if name in ("conversation", "conversation_header"):
        from flywheel import conversations

        return getattr(conversations, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
