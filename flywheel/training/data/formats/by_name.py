"""All formats of `flywheel export`, by name."""

from __future__ import annotations

from functools import partial
from typing import Final

from flywheel.training.data.formats import agentscope, table, trl
from flywheel.training.data.formats.export_format import Format, FormatName, JsonLinesWriter
from flywheel.training.data.formats.parquet import ParquetWriter
from flywheel.training.data.formats.verl import verl, verl_schema

FORMATS: Final = {
    known.name: known
    for known in (
        Format(FormatName.AGENTJET, "jsonl", agentscope.agentjet, JsonLinesWriter),
        Format(FormatName.TRINITY, "jsonl", agentscope.trinity, JsonLinesWriter),
        Format(FormatName.TRL_GRPO, "jsonl", trl.grpo, JsonLinesWriter),
        Format(FormatName.TRL_SFT, "jsonl", trl.sft, JsonLinesWriter),
        Format(FormatName.TRL_DPO, "jsonl", trl.dpo, JsonLinesWriter, paired=True),
        Format(FormatName.VERL, "parquet", verl, partial(ParquetWriter, schema=verl_schema)),
        Format(FormatName.CSV, "csv", table.row, table.CsvWriter, is_table=True),
        Format(FormatName.PARQUET, "parquet", table.row, table.TableWriter, is_table=True),
    )
}
