"""Scene 1: a support desk, whose agent answers customers' messages with JSON of five fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from demo.checks import Result
from demo.support_desk.fields import result
from demo.support_desk.messages import DESK, DEVELOPMENT, HELD_OUT, SYSTEM_PROMPT, TEACHER
from demo.support_desk.models import WRONG_REPLIES, WRONG_VERDICTS, Models
from demo.two_turns import TwoTurns

AGENT: Final = "desk"
MAX_TOKENS: Final = 64
TEACHER_MESSAGES: Final = 72
DESK_MESSAGES: Final = 120
HELD_OUT_MESSAGES: Final = 96
IMPROVE_THRESHOLD: Final = 0.4
"""What a reply of the small model must be worth for GRPO to ask its message again: most of them."""


class SupportDesk(TwoTurns):
    """It learns to read customers' messages. The large model is wrong in a stated share of its replies, and the judge
    in one of its findings."""

    about = (
        "learns to read customers' messages. The large model whose replies are recorded, and the judge, are scripts: "
        f"{WRONG_REPLIES:.0%} of those replies are wrong, and {WRONG_VERDICTS:.0%} of the judge's findings, "
        "both ways."
    )
    template = "demo-real.yaml"
    agent = AGENT
    system_prompt = SYSTEM_PROMPT
    max_tokens = MAX_TOKENS

    def draw(self, *, development: bool) -> None:
        recorded, asked = TEACHER.draw(TEACHER_MESSAGES, self._seed), DESK.draw(DESK_MESSAGES, self._seed)
        self._measured = (DEVELOPMENT if development else HELD_OUT).draw(HELD_OUT_MESSAGES, self._seed)
        self._models = Models([*recorded, *asked, *self._measured], self._seed)
        self.recorded, self.asked, self.held_out = (
            [message.text for message in messages] for messages in (recorded, asked, self._measured)
        )

    def teach(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._models.teach(request)

    def judge(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._models.judge(request)

    def check(self, answers: Sequence[str]) -> Result:
        return result(self._measured, answers)

    def second_turn(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """GRPO also asks messages again whose answers were partly right."""
        rubric = yaml.safe_load(Path(settings["filter"]["rubric"]).read_text(encoding="utf-8"))
        improve = self.write("improve.yaml", {**rubric, "id": "support-desk-improve", "threshold": IMPROVE_THRESHOLD})
        return {**super().second_turn(settings), "filter": {"rubric": str(improve)}}
