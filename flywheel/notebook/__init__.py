"""Functions for Python programs and notebooks: judge replies, and read a state as tables."""
