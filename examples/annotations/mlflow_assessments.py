"""Assessments of MLflow, for `flywheel labels import assessments.jsonl`: `python mlflow_assessments.py`.

It needs `pip install mlflow`. Expectations, and assessments that a later one replaces, are left out by the import.
"""

import json
from pathlib import Path

import mlflow

with Path("assessments.jsonl").open("w") as file:
    for trace in mlflow.search_traces(return_type="list"):
        for assessment in trace.info.assessments:
            file.write(json.dumps(assessment.to_dictionary()) + "\n")
