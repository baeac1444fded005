"""The rubric: what a good reply is, as weighted criteria, and how their choices become a score. No I/O."""

from __future__ import annotations

from flywheel.rubric.criterion import KINDS, MODEL_TYPE, Criterion, CriterionType, Kind
from flywheel.rubric.rubric import (
    ALIEN,
    FIT_FOR_ROLLOUTS,
    FLAT_CHOICES,
    FLAT_ID,
    Escalation,
    Example,
    Rubric,
    RubricJudge,
    UsedFile,
)
from flywheel.rubric.schema import json_schema

__all__ = [
    "ALIEN",
    "FIT_FOR_ROLLOUTS",
    "FLAT_CHOICES",
    "FLAT_ID",
    "KINDS",
    "MODEL_TYPE",
    "Criterion",
    "CriterionType",
    "Escalation",
    "Example",
    "Kind",
    "Rubric",
    "RubricJudge",
    "UsedFile",
    "json_schema",
]
