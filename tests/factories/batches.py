"""Lines of OpenAI's batch interface."""

from __future__ import annotations

from typing import Any


def request(number: int, said: str = "", *, custom_id: str = "", **body: Any) -> dict[str, Any]:
    """A request for a chat; `body` has keys of its body."""
    asked = {"role": "user", "content": said or f"What is {number} plus 1?"}
    return {
        "custom_id": custom_id or f"request-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "gpt-4.1", "messages": [{"role": "system", "content": "Add."}, asked], **body},
    }


def response(number: int, said: str | None = None, *, custom_id: str = "", **message: Any) -> dict[str, Any]:
    """The response to a request; `message` has keys of its message."""
    answer = {"role": "assistant", "content": str(number + 1) if said is None else said, **message}
    body = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1_760_000_000 + number,
        "model": "gpt-4.1-2025-04-14",
        "choices": [{"index": 0, "message": answer, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23},
    }
    return {
        "id": f"batch_req_{number}",
        "custom_id": custom_id or f"request-{number}",
        "response": {"status_code": 200, "request_id": f"r-{number}", "body": body},
        "error": None,
    }


def failed(number: int, *, status: int = 0) -> dict[str, Any]:
    """A line about a request that was not answered: it expired, or the server refused it with this status."""
    error = {"code": "batch_expired", "message": "This request could not be executed before the completion window."}
    body = {"error": {"message": "Rate limit reached", "type": "requests"}}
    return {
        "id": f"batch_req_{number}",
        "custom_id": f"request-{number}",
        "response": {"status_code": status, "request_id": f"r-{number}", "body": body} if status else None,
        "error": None if status else error,
    }
