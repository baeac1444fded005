"""What `flywheel export` writes: one format for each program that reads tasks. No store access."""

from __future__ import annotations

from typing import Final

from flywheel.formats import agentscope, trl
from flywheel.formats.export_format import Format, FormatName, LeftOut, Sample, traits
from flywheel.formats.verl import verl
from flywheel.formats.writer import JsonLines, VerlTable

__all__ = ["FORMATS", "Format", "FormatName", "LeftOut", "Sample", "traits"]

FORMATS: Final = {
    known.name: known
    for known in (
        Format(FormatName.AGENTJET, "jsonl", agentscope.agentjet, JsonLines),
        Format(FormatName.TRINITY, "jsonl", agentscope.trinity, JsonLines),
        Format(FormatName.TRL_GRPO, "jsonl", trl.grpo, JsonLines),
        Format(FormatName.TRL_SFT, "jsonl", trl.sft, JsonLines),
        Format(FormatName.TRL_DPO, "jsonl", trl.dpo, JsonLines, paired=True),
        Format(FormatName.VERL, "parquet", verl, VerlTable),
    )
}
