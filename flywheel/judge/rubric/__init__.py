"""Rubrics: what a good reply is, as weighted criteria, and how their choices become a score."""

from __future__ import annotations

from flywheel.judge.rubric.criterion import Criterion as Criterion
from flywheel.judge.rubric.criterion import LlmRubric as LlmRubric
from flywheel.judge.rubric.rubric import ALIEN as ALIEN
from flywheel.judge.rubric.rubric import CRITERION as CRITERION
from flywheel.judge.rubric.rubric import FLAT_ID as FLAT_ID
from flywheel.judge.rubric.rubric import KINDS as KINDS
from flywheel.judge.rubric.rubric import MODEL_TYPE as MODEL_TYPE
from flywheel.judge.rubric.rubric import Rubric as Rubric
