"""The prompts of a genuine agent have as many tokens as its model calls record, unless a message was hidden."""

from __future__ import annotations

import pytest

from flywheel.training.data.prompts import TOLERANCE, Prompt, asked
from tests.conftest import POLICY
from tests.factories.task import round_task
from tests.sources.studio.reading import FIXTURE, line_of, replies


@pytest.mark.slow
@pytest.mark.training
def test_only_prompts_without_a_hidden_message_are_as_long_as_what_was_sent() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    prompts = []
    for reply in replies(FIXTURE).values():
        if reply.skip is None and reply.model == "my-agent":
            rendered = tokenizer.apply_chat_template(
                line_of(reply)["prompt"], add_generation_prompt=True, tokenize=False
            )
            token_ids = tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])
            name = f"{'exact' if not reply.prompt_reason else 'hidden'} {reply.span_id}"
            prompts.append(Prompt(round_task(name, prompt_tokens=reply.prompt_tokens), token_ids))
    found = asked(prompts, {}, max_model_len=4096)
    assert {each.task.task_id.split()[0] for each in found.prompts} == {"exact"}
    assert {name.split()[0] for name in found.inexact} == {"hidden"}
    assert len(found.inexact) == 20
    for each in prompts:
        if each.task.task_id.startswith("exact"):
            assert abs(len(each.token_ids) - each.task.prompt_tokens) <= 1 < TOLERANCE
