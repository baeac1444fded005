"""Scene 2: an agent with a tool that adds, which the small model learns to call."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from demo.checks import Result, share
from demo.two_turns import TEACHER, TwoTurns, text_of
from flywheel.cli.demo import judge
from flywheel.cli.demo.questions import SYSTEM_PROMPT, Question, large_sum

if TYPE_CHECKING:
    from agentscope.tool import Toolkit

TEMPLATE: Final = Path(__file__).parent / "tool_chat.jinja"
"""The model's own chat template has no tools."""
WRONG_REPLIES: Final = 0.15
RECORDED: Final = 48
ASKED: Final = 160
HELD_OUT: Final = 96


class Calculator(TwoTurns):
    """It learns to add with a tool. Held-out sums are in no other question."""

    about = (
        "learns to add with a tool, which it cannot without. The large model whose trajectories are recorded, and "
        f"the judge, are scripts: {WRONG_REPLIES:.0%} of those trajectories guess or call it with a wrong number."
    )
    template = "demo-real-agent.yaml"
    budgets: ClassVar[Mapping[str, int]] = {
        **TwoTurns.budgets,
        # An answer is two calls of the model, and the steps are fewer.
        "turn 1, measured": 90,
        "turn 2: the deployed model answers": 90,
        "turn 2: GRPO, gate and swap": 320,
        "turn 2, measured": 80,
    }
    agent = "calculator"
    system_prompt = SYSTEM_PROMPT
    max_tokens = 48
    max_calls = 3

    def draw(self, *, development: bool) -> None:
        chosen = random.Random(self._seed)
        drawn: dict[tuple[int, int], Question] = {}
        while len(drawn) < RECORDED + ASKED + 2 * HELD_OUT:
            a, b, question = large_sum(chosen)
            drawn.setdefault((a, b), question)
        questions = list(drawn.values())
        self.recorded, self.asked = (
            [question.text for question in questions[start : start + count]]
            for start, count in ((0, RECORDED), (RECORDED, ASKED))
        )
        place = RECORDED + ASKED + (HELD_OUT if development else 0)
        self._measured = questions[place : place + HELD_OUT]
        self.held_out = [question.text for question in self._measured]
        self._sums = {question.text: numbers for numbers, question in drawn.items()}

    def settings(self, judge_url: str, port: int) -> dict[str, Any]:
        settings = super().settings(judge_url, port)
        arguments = [*settings["serving"]["extra_args"], "--chat-template", str(TEMPLATE)]
        return {**settings, "serving": {**settings["serving"], "extra_args": arguments}}

    def teach(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The large model calls the tool, and then says its result in a box."""
        messages = request["messages"]
        sent = len(json.dumps(messages))
        asked = next(text_of(message) for message in messages if message["role"] == "user")
        a, b = self._sums[asked]
        if messages[-1]["role"] == "tool":
            return judge.completion(TEACHER, f"\\boxed{{{text_of(messages[-1])}}}", sent)
        chosen = random.Random(f"{self._seed} {asked}")
        if chosen.random() < WRONG_REPLIES:
            if chosen.random() < 0.5:
                return judge.completion(TEACHER, f"\\boxed{{{chosen.randint(200, 1998)}}}", sent)
            b += chosen.choice((-100, -10, 10, 100))
        call = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
        made = judge.completion(TEACHER, "", sent)
        [choice] = made["choices"]
        calls = [{"id": f"call-{uuid.uuid4().hex[:8]}", "type": "function", "function": call}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        return {**made, "choices": [{**choice, "message": message, "finish_reason": "tool_calls"}]}

    def judge(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return judge.complete(request)

    def toolkit(self) -> Toolkit:
        from agentscope.tool import FunctionTool, Toolkit

        from demo.tool_workflow import add

        return Toolkit(tools=[FunctionTool(add, is_read_only=True)])

    def check(self, answers: Sequence[str]) -> Result:
        """`right` is the share of answers with the right number in a box."""
        checked = (
            (question.text, judge.examine(question.text, answer))
            for question, answer in zip(self._measured, answers, strict=True)
        )
        right = share([(text, float(found.right and found.boxed)) for text, found in checked])
        return Result({"right": right}, len(answers))
