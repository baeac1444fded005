"""Scores that people gave in Langfuse, for `flywheel labels import scores.jsonl`: `python langfuse_scores.py`.

It needs `pip install langfuse` (version 5) and the project's keys in LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY. On
servers before version 4, pages of `GET /api/public/v2/scores` can be imported as they are.
"""

import json
from pathlib import Path

from langfuse import Langfuse

api, cursor = Langfuse().api.scores, None
with Path("scores.jsonl").open("w") as file:
    while True:
        page = api.get_many(source="ANNOTATION", fields="details,subject,annotation", cursor=cursor)
        for score in page.data:
            of = score.subject
            place = {"trace_id": of.id} if of.kind == "trace" else {"trace_id": of.trace_id, "span_id": of.id}
            line = {**place, "name": score.name, "value": score.value, "comment": score.comment}
            line |= {"by": score.author_user_id, "source": score.source, "at": score.updated_at}
            file.write(json.dumps(line, default=str) + "\n")
        if not (cursor := page.meta.cursor):
            break
