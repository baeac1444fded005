"""Writes benchmarks/results/chat-templates.tsv, what a chat template lets train: `python -m scripts.template_table`.

Each cell is tried with the genuine template of TRL and vLLM's renderer.

- `yes`: a reply of this form is trained. `in part`: without its reasoning, for which the template has no place.
- `no`: it is left out. The template does not write its `calls` or `text`; ends the `prompt` with what it does not
  write in a message (`<think>`); writes no `end` at which the server stops; or writes `reasoning`, and none was
  recorded (`training.sft.reasoning: empty` trains these with an empty one).
- `refused`: it is left out, since the template raises an error.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flywheel.training.engine.chat_rendering import NoSampleError
from tests.factories.chat_rendering import Served
from tests.factories.chat_templates import FAMILIES, SHAPES, asked, recorded, served_with

TABLE: Final = Path(__file__).parent.parent / "benchmarks" / "results" / "chat-templates.tsv"
FIRST: Final = "template of TRL"
UNTHOUGHT: Final = "answer, no reasoning recorded"

CELLS: Final = {
    "does not write its calls": "calls",
    "does not write its text": "text",
    "no token at which the server stops": "end",
    "does not write it behind its prompt": "prompt",
    "reasoning was not recorded": "reasoning",
}
"""By the reason why there is no sample."""


def outcome(served: Served, shape: str) -> str:
    """What becomes of a reply, as a cell of the table."""
    reply = SHAPES["answer" if shape == UNTHOUGHT else shape]
    try:
        made = recorded(served, asked(*reply), empty=shape != UNTHOUGHT)
    except NoSampleError as error:
        return "no: " + next(cell for reason, cell in CELLS.items() if reason in str(error))
    except Exception:
        return "refused"
    return "in part" if made.without else "yes"


def documented() -> dict[str, dict[str, str]]:
    """The cells of the file by template and shape."""
    with TABLE.open(encoding="utf-8", newline="") as lines:
        return {row.pop(FIRST): row for row in csv.DictReader(lines, delimiter="\t")}


def rows() -> Iterator[list[str]]:
    shapes = [*SHAPES, UNTHOUGHT]
    yield [FIRST, *shapes]
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            serving = served_with(family, Path(folder))
            served = next(serving)
            yield [family, *(outcome(served, shape) for shape in shapes)]
            next(serving, None)


if __name__ == "__main__":
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows())
