"""Serving: vLLM behind a stable alias, adapters loaded, verified and swapped without losing a request."""
