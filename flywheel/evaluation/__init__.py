"""Evaluation of a candidate: the paired comparison on held-out tasks, its statistics, and the gate."""
