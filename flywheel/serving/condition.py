"""The conditions that an inference server can be in, as it is found."""

from __future__ import annotations

from enum import StrEnum


class Condition(StrEnum):
    OK = "ok"
    UNREACHABLE = "unreachable"
    """it does not answer, not in time, or its engine is dead"""
    MISCONFIGURED = "misconfigured"
    """it answers, and no adapter could be served by it: another key, no middleware, no LoRA, another program"""
    WRONG_ADAPTER = "wrong adapter"
    """it answers with another adapter than the deployed one, and cannot be brought to it"""
    WRONG_WEIGHTS = "wrong weights"
    """its adapter gives other log-probabilities than the round measured"""
    FAILING = "failing"
    """something else; the message says what"""
