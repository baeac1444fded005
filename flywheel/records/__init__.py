"""Plain frozen records that pass between the rooms; no input or output."""
