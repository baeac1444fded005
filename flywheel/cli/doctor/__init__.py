"""The doctor: checks whether an installation works and what it lacks. It reads and changes nothing.

torch, vLLM and Ray are never imported here: versions come from package metadata, GPUs from a separate process.
"""
