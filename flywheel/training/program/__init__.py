"""Rollouts of the user's own agent, in child processes."""
