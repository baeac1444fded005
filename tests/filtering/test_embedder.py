"""The embedder against a real HTTP server: batches, order, retries, and what cannot be embedded."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from flywheel.errors import FilterError
from flywheel.filtering.deduplication import Deduplication
from flywheel.filtering.embedder import Embedder
from tests.embedding_server import EmbeddingServer, by_words


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as running:
        yield running


def embed(server: EmbeddingServer, texts: list[str], **params: object) -> list[bytes]:
    settings = Deduplication.model_validate({"model": "m", "base_url": server.base_url, **params})
    embedder = Embedder(settings, longest_wait=0.01)
    try:
        return embedder.embed(texts)
    finally:
        embedder.close()


def test_texts_go_in_batches_and_vectors_come_back_in_order_with_length_1(server: EmbeddingServer) -> None:
    texts = [f"word{n} and others" for n in range(7)]
    vectors = [array("f", vector) for vector in embed(server, texts, batch_size=3)]
    assert [len(request) for request in server.requests] == [3, 3, 1]
    for text, vector in zip(texts, vectors, strict=True):
        wanted = by_words(text)
        assert sum(value * value for value in vector) == pytest.approx(1)
        assert max(range(64), key=lambda n: vector[n]) in [n for n in range(64) if wanted[n] == max(wanted)]


def test_the_key_is_that_of_the_parameters_then_of_the_environment(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    embed(server, ["a"])
    embed(server, ["a"], api_key="given")
    monkeypatch.delenv("OPENAI_API_KEY")
    embed(server, ["a"])
    assert server.keys == ["Bearer from-the-environment", "Bearer given", "Bearer none"]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_tried_again(server: EmbeddingServer, status: int) -> None:
    server.failures = [status, status]
    assert len(embed(server, ["a"])) == 1
    assert len(server.requests) == 3


def test_an_endpoint_that_stays_away_is_told_as_such(server: EmbeddingServer) -> None:
    server.status = 503
    with pytest.raises(FilterError, match="The tasks wait") as caught:
        embed(server, ["a"], max_attempts=2)
    assert caught.value.retryable
    assert len(server.requests) == 2


@pytest.mark.parametrize(("status", "hint"), [(401, "OPENAI_API_KEY"), (403, "access"), (404, "base_url")])
def test_a_refusal_names_the_setting_and_is_not_tried_again(server: EmbeddingServer, status: int, hint: str) -> None:
    server.status = status
    with pytest.raises(FilterError, match=hint):
        embed(server, ["a"])
    assert len(server.requests) == 1


def test_a_text_that_is_not_taken_costs_the_others_nothing(server: EmbeddingServer) -> None:
    server.refused = {"bad"}
    good, bad, fine = embed(server, ["good", "bad", "fine"])
    assert good
    assert bad == b""
    assert fine


@pytest.mark.parametrize(
    "body",
    [
        {"data": []},
        {"data": [{"index": 0, "embedding": []}]},
        {"data": [{"index": 0, "embedding": [0.0, 0.0]}]},
        {"error": {"message": "in a reply that says it is good"}},
        [1, 2],
    ],
)
def test_a_reply_that_is_none_is_a_failure(server: EmbeddingServer, body: object) -> None:
    server.body = body
    with pytest.raises(FilterError):
        embed(server, ["a"])


def test_lone_surrogates_and_empty_texts_are_sent_as_something(server: EmbeddingServer) -> None:
    assert all(embed(server, ["\ud800x", "", "x" * 100_000]))
    assert server.texts[0] == "?x"
    assert len(server.texts[2]) == 8000
