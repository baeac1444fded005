"""Writes the table of chat templates in benchmarks/results/chat-templates.md: `python -m scripts.template_table`.

Each cell is tried with the genuine template and vLLM's renderer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from flywheel.training.engine.chat_rendering import NoSampleError
from tests.factories.chat_rendering import Served
from tests.factories.chat_templates import FAMILIES, SHAPES, asked, recorded, served_with

PAGE: Final = Path(__file__).parent.parent / "benchmarks" / "results" / "chat-templates.md"
BEGIN: Final = "This table is generated (`python -m scripts.template_table`); a test tries each cell again.\n\n"
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
    """The table of the page: cells by template and shape."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition("\n\n")[0].splitlines()
    (_, *shapes), _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(shapes, row[1:], strict=True)) for row in rows}


def table() -> str:
    shapes = [*SHAPES, UNTHOUGHT]
    rows = [["template of TRL", *shapes], ["---"] * (len(shapes) + 1)]
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            serving = served_with(family, Path(folder))
            served = next(serving)
            rows.append([family, *(outcome(served, shape) for shape in shapes)])
            next(serving, None)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + begin + table() + "\n\n" + rest.partition("\n\n")[2])
