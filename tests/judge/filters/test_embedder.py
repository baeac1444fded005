"""The embedder against a real HTTP server: batches, order, retries, and what cannot be embedded."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from flywheel.errors import FilterError
from flywheel.judge.filters.deduplication import Deduplication, Embedder
from tests.factories.embedding_server import EmbeddingServer, by_words


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


def test_a_key_that_is_refused_is_followed_by_the_next(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS", "one|two")
    monkeypatch.setenv("MORE_KEYS", "three")
    keys = {"api_key_env": "KEYS", "backup_api_key_env": "MORE_KEYS"}
    server.failures = [401, 429]
    assert len(embed(server, ["a", "b"], batch_size=1, **keys)) == 2
    assert server.keys == ["Bearer one", "Bearer two", "Bearer three", "Bearer three"]
    server.status = 401
    with pytest.raises(FilterError, match="Put the right key into KEYS"):
        embed(server, ["a"], **keys)
    assert server.keys[-3:] == ["Bearer one", "Bearer two", "Bearer three"]


def test_a_key_that_cannot_be_sent_is_an_error_in_words(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS", "schlüssel")
    with pytest.raises(FilterError, match="its key cannot be sent") as refused:
        embed(server, ["a"], api_key_env="KEYS")
    assert "Put the right key into KEYS" in refused.value.hint
    assert "schl" not in str(refused.value)
    monkeypatch.setenv("KEYS", "schlüssel|two")
    assert len(embed(server, ["a"], api_key_env="KEYS")) == 1
    assert server.keys == ["Bearer two"]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_tried_again(server: EmbeddingServer, status: int) -> None:
    server.failures = [status, status]
    assert len(embed(server, ["a"])) == 1
    assert len(server.requests) == 3


def test_an_endpoint_that_stays_away_is_told_as_such(server: EmbeddingServer) -> None:
    server.status = 503
    with pytest.raises(FilterError, match="The tasks wait") as caught:
        embed(server, ["b"], max_attempts=2)
    assert caught.value.retryable
    # Two tries, and one of a text that every model takes.
    assert server.requests == [["b"], ["b"], ["a"]]


@pytest.mark.parametrize(("status", "hint"), [(401, "OPENAI_API_KEY"), (403, "access"), (404, "base_url")])
def test_a_refusal_names_the_setting_and_is_not_tried_again(server: EmbeddingServer, status: int, hint: str) -> None:
    server.status = status
    with pytest.raises(FilterError, match=hint):
        embed(server, ["a"])
    assert len(server.requests) == 1


def test_a_text_that_is_not_taken_costs_the_others_nothing(server: EmbeddingServer) -> None:
    server.refused = {"bad": 400}
    good, bad, fine = embed(server, ["good", "bad", "fine"])
    assert good
    assert bad == b""
    assert fine


@pytest.mark.slow
@pytest.mark.parametrize("attempts", [1, 2])
def test_a_text_on_which_the_model_breaks_costs_the_others_nothing(server: EmbeddingServer, attempts: int) -> None:
    server.refused = {"bad": 500}
    texts = [*(f"word{n}" for n in range(9)), "bad", *(f"more{n}" for n in range(6))]
    vectors = embed(server, texts, max_attempts=attempts)
    assert [text for text, vector in zip(texts, vectors, strict=True) if not vector] == ["bad"]


def test_a_failure_that_passes_while_a_plain_text_is_taken_costs_no_vector(server: EmbeddingServer) -> None:
    server.failures = [500, 200]
    assert all(embed(server, ["word"], max_attempts=1))


@pytest.mark.parametrize("vector", [[0.0] * 64, [None] * 64, [float("nan")] * 64, [10**400] * 64, "AAAA", None])
def test_a_text_without_a_vector_costs_the_others_nothing(server: EmbeddingServer, vector: object) -> None:
    server.embed = lambda text: vector if text == "bad" else by_words(text)
    good, bad, fine = embed(server, ["good", "bad", "fine"], max_attempts=1)
    assert good
    assert bad == b""
    assert fine


def test_vectors_of_several_lengths_are_of_several_models(server: EmbeddingServer) -> None:
    server.embed = lambda text: [1.0] * len(text)
    for size in (1, 2):
        with pytest.raises(FilterError, match="more than one model"):
            embed(server, ["one", "three"], batch_size=size)


@pytest.mark.slow
def test_a_batch_that_is_too_large_is_asked_in_halves(server: EmbeddingServer) -> None:
    server.most = 10
    assert all(embed(server, [f"word{n}" for n in range(64)]))
    assert max(len(request) for request in server.requests if len(request) <= 10) == 8
    server.most, server.status, server.said = 1 << 20, 429, "Request too large for m on tokens per min: limit 40000"
    with pytest.raises(FilterError):
        embed(server, ["c", "d"], max_attempts=3)
    # It is not asked again as it is: that can never fit.
    assert server.requests[-2:] == [["c", "d"], ["a"]]


def test_an_endpoint_that_takes_no_text_at_all_gives_no_empty_vectors(server: EmbeddingServer) -> None:
    server.status, server.said = 400, "encoding_format: extra fields not permitted"
    with pytest.raises(FilterError, match="extra fields"):
        embed(server, ["b", "c"])


def test_it_is_asked_again_when_it_wants_to_be_unless_that_is_too_late(server: EmbeddingServer) -> None:
    server.retry_after, server.failures = "0.01", [429] * 5
    assert all(embed(server, ["b"], max_attempts=6))
    server.retry_after, server.status = "3600", 429
    asked = len(server.requests)
    with pytest.raises(FilterError, match="429") as caught:
        embed(server, ["b"], max_attempts=6)
    assert caught.value.retryable
    assert len(server.requests) == asked + 1


@pytest.mark.slow
def test_an_answer_that_drips_is_not_waited_for(server: EmbeddingServer) -> None:
    server.drips = True
    with pytest.raises(FilterError, match=r"no complete response within 0\.5 s"):
        embed(server, ["b"], max_attempts=1, timeout_seconds=0.5)


@pytest.mark.parametrize("url", ["127.0.0.1:9/v1", "ftp://127.0.0.1/v1", "http://"])
def test_what_is_no_address_is_said_to_be_none(url: str) -> None:
    with pytest.raises(FilterError, match="no URL") as caught:
        Embedder(Deduplication(model="m", base_url=url))
    assert not caught.value.retryable


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
