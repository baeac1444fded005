"""Whether a reply's prompt is exactly what the model was sent, as far as its trace tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flywheel import exclusion
from flywheel.sources.studio import attributes as at
from flywheel.sources.studio.messages import FINISH_FUNCTIONS
from flywheel.sources.studio.span import Span
from flywheel.trace import ChatMessage


def prompt_reason(first: Span | None, given: Sequence[ChatMessage], prompt: Sequence[ChatMessage]) -> str:
    """Why it is not, empty where nothing is known to be missing.

    `first` is the first model call of the reply and `given` what that was given, without an empty message at its end
    and without the functions that hand in answers.
    """
    return "; ".join(_reasons(first, given, prompt))


def _reasons(first: Span | None, given: Sequence[ChatMessage], prompt: Sequence[ChatMessage]) -> Iterator[str]:
    if first is None or not given:
        # Also AgentScope 2.0.0 to 2.0.6.
        yield exclusion.NOT_RECORDED
        return
    if at.hides_a_message(first):
        yield exclusion.HIDDEN_MESSAGE
    calls = (call for message in at.conversation(first) for call in message.get("tool_calls", ()))
    called = {call["function"]["name"] for call in calls}
    if list(given) != list(prompt) or called & FINISH_FUNCTIONS:
        yield exclusion.OTHERWISE
    if at.holds_media(first):
        yield exclusion.IMAGE
    if at.offers_a_finish(first):
        yield exclusion.FINISH_FUNCTION
    if at.sets_template_parameters(first):
        yield exclusion.TEMPLATE_PARAMETERS
