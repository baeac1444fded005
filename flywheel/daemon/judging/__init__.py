"""Judging in the daemon: which tasks, with which judge, and what it reports."""
