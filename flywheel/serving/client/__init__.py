"""The client of a vLLM server: its replicas, swapping an adapter, and the proof of its weights."""
