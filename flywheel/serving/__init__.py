"""Serving: vLLM behind a stable alias, adapters loaded, proven and swapped without losing a request."""
