"""Is the candidate better? The comparison on held-out tasks, and the gate that decides from it."""
