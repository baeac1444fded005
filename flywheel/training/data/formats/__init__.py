"""The formats of `flywheel export`, by name: one for each program that reads tasks."""

from __future__ import annotations

from typing import Final

from flywheel.training.data.formats import agentscope, trl
from flywheel.training.data.formats.export_format import ExportSample as ExportSample
from flywheel.training.data.formats.export_format import Format as Format
from flywheel.training.data.formats.export_format import FormatName as FormatName
from flywheel.training.data.formats.export_format import JsonLinesWriter
from flywheel.training.data.formats.export_format import LeftOut as LeftOut
from flywheel.training.data.formats.export_format import typed_columns as typed_columns
from flywheel.training.data.formats.verl import VerlWriter, verl

FORMATS: Final = {
    known.name: known
    for known in (
        Format(FormatName.AGENTJET, "jsonl", agentscope.agentjet, JsonLinesWriter),
        Format(FormatName.TRINITY, "jsonl", agentscope.trinity, JsonLinesWriter),
        Format(FormatName.TRL_GRPO, "jsonl", trl.grpo, JsonLinesWriter),
        Format(FormatName.TRL_SFT, "jsonl", trl.sft, JsonLinesWriter),
        Format(FormatName.TRL_DPO, "jsonl", trl.dpo, JsonLinesWriter, paired=True),
        Format(FormatName.VERL, "parquet", verl, VerlWriter),
    )
}
