"""Readers of Studio databases, JSONL files and OTLP, and the connectors that store what they read."""
