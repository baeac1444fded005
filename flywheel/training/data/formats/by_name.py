"""All formats of `flywheel export`, by name."""

from __future__ import annotations

from functools import partial
from typing import Final

from flywheel.training.data.formats import agentscope, table, trl
from flywheel.training.data.formats.export_format import Format, FormatName, json_lines
from flywheel.training.data.formats.parquet import parquet
from flywheel.training.data.formats.verl import verl, verl_schema

FORMATS: Final = {
    known.name: known
    for known in (
        Format(FormatName.AGENTJET, "jsonl", agentscope.agentjet, json_lines),
        Format(FormatName.TRINITY, "jsonl", agentscope.trinity, json_lines),
        Format(FormatName.TRL_GRPO, "jsonl", trl.grpo, json_lines),
        Format(FormatName.TRL_SFT, "jsonl", trl.sft, json_lines),
        Format(FormatName.TRL_DPO, "jsonl", trl.dpo, json_lines, paired=True),
        Format(FormatName.VERL, "parquet", verl, partial(parquet, schema=verl_schema)),
        Format(FormatName.CSV, "csv", table.row, table.csv_rows, is_table=True),
        Format(FormatName.PARQUET, "parquet", table.row, table.parquet_rows, is_table=True),
    )
}
