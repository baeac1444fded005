"""Rounds in the daemon: when one begins, on which tasks, and its worker process."""
