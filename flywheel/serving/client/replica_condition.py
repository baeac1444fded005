"""The conditions of an inference server."""

from __future__ import annotations

from enum import StrEnum


class Condition(StrEnum):
    OK = "ok"
    UNREACHABLE = "unreachable"
    """it does not answer in time, or its engine is dead"""
    MISCONFIGURED = "misconfigured"
    """it answers but cannot serve adapters: another key, no middleware, no LoRA, another program"""
    WRONG_ADAPTER = "wrong adapter"
    """it answers with another adapter or with 503, and the deployed one cannot be restored"""
    WRONG_WEIGHTS = "wrong weights"
    """its adapter's log-probabilities differ from those of the round"""
    FAILING = "failing"
    """another error; see the message"""
