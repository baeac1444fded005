"""What runs inside the vLLM server, and the command that starts it."""
