"""Flywheel: traces of AgentScope agents in, proven LoRA adapters out."""

__version__ = "0.1.0"
