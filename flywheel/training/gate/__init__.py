"""The gate: whether a candidate is better than the adapter it would replace."""
