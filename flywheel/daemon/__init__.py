"""The daemon: composes reading, judging, rounds and swaps. It never imports torch, vLLM or Ray."""
