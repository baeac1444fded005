"""Rubrics: what a good reply is, as weighted criteria, and how their choices become a score."""

from __future__ import annotations

from flywheel.rubric.criterion import KINDS as KINDS
from flywheel.rubric.criterion import MODEL_TYPE as MODEL_TYPE
from flywheel.rubric.criterion import Criterion as Criterion
from flywheel.rubric.criterion import CriterionType as CriterionType
from flywheel.rubric.criterion import Kind as Kind
from flywheel.rubric.rubric import ALIEN as ALIEN
from flywheel.rubric.rubric import FLAT_CHOICES as FLAT_CHOICES
from flywheel.rubric.rubric import FLAT_ID as FLAT_ID
from flywheel.rubric.rubric import Escalation as Escalation
from flywheel.rubric.rubric import Example as Example
from flywheel.rubric.rubric import Rubric as Rubric
from flywheel.rubric.rubric import RubricJudge as RubricJudge
from flywheel.rubric.rubric import UsedFile as UsedFile
from flywheel.rubric.schema import json_schema as json_schema
