"""Annotations of Phoenix, for `flywheel labels import annotations.jsonl`: `python phoenix_annotations.py`.

It needs `pip install arize-phoenix-client pandas`.
"""

from phoenix.client import Client

client = Client()
spans = client.spans.get_spans_dataframe(project_identifier="default")
annotations = client.spans.get_span_annotations_dataframe(spans_dataframe=spans, project_identifier="default")
# The trace is needed where people annotate another span than the agent's.
annotations["trace_id"] = spans["context.trace_id"]
annotations.reset_index().to_json("annotations.jsonl", orient="records", lines=True, date_format="iso")
