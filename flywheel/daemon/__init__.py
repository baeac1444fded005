"""The daemon: composes reading, claims, rounds and swaps. It never imports torch, vLLM or Ray."""
