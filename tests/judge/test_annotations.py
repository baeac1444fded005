"""Annotations as Langfuse, Phoenix and MLflow export them."""

from __future__ import annotations

import base64
import csv
import io
import json
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import ConfigError
from flywheel.judge.annotations import read_annotations, spellings, usable
from flywheel.judge.labels import PersonLabel, read_labels
from flywheel.records.states import Label

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
COMMENT = 'it says "seven",\nnot 7'
SPAN = "00f067aa0ba902b7"

LANGFUSE: dict[str, Any] = {
    "id": "f6b0d3a2-5c1e-4a57-9b53-1f0c2d3e4f50",
    "timestamp": "2026-11-20T10:00:00.000Z",
    "projectId": "clkpwwm0m000gmm094odg11gi",
    "environment": "default",
    "name": "correct",
    "value": 1,
    "stringValue": "True",
    "dataType": "BOOLEAN",
    "source": "ANNOTATION",
    "authorUserId": "clkpwwm0m000gmm094odg11ab",
    "comment": None,
    "metadata": {},
    "configId": "clkpwwm0m000gmm094odg11cd",
    "queueId": None,
    "traceId": TRACE,
    "observationId": None,
    "sessionId": None,
    "datasetRunId": None,
    "createdAt": "2026-11-20T10:00:01.000Z",
    "updatedAt": "2026-11-20T10:05:00.000Z",
    "trace": {"userId": "the-user-of-the-agent", "tags": [], "environment": "default"},
}
"""An element of `data` of `GET /api/public/v2/scores`."""
LANGFUSE_CSV = {
    "id": "f6b0d3a2", "traceId": TRACE, "sessionId": "", "datasetRunId": "", "timestamp": "2026-11-20T10:00:00.000Z",
    "source": "ANNOTATION", "name": "correct", "dataType": "CATEGORICAL", "value": "0", "stringValue": "bad",
    "comment": COMMENT, "metadata": "{}", "observationId": SPAN, "traceName": "chat",
    "userId": "the-user-of-the-agent", "traceTags": "[]", "environment": "default", "authorUserName": "Ann",
}  # fmt: skip
"""A row of the export from its web UI."""
PHOENIX: dict[str, Any] = {
    "span_id": SPAN, "id": "U3A6MQ==", "created_at": "2026-11-20T10:00:00+00:00",
    "updated_at": "2026-11-20T10:05:00+00:00", "source": "APP", "user_id": "VXNlcjoy", "annotation_name": "correct",
    "annotator_kind": "HUMAN", "metadata": {}, "identifier": "", "result.label": "good", "result.score": 1.0,
    "result.explanation": "boxed",
}  # fmt: skip
"""A row of `get_span_annotations_dataframe`, by `to_json(orient="records", lines=True)`."""
PHOENIX_REST: dict[str, Any] = {
    "id": "U3A6MQ==", "created_at": "2026-11-20T10:00:00+00:00", "updated_at": "2026-11-20T10:05:00+00:00",
    "source": "API", "user_id": None, "name": "correct", "annotator_kind": "HUMAN", "span_id": SPAN,
    "result": {"label": None, "score": 0.25, "explanation": None}, "metadata": {}, "identifier": "bob",
}  # fmt: skip
"""An element of `data` of `GET /v1/projects/…/span_annotations`."""
MLFLOW: dict[str, Any] = {
    "assessment_id": "a-b410bbbb227e4a7da6bec74e59b0e6d9", "assessment_name": "correct", "trace_id": f"tr-{TRACE}",
    "source": {"source_type": "HUMAN", "source_id": "ann@example.org"}, "create_time": "2026-11-20T10:00:00.476Z",
    "last_update_time": "2026-11-20T10:05:00.476Z", "feedback": {"value": False}, "rationale": "no", "valid": True,
}  # fmt: skip
"""What `to_dictionary` of an assessment gives."""


def use(*lines: dict[str, Any], **values: Any) -> tuple[list[tuple[Any, PersonLabel]], Counter[str]]:
    return usable(lines, **{"by": "me", "whole": "", "accept_from": None, "also": (), **values})


@pytest.mark.parametrize(
    ("line", "place", "label"),
    [
        (
            LANGFUSE,
            (TRACE, ""),
            ("clkpwwm0m000gmm094odg11ab", Label.ACCEPT, "", "2026-11-20T10:05:00.000+00:00"),
        ),
        (LANGFUSE_CSV, (TRACE, SPAN), ("Ann", Label.REJECT, COMMENT, "2026-11-20T10:00:00.000+00:00")),
        (PHOENIX, ("", SPAN), ("VXNlcjoy", Label.ACCEPT, "boxed", "2026-11-20T10:05:00.000+00:00")),
        (PHOENIX_REST, ("", SPAN), ("bob", Label.REJECT, "", "2026-11-20T10:05:00.000+00:00")),
        (MLFLOW, (f"tr-{TRACE}", ""), ("ann@example.org", Label.REJECT, "no", "2026-11-20T10:05:00.476+00:00")),
        ({"trace_id": TRACE, "verdict": "good"}, (TRACE, ""), ("me", Label.ACCEPT, "", "")),
        (
            {"span_id": SPAN, "verdict": "unsure", "who": "eve", "at": "2026-11-20T12:00:00+02:00", "reason": "?"},
            ("", SPAN),
            ("eve", Label.UNSURE, "?", "2026-11-20T10:00:00.000+00:00"),
        ),
        ({"trace_id": TRACE, "verdict": False}, (TRACE, ""), ("me", Label.REJECT, "", "")),
    ],
)  # fmt: skip
def test_the_fields_of_each_tool_are_read(
    line: dict[str, Any], place: tuple[str, str], label: tuple[str, Label, str, str]
) -> None:
    [(said, found)], left_out = use(line, accept_from=0.5)
    assert not left_out
    assert (said.trace, said.span) == place
    assert (found.by, found.label, found.comment, found.at) == label
    assert found.criterion == ("correct" if len(line) > 10 or "feedback" in line else "")
    [(_, whole)], _ = use(line, accept_from=0.5, whole="correct")
    assert whole.criterion == ""


def test_what_is_left_out_is_counted_with_its_reason() -> None:
    found, left_out = use(
        {**PHOENIX, "annotator_kind": "LLM"},
        {**LANGFUSE, "source": "EVAL"},
        {**LANGFUSE, "source": "API"},
        {**LANGFUSE, "source": "API", "id": "flywheel-0123"},
        {**MLFLOW, "source": {"source_type": "LLM_JUDGE", "source_id": "gpt"}},
        {**MLFLOW, "valid": False},
        {key: value for key, value in MLFLOW.items() if key != "feedback"},
        {**LANGFUSE, "value": 0, "stringValue": "partly right"},
        {**PHOENIX_REST},
        {**LANGFUSE, "updatedAt": "yesterday"},
        {**LANGFUSE, "traceId": [TRACE]},
    )
    assert found == []
    assert left_out == {
        "it was made by LLM, not by a person; --also LLM takes it": 1,
        "it was made by EVAL, not by a person; --also EVAL takes it": 1,
        "it was made by API, not by a person; --also API takes it": 1,
        "Flywheel itself has sent it": 1,
        "it was made by LLM_JUDGE, not by a person; --also LLM_JUDGE takes it": 1,
        "it was replaced by a later one": 1,
        "it has neither a verdict nor a score": 1,
        "'partly right' is neither accept nor reject": 1,
        "it has only a score: set --accept-from X, the lowest score that accepts a reply": 1,
        "its `updatedAt` cannot be read": 1,
        "its `traceId` cannot be read": 1,
    }


def test_other_kinds_of_annotators_are_taken_if_asked_for_under_their_own_names() -> None:
    llm = {**PHOENIX, "annotator_kind": "LLM", "user_id": None}
    judge = {**MLFLOW, "source": {"source_type": "LLM_JUDGE", "source_id": "gpt"}}
    found, left_out = use(llm, judge, {**LANGFUSE, "source": "EVAL"}, also=["llm", "LLM_JUDGE"])
    assert [label.by for _, label in found] == ["LLM", "gpt"]
    assert left_out.total() == 1


@given(score=st.floats(0, 1), least=st.floats(0, 1), as_text=st.booleans())
def test_a_score_accepts_from_the_threshold_on(score: float, least: float, as_text: bool) -> None:
    # CSV has numbers as text.
    line = {"trace_id": TRACE, "score": f"{score:.6f}" if as_text else score}
    [(_, label)], _ = use(line, accept_from=least)
    assert label.label is (Label.ACCEPT if (round(score, 6) if as_text else score) >= least else Label.REJECT)


def test_a_score_of_one_is_no_verdict() -> None:
    """On a scale from 1 to 5, it is the worst."""
    found, left_out = use({"trace_id": TRACE, "score": 1}, {"trace_id": TRACE, "value": "1"})
    assert (found, left_out.total()) == ([], 2)
    [(_, label)], _ = use({"trace_id": TRACE, "verdict": 1})
    assert label.label is Label.ACCEPT


@given(st.binary(min_size=8, max_size=8) | st.binary(min_size=16, max_size=16))
def test_an_id_is_found_in_every_spelling(raw: bytes) -> None:
    text = raw.hex()
    plain = base64.b64encode(raw).decode()
    number = int(text, 16)
    for spelling in (text, text.upper(), f"tr-{text}", f" {text}\n", plain, plain.rstrip("="),
                     base64.urlsafe_b64encode(raw).decode(), f"0x{text}", f"0X{text.upper()}", f"{number:#x}",
                     str(number), f"trace:/{text}", f"trace:/main.agents.traces/{text}",
                     f"trace:/main.agents/tr-{text}"):  # fmt: skip
        assert text in spellings(spelling), spelling
    if len(raw) == 16:
        uuid = str(UUID(text))
        for spelling in (uuid, uuid.upper(), f"tr-{uuid}"):
            assert text in spellings(spelling), spelling
        assert uuid in spellings(text), "the state has ids as the source has them"
    assert spellings(" ") == set()


def test_an_id_may_be_a_number_of_128_bits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"trace_id": {int(TRACE, 16)}, "verdict": "good", "score": NaN}}\n')
    lines = read_annotations(tmp_path / "a.jsonl")
    assert lines is not None
    [(said, label)], _ = use(*lines)
    assert TRACE in spellings(said.trace) and label.label is Label.ACCEPT


@pytest.mark.parametrize(
    "write",
    [
        lambda lines: "".join(json.dumps(line) + "\n\n" for line in lines),
        lambda lines: json.dumps(lines, indent=2),
        lambda lines: json.dumps({"data": lines, "meta": {"page": 1}}),
    ],
)
def test_a_file_has_lines_an_array_or_the_answer_of_an_api(tmp_path: Path, write: Any) -> None:
    (tmp_path / "a.json").write_text(write([LANGFUSE, PHOENIX]))
    assert read_annotations(tmp_path / "a.json") == [LANGFUSE, PHOENIX]


def test_csv_is_read_with_its_quotes(tmp_path: Path) -> None:
    table = io.StringIO()
    writer = csv.DictWriter(table, list(LANGFUSE_CSV))
    writer.writeheader()
    writer.writerow(LANGFUSE_CSV)
    (tmp_path / "a.CSV").write_bytes(b"\xef\xbb\xbf" + table.getvalue().encode())
    assert read_annotations(tmp_path / "a.CSV") == [LANGFUSE_CSV]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.csv", "b.csv", "c.csv", "d.tsv", "e.jsonl", "f.json"])
def test_tables_and_lines_are_read_in_each_encoding(tmp_path: Path, encoding: str, name: str) -> None:
    line = {**LANGFUSE_CSV, "comment": 'sieben; "sept", sjö \u2028 seitsemän\tsju\nsept'}
    text = json.dumps(line, ensure_ascii=False)
    if (delimiter := {"a.csv": ",", "b.csv": ";", "c.csv": "\t", "d.tsv": "\t"}.get(name)) is not None:
        table = io.StringIO()
        writer = csv.DictWriter(table, list(line), delimiter=delimiter)
        writer.writeheader()
        writer.writerow(line)
        text = table.getvalue()
    (tmp_path / name).write_bytes(text.encode(encoding))
    assert read_annotations(tmp_path / name) == [line]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_label_files_are_read_in_each_encoding(tmp_path: Path, encoding: str) -> None:
    lines = [{"query": f"q{number} sjö\u2028", "answer": "a", "verdict": "good"} for number in range(2)]
    text = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "labels.jsonl").write_bytes(text.encode(encoding))
    labels = read_labels(tmp_path / "labels.jsonl").labels
    assert [label.exchange.query for label in labels] == [line["query"] for line in lines]


def test_a_decimal_comma_is_read_and_what_may_be_a_thousand_is_left_out() -> None:
    scores = ("0,8", "0,125", "3,5", "1,000", "1,5,2")
    found, left_out = use(*({"trace_id": TRACE, "score": score} for score in scores), accept_from=0.5)
    assert [label.label for _, label in found] == [Label.ACCEPT, Label.REJECT, Label.ACCEPT]
    assert left_out == {"'1,000' is neither accept nor reject": 1, "'1,5,2' is neither accept nor reject": 1}


def test_label_files_and_broken_files_are_not_of_another_tool(tmp_path: Path) -> None:
    for text in ('{"task_id": "t-1", "verdict": "accept"}', '{"query": "q", "trace_id": "1"}', "no JSON", "[1]"):
        (tmp_path / "l.jsonl").write_text(text)
        assert read_annotations(tmp_path / "l.jsonl") is None
    assert read_annotations(tmp_path / "missing.jsonl") is None
    for text in ("", "[]", '{"data": []}'):
        (tmp_path / "l.jsonl").write_text(text)
        with pytest.raises(ConfigError, match="it has none"):
            read_annotations(tmp_path / "l.jsonl")


def _langfuse() -> ModuleType:
    """Its SDK, with two scores on two pages: of a trace and of a span."""
    scores = [
        SimpleNamespace(
            subject=subject, name="correct", value=1.0, comment=COMMENT, author_user_id="ann", source="ANNOTATION",
            updated_at=datetime(2026, 11, 20, 10, 5, tzinfo=UTC),
        )
        for subject in (
            SimpleNamespace(kind="trace", id=TRACE),
            SimpleNamespace(kind="observation", id=SPAN, trace_id=TRACE),
        )
    ]  # fmt: skip

    def get_many(*, cursor: str | None, **_: str) -> SimpleNamespace:
        at = int(cursor or 0)
        return SimpleNamespace(data=[scores[at]], meta=SimpleNamespace(cursor=None if at else "1"))

    module = ModuleType("langfuse")
    api = SimpleNamespace(scores=SimpleNamespace(get_many=get_many))
    vars(module)["Langfuse"] = lambda: SimpleNamespace(api=api)
    return module


def _phoenix() -> ModuleType:
    pandas = pytest.importorskip("pandas")
    spans = pandas.DataFrame({"context.trace_id": [TRACE]}, index=pandas.Index([SPAN], name="span_id"))
    rows = pandas.DataFrame([PHOENIX]).set_index("span_id")
    client = SimpleNamespace(
        get_spans_dataframe=lambda **_: spans, get_span_annotations_dataframe=lambda **_: rows.copy()
    )
    module = ModuleType("phoenix.client")
    vars(module)["Client"] = lambda: SimpleNamespace(spans=client)
    return module


def _mlflow() -> ModuleType:
    assessment = SimpleNamespace(to_dictionary=lambda: MLFLOW)
    module = ModuleType("mlflow")
    found = [SimpleNamespace(info=SimpleNamespace(assessments=[assessment]))]
    vars(module)["search_traces"] = lambda **_: found
    return module


@pytest.mark.parametrize(
    ("example", "module", "places"),
    [
        ("langfuse_scores", _langfuse, [(TRACE, ""), (TRACE, SPAN)]),
        ("phoenix_annotations", _phoenix, [(TRACE, SPAN)]),
        ("mlflow_assessments", _mlflow, [(f"tr-{TRACE}", "")]),
    ],
)
def test_the_examples_write_what_is_read(
    example: str,
    module: Callable[[], ModuleType],
    places: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    made = module()
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setitem(sys.modules, "phoenix", ModuleType("phoenix"))
    monkeypatch.chdir(tmp_path)
    program = Path(__file__).parents[2] / "examples" / "annotations" / f"{example}.py"
    runpy.run_path(str(program))
    [file] = tmp_path.iterdir()
    assert f"`flywheel labels import {file.name}`" in program.read_text()
    found, left_out = use(*(read_annotations(file) or ()), accept_from=0.5)
    assert not left_out
    assert [(said.trace, said.span) for said, _ in found] == places
    assert {label.criterion for _, label in found} == {"correct"}
