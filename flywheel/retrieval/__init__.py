"""Retrieval of tools: an index over hundreds or thousands of them, an encoder trained on the calls of judged traces,
and its evaluation. Reads no state: commands pass the tasks."""
