"""A request gets another model, and nothing else, in time that grows with the body's length alone.

Another model is a last member of the object: of several with one name, the server reads the last.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.serving.server import asgi, middleware
from flywheel.serving.server.asgi import MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS, MAX_MODEL_KEYS
from flywheel.serving.server.middleware import Rewritten
from flywheel.system.server_limits import RefusedError
from tests.processor_time import least_seconds


def rewrite_model(
    body: bytes, resolve: Callable[[str], str | None], request_id: Callable[[str], str] | None = None
) -> Rewritten:
    """Of aliases in no A/B test."""
    return middleware.rewrite_model(body, lambda model, _: resolve(model), request_id)


ALIASES = {"agent": "agent@r0007", "代理/a": "代理/a@r0001", "same": "same"}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from([*ALIASES]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just("model"), inner, max_size=4),
    max_leaves=20,
)
layouts = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.none() | st.integers(0, 3),
        "separators": st.sampled_from([None, (",", ":"), (" , ", " : ")]),
    }
)


@given(st.dictionaries(st.text() | st.sampled_from(["model", "messages"]), values), layouts)
def test_only_the_top_level_model_changes(document: dict[str, object], layout: dict[str, object]) -> None:
    text = json.dumps(document, **layout)  # type: ignore[arg-type]
    body = text.encode("utf-8", "surrogatepass")
    rewritten = rewrite_model(body, ALIASES.get).body
    model = document.get("model")
    if isinstance(model, str) and model in ALIASES:
        assert json.loads(rewritten) == {**document, "model": ALIASES[model]}
        assert rewritten.startswith(body.rstrip()[:-1]), "what the client sent stays as it is"
    else:
        assert rewritten == body


@pytest.mark.slow
@given(st.dictionaries(st.text() | st.sampled_from(["model", "request_id", "input"]), values), layouts)
def test_a_request_to_an_alias_gets_a_request_id(document: dict[str, object], layout: dict[str, object]) -> None:
    body = json.dumps(document, **layout).encode("utf-8", "surrogatepass")  # type: ignore[arg-type]
    rewritten, target = rewrite_model(body, ALIASES.get, lambda target: f"resp_{target}")
    if target is None:
        assert rewritten == body
    else:
        assert json.loads(rewritten) == {**document, "model": target, "request_id": f"resp_{target}"}


@given(st.binary() | st.text().map(str.encode) | values.map(json.dumps).map(str.encode))
def test_what_is_no_json_object_is_left_to_the_server(body: bytes) -> None:
    rewritten = rewrite_model(body, ALIASES.get).body
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        assert rewritten == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"model": "agent"}], "model": "agent"}',
        b'{"model": "agent", "a": 1e400, "b": 1.10}',
        b'{"model": "\\u0061gent"}',
        b'{"\\u006dodel": "agent"}',
        b'{"model": "agent", "model": "agent"}',
        b'{"model": 7, "model": "agent"}',
        b'\n { "model"\t: "agent" } \n',
        b'{"text": "\\ud800", "model": "agent"}',
        b'{"text": "\xed\xa0\x80", "model": "agent"}',
        b'{"model": "agent", "seed": ' + b"1" * 4000 + b"}",
        b'{"model": "agent", "a": NaN}',
        b'{"model": "agent", "a": [-Infinity, {"b": Infinity}]}',
        b'\xef\xbb\xbf{"model": "agent"}',
        '{"model": "agent", "a": "ü"}'.encode("utf-16-le"),
        '{"model": "agent", "a": "\u5b5b\u7b7b"}'.encode("utf-16-be"),
        '{"model": "agent", "a": "ü"}'.encode("utf-32"),
    ],
)
def test_what_the_server_reads_is_rewritten(body: bytes) -> None:
    """Also what msgspec refuses."""
    rewritten = rewrite_model(body, {"agent": "X"}.get)
    assert rewritten.target == "X"
    # By their texts: NaN is not equal to itself.
    assert repr(json.loads(rewritten.body)) == repr(json.loads(body) | {"model": "X"})


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": ["agent"]}',
        b'{"model": "agent"',
        b'{"model": "agent"}}',
        b'{"model": "agent"} x',
        b'{"model": "ag\tent"}',
        b'{"model": "ag\\xent"}',
        b'{"model": "agent", "a": nan}',
        b'{"model": "agent", "model": 7}',
        '{"model": "other"}'.encode("utf-16-be"),
        b'"agent"',
        b"",
    ],
)
def test_what_names_no_alias_is_left_to_the_server(body: bytes) -> None:
    assert rewrite_model(body, {"agent": "X"}.get) == Rewritten(body, None)


def test_the_target_is_that_of_the_model_that_counts() -> None:
    def target(body: bytes) -> str | None:
        return rewrite_model(body, {"agent": "X", "other": "Y"}.get).target

    assert target(b'{"model": "agent"}') == "X"
    assert target(b'{"model": "agent", "model": "other"}') == "Y"
    assert target(b'{"model": "agent", "model": "tiny"}') is None
    assert target(b'{"model": "agent", "model": null}') is None
    assert target(b'{"messages": []}') is None


def test_a_body_with_many_models_is_refused_before_they_are_looked_at() -> None:
    """It took 85 s of the server's event loop."""
    few = b"{" + b",".join([b'"model":"a"'] * MAX_MODEL_KEYS) + b"}"
    assert json.loads(rewrite_model(few, {"a": "X"}.get).body) == {"model": "X"}
    looked_up: list[str] = []
    for count, keys in ((MAX_MODEL_KEYS + 1, "4 `model` keys"), (200_000, "1,000 keys")):
        body = b"{" + b",".join([rb'"m\u006fdel":"a"'] * count) + b"}"
        with pytest.raises(RefusedError, match=f"more than {keys}") as refused:
            rewrite_model(body, looked_up.append)
        assert refused.value.status == 400
    assert looked_up == []


def test_a_body_with_many_keys_is_refused() -> None:
    keys = [f'"k{number}":0'.encode() for number in range(MAX_KEYS)]
    assert rewrite_model(b"{" + b",".join(keys) + b"}", ALIASES.get).target is None
    with pytest.raises(RefusedError, match="more than 1,000 keys"):
        rewrite_model(b"{" + b",".join([*keys, b'"model":"a"']) + b"}", ALIASES.get)
    # Neither values nor the keys of inner objects count; keys with one name do.
    inner = b'{"model": "agent", "a": {' + b",".join(keys * 2) + b'}, "b": "' + b":" * 2000 + b'"}'
    assert rewrite_model(inner, {"agent": "X"}.get).target == "X"
    texts = [rb'"k%d":":\":"' % number for number in range(MAX_KEYS)]
    assert rewrite_model(b"{" + b",".join(texts) + b"}", ALIASES.get).target is None


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_a_deeply_nested_body_is_refused(brackets: str) -> None:
    left, right = ('{"a":', "}") if brackets == "{}" else ("[", "]")

    def nested(levels: int) -> bytes:
        return ('{"model": "agent", "a": ' + left * (levels - 1) + "1" + right * (levels - 1) + "}").encode()

    assert rewrite_model(nested(MAX_DEPTH), {"agent": "X"}.get).target == "X"
    for levels in (MAX_DEPTH + 1, 500, 100_000):
        with pytest.raises(RefusedError, match="nested") as refused:
            rewrite_model(nested(levels), {"agent": "X"}.get)
        assert refused.value.status == 400
    with pytest.raises(RefusedError, match="nested"):
        rewrite_model(b"[" * 100_000, ALIASES.get)


@pytest.mark.parametrize("brackets", [b"[]", b"{}", b'{"a":[]}'])
def test_a_body_of_many_objects_and_lists_is_refused(brackets: bytes) -> None:
    each = brackets.count(b"[") + brackets.count(b"{")
    most = MAX_CONTAINERS // each - 1

    def of(count: int) -> bytes:
        return b'{"model": "agent", "a": [' + b",".join([brackets] * count) + b"]}"

    assert rewrite_model(of(most), {"agent": "X"}.get).target == "X"
    with pytest.raises(RefusedError, match="more than 50,000 objects and lists") as refused:
        rewrite_model(of(most + 2), {"agent": "X"}.get)
    assert refused.value.status == 400
    # Of all values together.
    two = of(most)[:-1] + b', "b": ' + of(most) + b"}"
    with pytest.raises(RefusedError, match="objects and lists"):
        rewrite_model(two, {"agent": "X"}.get)


@given(values)
def test_brackets_in_texts_are_not_counted(value: object) -> None:
    with mock.patch.object(asgi, "MAX_CONTAINERS", containers(value)):
        for ensure_ascii in (True, False):
            body = json.dumps({"model": "agent", "a": value}, ensure_ascii=ensure_ascii).encode()
            assert rewrite_model(body, {"agent": "X"}.get).target == "X"
    if least := containers(value):
        with (
            mock.patch.object(asgi, "MAX_CONTAINERS", least - 1),
            pytest.raises(RefusedError, match="objects and lists"),
        ):
            rewrite_model(body, {"agent": "X"}.get)


def containers(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


def test_values_are_not_built() -> None:
    """Millions of them would take the server's event loop seconds."""
    body = b'{"model": "agent", "a": {' + b",".join(b'"%d":%d' % (n, n) for n in range(300_000)) + b"}}"
    gc.collect()
    tracemalloc.start()
    try:
        rewrite_model(body, {"agent": "X"}.get)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * len(body), "the text, its parts and the result; the values would take 12 times as much"


@pytest.mark.parametrize(
    "body",
    [
        lambda size: b'{"a": "' + rb"\"" * size,
        lambda size: b'{"a": "' + rb"\\" * size,
        lambda size: b'{"a": ' + b'"",' * size,
        lambda size: b'{"a": [' + b"[]," * size + b"[]]}",
        lambda size: b"{" + b" " * size + b'"model": "a"}',
        lambda size: b"{" + b'"model":"a",' * size + b'"b":0}',
        lambda size: b'{"model":"' + b"a" * size + b'"}',
        lambda size: b"}" * size,
    ],
    ids=["escaped quotes", "backslashes", "texts", "lists", "spaces", "models", "one long model", "closed"],
)
def test_64_times_the_body_takes_about_64_times_as_long(body: Callable[[int], bytes]) -> None:
    def rewrite(made: bytes) -> None:
        with contextlib.suppress(RefusedError):
            rewrite_model(made, {"a": "agent@r0001"}.get)

    short, long = least_seconds(*(partial(rewrite, body(size)) for size in (1_000, 64_000)))
    # Quadratic time is 4,096 times as long.
    assert long < 512 * short
